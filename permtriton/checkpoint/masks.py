"""The masks of pruned linears and the orders of their channels, of a folder or of a model in memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from permtriton.checkpoint.folder import Folder
from permtriton.errors import ConfigError
from permtriton.util.output_files import path_of
from permtriton.util.permutation import inverse
from permtriton.util.sparsity import PrunedWeight

Order = Literal["dense", "saved"]


@dataclass(frozen=True)
class Masks:
    """The masks and orders of all pruned linears. A weight is read only when its mask is computed.

    Attributes:
        record: content of ``permtriton.json``.
        pruned: pruned parameter -> its input dimension and pattern.
        read: returns the parameter of a name, or which of its weights are not zero, in the shape that it has in the
            model.
    """

    record: Mapping[str, Any]
    pruned: Mapping[str, PrunedWeight]
    read: Callable[[str], Tensor]

    @property
    def linears(self) -> list[str]:
        """Names of the pruned linears, in the order in which they run."""
        return [linear for site in self.record["sites"] for linear in site["linears"]]

    def permutation(self, linear: str) -> Tensor:
        """Returns the order of the input channels of a linear: channel ``j`` was channel ``index[j]``.

        Args:
            linear: name of a pruned linear, or of a site, whose linears share the order.

        Returns:
            Index, int64 ``[in_features]``: column ``j`` of the saved weight was column ``index[j]`` of the dense one.

        Raises:
            ConfigError: there is no such linear or site.
        """
        sites = {name: site for site in self.record["sites"] for name in (site["name"], *site["linears"])}
        if linear not in sites:
            close = get_close_matches(linear, self.linears) or self.linears[-1:]
            raise ConfigError(f"no pruned linear is called {linear!r}; the names are such as {', '.join(close)}")
        return torch.tensor(sites[linear]["index"])

    def mask(self, linear: str, order: Order = "dense") -> Tensor:
        """Returns which weights of a linear are kept, that is, are not 0.

        Args:
            linear: name of a pruned linear, such as ``model.layers.0.mlp.down_proj``.
            order: ``dense`` for the dense model's order of rows and columns, in which masks of several compilations
                can be compared; ``saved`` for the order of the saved weight, in which groups are consecutive channels.

        Returns:
            bool ``[out_features, in_features]``.

        Raises:
            ConfigError: there is no such linear, or ``order`` has another value.
            ModelError: the folder is damaged.
        """
        if order not in ("dense", "saved"):
            raise ConfigError(f"order is {order!r}: expected dense or saved")
        columns = self.permutation(linear)
        kept = self._weight(linear) != 0
        if order == "saved":
            return kept
        rows = next((entry["index"] for entry in self.record["rows"] if linear in entry["linears"]), range(len(kept)))
        return kept[inverse(torch.tensor(rows))][:, inverse(columns)]

    def _weight(self, linear: str) -> Tensor:
        """Returns a linear's weight, ``[out_features, in_features]``; that of an expert is taken out of its stack."""
        name = f"{linear}.weight"
        if pruned := self.pruned.get(name):
            return pruned.rows(self.read(name))
        # One expert of a stack: experts.3.down_proj is experts.down_proj[3].
        experts, _, projection = linear.rpartition(".")
        owner, _, number = experts.rpartition(".")
        if (pruned := self.pruned.get(stack := f"{owner}.{projection}")) is None:
            raise ConfigError(f"{linear} is a site: name one of its linears")
        return replace(pruned, dim=pruned.dim - 1).rows(self.read(stack)[int(number)])


def read_masks(folder: str | Path) -> Masks:
    """Returns the masks of a folder that ``permtriton compile`` or ``permtriton export`` wrote, in any format.

    Raises:
        ModelError: permtriton did not write the folder, or the folder is damaged.

    Example:
        >>> import permtriton
        >>> masks = permtriton.read_masks("my-model-2of4")
        >>> masks.mask("model.layers.0.mlp.down_proj").float().mean()
        tensor(0.5000)
    """
    return masks_of(Folder(path_of("folder", folder)))


def masks_of(folder: Folder) -> Masks:
    return Masks(folder.record, folder.pruned, folder.kept)

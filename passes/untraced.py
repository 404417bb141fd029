"""Untraced parameters: those that the trace did not use, and the channels that they may reach with other inputs.

A trace runs on token ids. What a model does with images, with an encoder's states or with an adapter is not in the
graph, but an image projector writes into the residual stream, and a cross-attention reads it. A channel space may
therefore move only if no untraced parameter can carry its channels. An untraced parameter is considered

* for channels that stay inside one layer (an MLP's intermediate channels, a head's values), if it belongs to the lowest
  module that contains all that writes or reads them;
* for all other channels (the residual stream), if it is anywhere in the model.

Such a parameter can carry the channels if one of its dimensions is a multiple of the space's width. Equality is not
required: a projection to twice the width may be split into a scale and a shift.
"""

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from permtriton.passes.plan import Site, layer_of


class Untraced:
    """The parameters of a model that a trace did not use.

    Args:
        used: Names of the parameters that the graph uses.

    Attributes:
        shapes: Parameter name -> shape, for the untraced parameters with more than one element.
    """

    def __init__(self, model: nn.Module, used: Collection[str]) -> None:
        self._model = model
        self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n not in used and p.numel() > 1}

    def reach(self, names: Iterable[str], readers: Sequence[Site]) -> str:
        """Returns why a space with axes on ``names`` is fixed; "" if no untraced parameter can carry its channels."""
        scope = _common_module(names)
        if not layer_of(self._model, scope):
            scope = ""
        prefix = f"{scope}." if scope else ""
        widths = sorted({width for site in readers for width in (site.channels, site.space.units) if width > 1})
        for name, shape in self.shapes.items():
            for width in widths:
                if name.startswith(prefix) and any(size % width == 0 for size in shape):
                    return (
                        f"{name} {list(shape)}, which token ids alone do not reach, may write or read its {width} "
                        "channels"
                    )
        return ""


def _common_module(names: Iterable[str]) -> str:
    """Returns the path of the lowest module that holds all ``names`` of parameters or modules."""
    paths = [name.split(".")[:-1] for name in names]
    shared = 0
    while all(len(path) > shared for path in paths) and len({path[shared] for path in paths}) == 1:
        shared += 1
    return ".".join(paths[0][:shared])

"""What a trace found out: which channels may be reordered together, who produces them and who reads them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

LINEAR_MODULES = (nn.Linear, Conv1D)


@dataclass(frozen=True)
class Axis:
    """One dimension of one parameter, and which unit of a channel space each of its positions belongs to.

    Attributes:
        parameter: name in ``model.named_parameters()`` (of the first of tied names).
        dim: dimension of the parameter.
        units: int64 ``[size of the dimension]``; -1 where a position belongs to no unit of the space.
        roles: int64 ``[size of the dimension]``; tells the positions of one unit apart (a gate row, its up row).
        reads: whether the dimension is the input side of a linear (its columns), not a producer.
    """

    parameter: str
    dim: int
    units: Tensor
    roles: Tensor
    reads: bool

    def expand(self, index: Tensor) -> Tensor:
        """Returns the index over the positions of this dimension that a permutation of the units means.

        A unit with several positions (a gate row and its up row; a value row read by several query heads) moves all
        of them, each to the one of its role, positions of one role in their order.

        Args:
            index: int64 ``[units]``.

        Returns:
            int64 ``[size of the dimension]``; positions outside the space stay.
        """
        positions, starts = self._by_unit(index.numel())
        units = self.units[positions]
        offsets = torch.arange(positions.numel()) - starts[units]
        expanded = torch.arange(self.units.numel())
        expanded[positions] = positions[starts[index.cpu()[units]] + offsets]
        return expanded

    def exchangeable(self, segments: Sequence[int]) -> bool:
        """Whether all units of each segment have the same roles here, so that each position has one to move to."""
        positions, starts = self._by_unit(sum(segments))
        roles, units = self.roles[positions], self.units[positions]
        first = torch.repeat_interleave(
            torch.tensor(segments).cumsum(0) - torch.tensor(segments), torch.tensor(segments)
        )
        counts = torch.bincount(units, minlength=first.numel())
        if not torch.equal(counts, counts[first]):
            return False
        offsets = torch.arange(positions.numel()) - starts[units]
        return torch.equal(roles, roles[starts[first[units]] + offsets])

    def _by_unit(self, units: int) -> tuple[Tensor, Tensor]:
        """Positions inside the space sorted by (unit, role, position), and where each unit's begin."""
        positions = torch.nonzero(self.units >= 0).squeeze(1)
        positions = positions[torch.argsort(self.roles[positions], stable=True)]
        positions = positions[torch.argsort(self.units[positions], stable=True)]
        counts = torch.bincount(self.units[positions], minlength=units)
        return positions, counts.cumsum(0) - counts


@dataclass
class ChannelSpace:
    """Channels that one permutation orders: the residual stream, a head's values, an MLP's intermediate channels.

    Attributes:
        name: ``stream``, or the name of the first site that reads it.
        segments: sizes of the runs of units inside which units may change places (a head, or everything).
        axes: every parameter dimension that carries these channels; folding permutes each once.
        frozen: why no permutation is possible; empty where one is.
        at_run_time: whether no producer takes the permutation on: the channels are gathered when the model runs.
    """

    name: str
    segments: tuple[int, ...]
    axes: tuple[Axis, ...]
    frozen: str = ""
    at_run_time: bool = False

    @property
    def units(self) -> int:
        """How many channels the permutation orders."""
        return sum(self.segments)

    def blocks(self, block_size: int) -> list[tuple[int, int]]:
        """Returns (start, size) of each block of units; the last block of a segment may be smaller."""
        found, start = [], 0
        for segment in self.segments:
            offsets = range(0, segment, block_size)
            found += [(start + offset, min(block_size, segment - offset)) for offset in offsets]
            start += segment
        return found

    @property
    def producers(self) -> list[Axis]:
        """The axes whose parameters write these channels."""
        return [axis for axis in self.axes if not axis.reads]


@dataclass(frozen=True)
class Norm:
    """A norm module that can write its channels in a permuted order.

    Attributes:
        module: name of the norm module.
        kind: ``rms``, ``rms_float`` or ``layer``, as `permtriton.kernels.norm_permute` has them.
        eps: what is added to the variance.
        offset: what is added to the weight: 1.0 for ``1 + weight``, else 0.0.
    """

    module: str
    kind: str
    eps: float
    offset: float


@dataclass
class Site:
    """One activation read by one or more pruned linears.

    Attributes:
        name: the linears' common path and their own names: ``layers.0.mlp.gate_proj+up_proj``.
        linears: module names, in execution order.
        channels: input channels.
        units: int64 ``[channels]``: the unit of ``space`` at each input channel.
        space: the permutation that orders the channels.
        layer: the layer's number in its module list, or -1.
        runs: how often the linears run in one forward pass; more than once where layers share their weights.
        norm: the norm that writes the channels in the site's order at run time; None where the permutation is folded,
            or where each linear gathers its input.
    """

    name: str
    linears: tuple[str, ...]
    channels: int
    units: Tensor
    space: ChannelSpace
    layer: int = -1
    runs: int = 1
    norm: Norm | None = None

    @property
    def cost(self) -> Literal["none", "norm", "gather"]:
        """What the permutation costs at run time: nothing, a gather inside the norm, or a gather a linear."""
        if self.space.frozen or not self.space.at_run_time:
            return "none"
        return "norm" if self.norm else "gather"

    def expand(self, index: Tensor) -> Tensor:
        """Returns the index ``[channels]`` over this site's input channels for a unit index of its space."""
        return Axis("", 0, self.units, torch.zeros_like(self.units), reads=True).expand(index)

    @property
    def copies(self) -> int:
        """How many input channels share a unit (query heads that share a key/value head)."""
        return self.channels // self.space.units if self.space.segments else 1


@dataclass
class Plan:
    """Every site, every channel space, and every linear that is left alone with its reason.

    Attributes:
        sites: in execution order.
        spaces: in order of first use by a site.
        skipped: module or parameter name -> reason.
        barriers: reasons met while tracing, each once.
        hidden_space: the space that orders the last hidden state's channels, or None.
        hidden_units: int64: the unit of ``hidden_space`` at each channel of the last hidden state.
        unseen: names of the parameters that the trace did not use: an image's projector, cross-attention.
    """

    sites: list[Site]
    spaces: list[ChannelSpace]
    skipped: dict[str, str] = field(default_factory=dict)
    barriers: list[str] = field(default_factory=list)
    hidden_space: ChannelSpace | None = None
    hidden_units: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    unseen: tuple[str, ...] = ()

    def linears(self) -> Iterator[tuple[Site, str]]:
        """Yields every pruned linear with its site."""
        for site in self.sites:
            for name in site.linears:
                yield site, name

    def sites_of(self, space: ChannelSpace) -> list[Site]:
        """Returns the sites that ``space`` orders."""
        return [site for site in self.sites if site.space is space]

    def layers(self) -> list[list[Site]]:
        """Returns the sites grouped by consecutive layer, in execution order."""
        groups: list[list[Site]] = []
        for site in self.sites:
            if groups and groups[-1][0].layer == site.layer and site.layer >= 0:
                groups[-1].append(site)
            else:
                groups.append([site])
        return groups


def weight_in_out(module: nn.Module) -> Tensor:
    """Returns a linear's weight as a detached view ``[in_features, out_features]``, however the module keeps it."""
    weight = module.get_parameter("weight").detach()
    return weight if isinstance(module, Conv1D) else weight.t()


def linear_module(model: nn.Module, name: str) -> nn.Module:
    """Returns the pruned linear called ``name``."""
    module = model.get_submodule(name)
    assert isinstance(module, LINEAR_MODULES), f"{name} is a {type(module).__name__}"
    return module


def layer_modules(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """Returns the items of the outermost module lists that hold sites, in execution order."""
    found: dict[str, nn.Module] = {}
    for _, name in plan.linears():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            if isinstance(model.get_submodule(".".join(parts[:depth])), nn.ModuleList):
                layer = ".".join(parts[: depth + 1])
                found[layer] = model.get_submodule(layer)
                break
    return list(found.values())

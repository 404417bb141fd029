"""The plan of a model: which channels one permutation orders, which parameters write them and which read them."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from permtriton.errors import VerificationError
from permtriton.kernels.norm_permute import NormVariant
from permtriton.model.modules import LINEAR_MODULES
from permtriton.model.name import layer_number
from permtriton.model.nm_checks import check_weight
from permtriton.util.permutation import is_permutation
from permtriton.util.sparsity import NMPattern, in_words


class Destination(StrEnum):
    """Where a permutation is applied in the compiled model, which decides its cost at run time."""

    FOLDED = "folded"  # in the parameters that write the channels, at no cost
    IN_NORM = "in_norm"  # in the norm before the site, which writes its output in the site's order
    GATHER = "gather"  # in front of the site's linears, each of which gathers its input
    NONE = "none"  # nowhere: the channels keep their order


@dataclass(frozen=True)
class Axis:
    """One dimension of one parameter, with the unit of a channel space that each of its positions belongs to."""

    parameter: str  # name in ``model.named_parameters()``; the first name of a tied parameter
    dim: int  # dimension of the parameter
    units: Tensor  # unit of each position, int64 ``[size of the dimension]``; -1 outside the space
    # role of each position, int64 ``[size of the dimension]``; distinguishes positions of the same unit, such as a
    # gate row and its up row
    roles: Tensor
    # whether the dimension is the input of a linear (its columns) and reads the channels; all other dimensions write
    # them
    is_input: bool

    def expand(self, index: Tensor) -> Tensor:
        """Returns the index over the positions of this dimension for a permutation ``index`` of the units.

        A unit may have several positions: a gate row and its up row, or the input channels of several query heads that
        share a value row. Each position takes the place of one with the same role in the unit that its unit replaces;
        several positions with the same role keep their order.

        Returns:
            int64 ``[size of the dimension]``; positions outside the space stay.
        """
        positions, starts, offsets = self._by_unit(index.numel())
        expanded = torch.arange(self.units.numel())
        expanded[positions] = positions[starts[index.cpu()[self.units[positions]]] + offsets]
        return expanded

    def exchangeable(self, segments: Sequence[int]) -> bool:
        """Whether all units of a segment have the same roles on this axis, so that `expand` can exchange them."""
        positions, starts, offsets = self._by_unit(sum(segments))
        roles, units = self.roles[positions], self.units[positions]
        sizes = torch.tensor(segments)
        segment_start = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)  # first unit of each unit's segment
        counts = torch.bincount(units, minlength=segment_start.numel())
        if not torch.equal(counts, counts[segment_start]):
            return False
        return torch.equal(roles, roles[starts[segment_start[units]] + offsets])

    def _by_unit(self, num_units: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sorts the positions inside the space by (unit, role, position).

        Returns:
            The sorted positions; where each unit starts among them; the place of each sorted position in its unit.
        """
        positions = torch.nonzero(self.units >= 0).squeeze(1)
        positions = positions[torch.argsort(self.roles[positions], stable=True)]
        positions = positions[torch.argsort(self.units[positions], stable=True)]
        counts = torch.bincount(self.units[positions], minlength=num_units)
        starts = counts.cumsum(0) - counts
        return positions, starts, torch.arange(positions.numel()) - starts[self.units[positions]]


@dataclass
class ChannelSpace:
    """Channels that one permutation orders: the residual stream, the heads' values, or an MLP's intermediate channels.

    The permutation moves units. A unit is one channel, or several channels that move together.
    """

    name: str  # ``stream``, or the name of the first site that reads the space
    # sizes of the segments: consecutive units that may change places with each other, such as one head
    segments: tuple[int, ...]
    axes: tuple[Axis, ...]  # every parameter dimension that carries these channels; folding permutes each of them once
    placement: Destination = Destination.FOLDED  # where the permutation is applied
    reason: str = ""  # why the channels keep their order, if ``placement`` is ``NONE``; else empty
    norm: "Norm | None" = None  # norm that writes the permuted order, if ``placement`` is ``IN_NORM``
    # least number of consecutive units that are whole N:M groups in every linear that reads them; set by `Plan`
    group_units: int = 1

    def freeze(self, reason: str) -> None:
        self.placement, self.reason = Destination.NONE, reason

    @property
    def frozen(self) -> bool:
        return self.placement is Destination.NONE

    @property
    def units(self) -> int:
        return sum(self.segments)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(First unit, size) of each segment."""
        return [(end - size, size) for end, size in zip(accumulate(self.segments), self.segments, strict=True)]

    @property
    def segment_of(self) -> Tensor:
        """Index of each unit's segment, int64 ``[units]``."""
        return torch.repeat_interleave(torch.arange(len(self.segments)), torch.tensor(self.segments))

    def check(self, index: Tensor) -> None:
        """Refuses a unit index that is no permutation, or that moves units to another segment."""
        segment, index = self.segment_of, index.cpu()
        is_bijection = index.shape == segment.shape and is_permutation(index)
        if not is_bijection or not torch.equal(segment[index], segment):
            problem = "moves units from one segment (a head) to another" if is_bijection else "is not a permutation"
            raise VerificationError(
                f"{self.name}: the order found for its {self.units} units {problem}. Nothing was saved; this is a bug "
                "in permtriton, please report it"
            )

    def blocks(self, block_size: int) -> list[tuple[int, int]]:
        """Returns (start, size) of each block of units; the last block of a segment may be smaller."""
        return [
            (start + offset, min(block_size, size - offset))
            for start, size in self.spans
            for offset in range(0, size, block_size)
        ]


@dataclass(frozen=True)
class Norm:
    """A norm module of a kind that permtriton knows."""

    module: str  # name of the norm module
    variant: NormVariant  # norm that the module computes


@dataclass(frozen=True)
class Residual:
    """The residual stream that a linear's output is added to, and what is applied to the output before the addition."""

    reader: str  # name of the module whose only input is the residual stream
    norm: Norm | None  # norm that the output passes before it is added
    factor: float  # number that the output is multiplied by between that norm and the addition


@dataclass
class Site:
    """One activation that one or more pruned linears read; or several activations that each of the linears reads."""

    name: str  # path that the linears share and their own names: ``layers.0.mlp.gate_proj+up_proj``
    linears: tuple[str, ...]  # names of the linear modules, in execution order
    channels: int  # number of input channels
    units: Tensor  # unit of ``space`` at each input channel, int64 ``[channels]``
    space: ChannelSpace  # channel space of the input channels; its permutation orders them
    # names of the layers that hold the linears, such as ``decoder.layers.0``; empty outside of layers
    layer_paths: frozenset[str] = frozenset()
    # largest number of pruned linears on a path from the model's input to the site's linears, including these
    depth: int = 0
    num_calls: int = 1  # how often the linears run in one forward pass; above 1 if layers share their weights
    is_routed: bool = False  # whether a router chooses the linears' tokens, as for experts in a list
    residual: Residual | None = None  # the residual stream that the linear's output is added to, if the graph shows one

    def expand(self, index: Tensor) -> Tensor:
        """Returns the index over this site's input channels, int64 ``[channels]``, for a unit index of its space."""
        return Axis("", 0, self.units, torch.zeros_like(self.units), is_input=True).expand(index)

    @property
    def channels_by_unit(self) -> Tensor:
        """The input channels of each unit, in ascending order, int64 ``[units, copies]``."""
        return torch.argsort(self.units, stable=True).view(self.space.units, -1)

    @property
    def layer(self) -> int:
        """Index of the layer in the outermost module list: the lowest if there are several, -1 if there is none."""
        return min((layer_number(path) or 0 for path in self.layer_paths), default=-1)

    @property
    def copies(self) -> int:
        """Number of input channels per unit: above 1 where several query heads share a key/value head."""
        return self.channels // self.space.units if self.space.segments else 1


@dataclass
class Plan:
    """The sites and channel spaces of a model, and what is not pruned."""

    sites: list[Site]  # sites in execution order
    spaces: list[ChannelSpace]  # channel spaces in the order in which sites first use them
    patterns: Mapping[str, NMPattern]  # name of each pruned linear -> its N:M pattern
    skipped: dict[str, str] = field(default_factory=dict)  # name of a module or parameter that stays dense -> reason
    barriers: list[str] = field(default_factory=list)  # reasons why channels could not be followed further, each once
    # the last hidden state, as a site that no linear reads; None where no space orders its channels
    hidden_site: Site | None = None
    untraced: tuple[str, ...] = ()  # names of the parameters that the trace did not use, such as an image projector's

    def __post_init__(self) -> None:
        for space in self.spaces:
            linear_names = [name for site in self.sites_of(space) for name in site.linears]
            space.group_units = math.lcm(*(self.patterns[name].group for name in linear_names))

    def linears(self) -> Iterator[tuple[Site, str]]:
        """Yields every pruned linear: its site and its name."""
        for site in self.sites:
            for name in site.linears:
                yield site, name

    def sparsity(self, default: NMPattern) -> str:
        """Returns the patterns of all pruned linears in words: ``default``, then the others with their counts."""
        other_patterns = [str(pattern) for pattern in self.patterns.values() if pattern != default]
        return in_words(str(default), other_patterns, len(self.patterns))

    def sites_of(self, space: ChannelSpace) -> list[Site]:
        return [site for site in self.sites if site.space is space]

    def pattern_of(self, space: ChannelSpace) -> NMPattern:
        """Returns the pattern that a space's order is chosen for: that of most pruned linears that read the space."""
        patterns = Counter(self.patterns[name] for site in self.sites_of(space) for name in site.linears)
        return patterns.most_common(1)[0][0]

    def hidden_order(self, indices: Mapping[str, Tensor]) -> Tensor | None:
        """Returns the order that ``indices`` give the last hidden state's channels; None if it cannot change.

        Returns:
            Index, int64 ``[C]``: ``permuted[..., j] = dense[..., index[j]]``.
        """
        if self.hidden_site is None or self.hidden_site.space.frozen:
            return None
        return self.hidden_site.expand(indices[self.hidden_site.space.name])

    def layers(self) -> list[list[Site]]:
        """Returns the sites in execution order, grouped by layer.

        A site outside every layer is a separate group. So is a site that several layers read, such as the output of
        an encoder; its group stands before the first of these layers.
        """
        groups: list[list[Site]] = []
        last_path: frozenset[str] = frozenset()  # path of the layer of the last group
        for site in self.sites:
            paths = site.layer_paths
            if len(paths) > 1:
                groups.insert(len(groups) - bool(last_path & paths), [site])
                last_path = last_path & paths
            elif paths and paths == last_path:
                groups[-1].append(site)
            else:
                groups.append([site])
                last_path = paths
        return groups


def weight_in_out(module: nn.Module) -> Tensor:
    """Returns a linear's weight as a detached view ``[in_features, out_features]``, whether or not it is transposed."""
    weight = module.get_parameter("weight").detach()
    return weight if isinstance(module, Conv1D) else weight.t()


def linear_module(model: nn.Module, name: str) -> nn.Module:
    module = model.get_submodule(name)
    assert isinstance(module, LINEAR_MODULES), f"{name} is a {type(module).__name__}"
    return module


def check_pruned(model: nn.Module, plan: Plan) -> None:
    for _, name in plan.linears():
        check_weight(name, weight_in_out(linear_module(model, name)).t(), plan.patterns[name])


def sequential_groups(sites: list[Site]) -> list[list[Site]]:
    """Returns a layer's sites grouped by depth; each group reads outputs of the linears in the groups before it.

    Sites of the same depth share a group, such as experts, or attention and MLP that run side by side.

    The groups are pruned and fitted one after another. Otherwise the linears of a layer would be fitted to inputs that
    the pruned model never gives them, which trebles the perplexity of SmolLM2-135M.
    """
    depths = sorted({site.depth for site in sites})
    return [[site for site in sites if site.depth == depth] for depth in depths]


def layer_of(model: nn.Module, name: str) -> str:
    """Returns the name of the layer that a module is or is part of; an empty name for a module outside all layers.

    A layer is an item of the outermost module list, or, in lists of lists, of the innermost one.
    """
    module, parts = model, name.split(".") if name else []
    for depth, part in enumerate(parts, 1):
        parent_is_list = isinstance(module, nn.ModuleList)
        module = module.get_submodule(part)
        if parent_is_list and not isinstance(module, nn.ModuleList):
            return ".".join(parts[:depth])
    return ""


def named_layers(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """Returns the layers that hold sites, by name, in execution order."""
    names = dict.fromkeys(layer_of(model, name) for _, name in plan.linears())
    return {name: model.get_submodule(name) for name in names if name}


def layer_modules(model: nn.Module, plan: Plan) -> list[nn.Module]:
    return list(named_layers(model, plan).values())

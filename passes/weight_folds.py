"""Folds permutations into weights: the edits that a new channel order makes in a model.

`moves_of` turns a plan and the chosen indices into edits, which are applied in three places: the passes
`insert_permutations` and `fuse_permutations` write them into the graph, where each pass is verified; `apply_edits`
writes them into the model that runs; `reorder_statistics` reorders the calibration statistics.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from permtriton.model.modules import ChannelGather, GatheredLinear, PermutedNorm, from_norm, replace_module
from permtriton.passes.plan import ChannelSpace, Destination, Norm, Plan, Site


@dataclass(frozen=True, eq=False)
class Fold:
    """Reorders one dimension of one parameter."""

    parameter: str  # name in ``model.named_parameters()``
    dim: int  # dimension of the parameter
    index: Tensor  # int64 ``[size of the dimension]``: new position ``j`` holds the old position ``index[j]``


@dataclass(frozen=True, eq=False)
class PermuteNorm:
    """Makes a norm write its output in a new order."""

    norm: Norm
    index: Tensor  # int64 ``[channels]``, applied to the norm's present output


@dataclass(frozen=True, eq=False)
class Gather:
    """Reorders the input of a site's linears at run time."""

    site: str  # name of the site
    linears: tuple[str, ...]  # names of the site's linears
    index: Tensor  # int64 ``[channels]``, applied to the linears' present input


Edit = Fold | PermuteNorm | Gather


@dataclass(frozen=True)
class Move:
    """The edits of one channel space.

    A permutation starts at the space's sites: because ``W x = W[:, index] x[index]``, ``columns`` and ``gathers``
    together leave the outputs the same. The gathers are then replaced as the space's placement says: by ``upstream``,
    by ``norm``, or not at all.
    """

    space: str  # name of the space
    placement: Destination  # where the permutation ends
    columns: tuple[Fold, ...]  # folds of the columns of the sites' linears
    gathers: tuple[Gather, ...]  # gathers before the sites' linears, one per site
    # folds of the rows, biases, norm vectors and embedding columns that write the channels, and of the columns of all
    # other linears that read them
    upstream: tuple[Fold, ...]
    norm: PermuteNorm | None  # edit of the norm, if the placement is ``in_norm``

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits to write into the model: a gather only if nothing upstream replaces it."""
        at_run_time = self.gathers if self.placement is Destination.GATHER else filter(None, [self.norm])
        return (*self.columns, *self.upstream, *at_run_time)


def moves_of(plan: Plan, indices: Mapping[str, Tensor]) -> tuple[Move, ...]:
    """Returns one move per space that has an index.

    New channel ``j`` is the old channel ``index[j]`` for writers and readers alike (eq. 11-12 of the paper:
    ``rows_new[j] = rows_old[index[j]]``, ``W_new[:, j] = W[:, index[j]]``).

    Args:
        indices: space name -> unit index, int64 ``[units]``, relative to the present order; a space without an index
            keeps its order.
    """
    spaces = (space for space in plan.spaces if space.name in indices)
    return tuple(_move(space, plan.sites_of(space), indices[space.name]) for space in spaces)


def edits_of(moves: Iterable[Move]) -> tuple[Edit, ...]:
    """Returns the edits that write all ``moves`` into the model, in order."""
    return tuple(edit for move in moves for edit in move.edits)


@torch.no_grad()
def apply_edits(model: nn.Module, edits: Iterable[Edit]) -> None:
    """Permutes the channels of ``model`` in place; its outputs stay the same.

    A module that replaces another holds the same Parameter objects. In a norm or linear that already permutes, the new
    index is composed with the present one.
    """
    parameters = dict(model.named_parameters())
    for edit in edits:
        if isinstance(edit, Fold):
            tensor = parameters[edit.parameter].data
            tensor.copy_(tensor.index_select(edit.dim, edit.index.to(tensor.device)))
        elif isinstance(edit, PermuteNorm):
            _permute_norm(model, edit)
        else:
            assert isinstance(edit, Gather)
            for name in edit.linears:
                _gather_input(model, name, edit.index)


def runs_of(site: Site) -> tuple[int, ...]:
    """Returns the sizes of a site's runs: consecutive input channels that are permuted only among themselves."""
    another_head = site.space.segment_of[site.units].diff() != 0
    starts = another_head | (site.units.diff() < 0)  # units descend where another copy of the same head starts
    edges = [0, *(starts.nonzero().flatten() + 1).tolist(), site.channels]
    return tuple(end - start for start, end in pairwise(edges))


def _move(space: ChannelSpace, sites: list[Site], index: Tensor) -> Move:
    assert not space.frozen, f"{space.name} cannot be permuted: {space.reason}"
    pruned = {f"{name}.weight" for site in sites for name in site.linears}
    columns: list[Fold] = []
    upstream: list[Fold] = []
    for axis in space.axes:
        fold = Fold(axis.parameter, axis.dim, axis.expand(index))
        (columns if axis.is_input and axis.parameter in pruned else upstream).append(fold)
    gathers = tuple(Gather(s.name, s.linears, s.expand(index)) for s in sites)
    norm = PermuteNorm(space.norm, sites[0].expand(index)) if space.norm else None
    return Move(space.name, space.placement, tuple(columns), gathers, tuple(upstream), norm)


def _permute_norm(model: nn.Module, edit: PermuteNorm) -> None:
    module = model.get_submodule(edit.norm.module)
    if isinstance(module, PermutedNorm):
        module.compose(edit.index)
    else:
        replace_module(model, edit.norm.module, from_norm(module, edit.norm.variant, edit.index))


def _gather_input(model: nn.Module, name: str, index: Tensor) -> None:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear)
    if not isinstance(module, GatheredLinear):
        replace_module(model, name, GatheredLinear.from_linear(module, index))
    elif module.gather is None:
        module.gather = ChannelGather(index)
    else:
        module.gather.compose(index)

"""Writes permutations into the module tree: into parameters where they fold, into norms and gathers elsewhere."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from permtriton.kernels.norm_permute import NormVariant
from permtriton.modules import (
    ChannelGather,
    PermutedLayerNorm,
    PermutedRMSNorm,
    SparseLinear,
    from_norm,
    replace_module,
)
from permtriton.plan import Norm, Plan


def fold(model: nn.Module, plan: Plan, indices: Mapping[str, Tensor]) -> None:
    """Reorders ``model`` in place so that each space's channels stand in the order of its index; outputs stay the same.

    Args:
        model: the model that the plan was made from.
        plan: its channel spaces.
        indices: space name -> unit index, int64 ``[units]``, relative to the present order; spaces that are left out
            keep their order.
    """
    fold_parameters(model, plan, indices)
    gather_at_run_time(model, plan, indices)


def gather_at_run_time(model: nn.Module, plan: Plan, indices: Mapping[str, Tensor]) -> None:
    """Puts the indices of spaces that cannot be folded into their norm, or into a gather before each of their linears.

    Replaced modules keep their parameters; a norm or linear that gathers already does so in the composed order.
    """
    for site in plan.sites:
        index = indices.get(site.space.name)
        if index is None or site.cost == "none":
            continue
        if site.norm is not None:
            _permute_norm(model, site.norm, index)
        else:
            for name in site.linears:
                _gather_input(model, name, index)


def _permute_norm(model: nn.Module, norm: Norm, index: Tensor) -> None:
    module = model.get_submodule(norm.module)
    if isinstance(module, PermutedRMSNorm | PermutedLayerNorm):
        module.compose(index)
    else:
        variant = NormVariant(norm.kind, norm.eps, norm.offset)
        replace_module(model, norm.module, from_norm(module, variant, index))


def _gather_input(model: nn.Module, name: str, index: Tensor) -> None:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear)
    if not isinstance(module, SparseLinear):
        replace_module(model, name, SparseLinear.from_linear(module, index))
    elif module.gather is None:
        module.gather = ChannelGather(index)
    else:
        module.gather.compose(index)


@torch.no_grad()
def fold_parameters(model: nn.Module, plan: Plan, indices: Mapping[str, Tensor]) -> None:
    """Reorders ``model``'s parameters in place so that each space's channels stand in the order of its index.

    With ``index``, new channel ``j`` is old channel ``index[j]`` for producers and readers alike (eq. 11-12 of the
    paper: ``rows_new[j] = rows_old[index[j]]``, ``W[:, index[j]]``).

    Args:
        model: the model that the plan was made from.
        plan: its channel spaces.
        indices: space name -> unit index, int64 ``[units]``; spaces that are left out keep their order.
    """
    parameters = dict(model.named_parameters())
    for space in plan.spaces:
        index = indices.get(space.name)
        if index is None:
            continue
        assert not space.frozen, f"{space.name} cannot be permuted: {space.frozen}"
        for axis in space.axes:
            tensor = parameters[axis.parameter].data
            tensor.copy_(tensor.index_select(axis.dim, axis.expand(index).to(tensor.device)))

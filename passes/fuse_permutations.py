"""Folds permutations into parameters: the rows and biases that produce a space's channels, embedding columns, norm
vectors, and the columns of every linear that reads them. Nothing is left to do at run time."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from permtriton.plan import Plan


@torch.no_grad()
def fuse_permutations(model: nn.Module, plan: Plan, indices: Mapping[str, Tensor]) -> None:
    """Reorders ``model``'s parameters in place so that each space's channels stand in the order of its index.

    The model computes the same function afterwards: with ``index``, new channel ``j`` is old channel ``index[j]`` for
    producers and readers alike (eq. 11-12 of the paper: ``rows_new[j] = rows_old[index[j]]``, ``W[:, index[j]]``).

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

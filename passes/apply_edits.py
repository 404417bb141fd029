"""Writes edits into the model: folds into its parameters, the other edits into its norms and linears."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from permtriton.model.modules import (
    ChannelGather,
    GatheredLinear,
    PermutedNorm,
    from_norm,
    replace_module,
)
from permtriton.passes.edits import Edit, Fold, Gather, PermuteNorm


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

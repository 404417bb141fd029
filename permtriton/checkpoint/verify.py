"""Verifies a checkpoint that was written: tensor by tensor, and by loading it as a user would."""

from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.checkpoint.folder import Folder
from permtriton.checkpoint.names import StoredNames
from permtriton.checkpoint.pruned import Pruned
from permtriton.errors import VerificationError, first_line
from permtriton.model.checks import check_finite_tensor, check_same_outputs, model_outputs
from permtriton.model.forward import in_eval_mode
from permtriton.model.nm_checks import check_weight
from permtriton.util.machine import available_memory, release_memory
from permtriton.util.micro_batch import is_out_of_memory

INSTEAD = "every tensor was compared bit by bit instead"
NOT_RELOADED = {"reloaded": f"not run: {INSTEAD}"}
NO_MEMORY = {"reloaded": f"not run: a second copy does not fit into memory; {INSTEAD}"}


def verify_tensors(model: PreTrainedModel, folder: Path, names: StoredNames) -> dict[str, int]:
    """Checks that every tensor in a folder is finite and equals the model's, and that every pruned weight is N:M.

    Returns:
        The numbers of tensors and of pruned weights.
    """
    written, in_memory = Folder(folder), names.tensors(model, model.state_dict())
    for name in written.stored:
        tensor = written.tensor(name)
        check_finite_tensor(name, tensor)
        if pruned := names.pruned.get(name):
            check_weight(name, pruned.rows(tensor), pruned.pattern)
        if name in in_memory:
            check_same_bits(name, tensor, in_memory[name].detach().cpu().contiguous(), "the model in memory")
    _check_complete({*names.pruned, *written.entries.indices}, written.stored.keys())
    return {"tensors": len(written.stored), "pruned_weights": len(names.pruned)}


def check_same_bits(name: str, written: Tensor, expected: Tensor, source: str) -> None:
    """Refuses two tensors that differ in dtype, shape or any bit."""
    same = (written.dtype, written.shape) == (expected.dtype, expected.shape)
    if not same or not torch.equal(written.flatten().view(torch.uint8), expected.flatten().view(torch.uint8)):
        raise VerificationError(f"{name}: what was written differs from {source}")


def _check_complete(expected: Set[str], written: Set[str]) -> None:
    if missing := sorted(expected - written):
        raise VerificationError(
            f"{missing[0]} and {len(missing) - 1} more pruned weights or permutations are not in the checkpoint"
        )


def compare_reloaded(compiled: Pruned, folder: Path) -> dict[str, Any]:
    """Loads the checkpoint as a user would, and compares the outputs, if a second model fits into memory."""
    size = sum(p.numel() * p.element_size() for p in compiled.model.parameters())
    if size * 1.2 <= available_memory(compiled.model.device):
        try:
            return _reloaded(compiled, folder)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        release_memory()  # of the failed attempt, which the error's traceback kept alive
    return NO_MEMORY


def _reloaded(compiled: Pruned, folder: Path) -> dict[str, Any]:
    model = compiled.model
    try:
        reloaded: PreTrainedModel = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
        torch.nn.Module.to(reloaded, model.device)
    except Exception as error:  # transformers raises many kinds
        if is_out_of_memory(error):
            raise
        raise VerificationError(f"the saved checkpoint cannot be loaded again: {first_line(error)}") from error
    with in_eval_mode(model, reloaded):
        difference = check_same_outputs(
            model_outputs(model, compiled.reference),
            model_outputs(reloaded, compiled.reference),
            model.dtype,
            "reloading the saved checkpoint",
        )
    return {"reloaded": "same outputs", "reload_difference": difference}

"""Verifies a checkpoint that was written: tensor by tensor, and by loading it again as a user would."""

from collections.abc import Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.checkpoint.names import StoredNames
from permtriton.checkpoint.pruned import Pruned
from permtriton.errors import VerificationError, first_line
from permtriton.model.checks import check_finite_tensor, check_same_outputs, model_outputs
from permtriton.model.forward import in_eval_mode
from permtriton.model.nm_checks import check_weight
from permtriton.util.machine import available_memory, release_memory
from permtriton.util.micro_batch import is_out_of_memory
from permtriton.util.sparsity import PrunedWeight

INSTEAD = "every tensor was compared bit by bit instead"
NOT_RELOADED = {"reloaded": f"not run: {INSTEAD}"}
NO_MEMORY = {"reloaded": f"not run: a second copy does not fit into memory; {INSTEAD}"}


def verify_tensors(
    model: Any, folder: Path, pruned: Mapping[str, PrunedWeight], names: StoredNames, permuted: bool
) -> dict[str, int]:
    """Checks a written checkpoint: every tensor must be finite and equal the model's, every pruned weight N:M.

    Args:
        permuted: whether modules of the model permute.

    Returns:
        The numbers of checked tensors and pruned weights.
    """
    state = model.hf_quantizer.get_state_dict_and_metadata(model)[0] if permuted else model.state_dict()
    in_memory = names.tensors(model, state)
    parameters = {stored: name for name, stored in names.stored.items()}
    seen = set()
    for name, tensor in _tensors(folder):
        seen.add(name)
        check_finite_tensor(name, tensor)
        if parameter := parameters.get(name):
            weight = tensor.view(model.get_parameter(parameter).shape)
            kept = pruned[parameter]
            check_weight(name, weight.movedim(kept.dim, -1).flatten(0, -2), kept.pattern)
        if name in in_memory:
            _check_same(name, tensor, in_memory[name].detach().cpu())
    indices = {name for name in in_memory if name.endswith(".index")} if permuted else set()
    _check_complete(set(names.stored.values()) | indices, seen)
    return {"tensors": len(seen), "pruned_weights": len(pruned)}


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def _check_same(name: str, written: Tensor, in_memory: Tensor) -> None:
    if written.dtype != in_memory.dtype or not torch.equal(written, in_memory):
        raise VerificationError(f"{name}: what was written differs from the model in memory")


def _check_complete(expected: Set[str], written: Set[str]) -> None:
    if missing := sorted(expected - written):
        raise VerificationError(
            f"{missing[0]} and {len(missing) - 1} more pruned weights or permutations are not in the checkpoint"
        )


def compare_reloaded(compiled: Pruned, folder: Path) -> dict[str, Any]:
    """Loads the checkpoint as a user would and compares the outputs, if a second model fits into memory."""
    size = sum(p.numel() * p.element_size() for p in compiled.model.parameters())
    if size * 1.2 > available_memory(compiled.model.device):
        return NO_MEMORY
    try:
        return _reloaded(compiled, folder)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    release_memory()  # that of the failed attempt, which the error's traceback kept alive
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
            partial(model_outputs, reloaded, compiled.reference),
            reloaded,
            "reloading the saved checkpoint",
        )
    return {"reloaded": "same outputs", "reload_difference": difference}

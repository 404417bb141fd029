"""Checkpoints on disk: written beside their place, verified tensor by tensor, then renamed into it."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton import memory
from permtriton.errors import OutputError, VerificationError
from permtriton.passes.verify import check_finite_tensor, check_same_outputs, check_weight, model_outputs
from permtriton.plan import linear_module
from permtriton.report import to_json

if TYPE_CHECKING:
    from permtriton.compiler import CompiledModel

REPORT_FILE = "permtriton.json"
SHARD_SIZE = "5GB"


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuses, before any work, an output folder that could not be written at the end.

    Raises:
        OutputError: it exists and ``overwrite`` is off, is not an earlier output, or its parent cannot be written.
    """
    parent = output.resolve().parent
    if output.exists():
        if not overwrite:
            raise OutputError(f"output {output} exists: choose another folder, or replace it with --overwrite")
        ours = output.is_dir() and ((output / REPORT_FILE).is_file() or not any(output.iterdir()))
        if not ours:
            raise OutputError(
                f"output {output} was not written by permtriton (it holds no {REPORT_FILE}), so --overwrite leaves it "
                "alone: choose another folder"
            )
    if not parent.is_dir():
        raise OutputError(f"output {output}: the folder {parent} does not exist; make it first")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"output {output}: the folder {parent} cannot be written")


def save_checkpoint(compiled: "CompiledModel", output: Path, *, overwrite: bool) -> Path:
    """Writes, verifies and renames; on any failure or interruption an earlier output stays whole and nothing is left.

    Raises:
        OutputError: `check_output`'s reasons, or the disk refuses.
        VerificationError: what was written is not what it must be.
    """
    check_output(output, overwrite=overwrite)
    output = output.resolve()
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        started = time.perf_counter()
        compiled.model.save_pretrained(partial, max_shard_size=SHARD_SIZE)
        if compiled.tokenizer is not None:
            compiled.tokenizer.save_pretrained(partial)
        for weights in partial.glob("*.safetensors"):  # safetensors writes them for the owner's eyes only
            shutil.copymode(partial / "config.json", weights)
        saved = time.perf_counter()
        compiled.report["verification"] = verify_checkpoint(compiled, partial)
        seconds = {"save": round(saved - started, 3), "verify": round(time.perf_counter() - saved, 3)}
        compiled.report["seconds"].update(seconds)
        compiled.report["memory"]["peak"] = memory.peak(compiled.model.device)
        (partial / REPORT_FILE).write_text(to_json(compiled.report) + "\n", encoding="utf-8")
        _rename(partial, output)
    except OSError as error:
        raise _not_written(output, error.strerror or str(error)) from error
    except Exception as error:
        if "No space left" in str(error):  # safetensors wraps the disk's own error
            raise _not_written(output, "no space left on the disk") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return output


def _not_written(output: Path, why: str) -> OutputError:
    return OutputError(f"output {output} cannot be written: {why}. Nothing was saved, an earlier output is whole")


def verify_checkpoint(compiled: "CompiledModel", folder: Path) -> dict[str, object]:
    """Checks a written checkpoint: N:M in every pruned weight, finite, equal to memory bit by bit, reloadable.

    Returns:
        What was checked: tensors, pruned weights, and how the reloaded model was compared.

    Raises:
        VerificationError: naming the first tensor that is not as it must be.
    """
    in_memory = dict(compiled.model.named_parameters())
    pruned = {f"{name}.weight" for _, name in compiled.plan.linears()}
    seen = set()
    for name, tensor in _saved_tensors(folder):
        seen.add(name)
        check_finite_tensor(name, tensor)
        if name in pruned:
            owner = linear_module(compiled.model, name.removesuffix(".weight"))
            check_weight(name, tensor.T if isinstance(owner, Conv1D) else tensor, compiled.config.sparsity)
        if name in in_memory and not torch.equal(tensor, in_memory[name].detach().cpu()):
            raise VerificationError(f"{name}: what was written differs from the model in memory")
    if missing := sorted(pruned - seen):
        raise VerificationError(f"{missing[0]} and {len(missing) - 1} more pruned weights are not in the checkpoint")
    return {"tensors": len(seen), "pruned_weights": len(pruned), **_compare_reloaded(compiled, folder)}


def _compare_reloaded(compiled: "CompiledModel", folder: Path) -> dict[str, object]:
    """Loads the checkpoint with transformers alone and compares outputs, where a second model fits into memory."""
    model = compiled.model
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    free = memory.available(model.device)
    if free is not None and size * 1.2 > free:
        return {
            "reloaded": "not run: a second copy does not fit into memory; every tensor was compared bit by bit instead"
        }
    try:
        reloaded: PreTrainedModel = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
        torch.nn.Module.to(reloaded, model.device)
    except Exception as error:  # whatever transformers raises, the checkpoint is not what it must be
        raise VerificationError(f"the saved checkpoint cannot be loaded again: {str(error).splitlines()[0]}") from error
    difference = check_same_outputs(
        model_outputs(model, compiled.reference_ids),
        model_outputs(reloaded.eval(), compiled.reference_ids),
        model.dtype,
        "reloading the saved checkpoint",
    )
    return {"reloaded": "same outputs", "reload_difference": difference}


def _saved_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def _rename(partial: Path, output: Path) -> None:
    """Moves ``partial`` to ``output``; an exception at any point leaves the old folder or the new one there, whole."""
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
    try:
        if output.exists():
            output.rename(old)
        partial.rename(output)
    finally:
        if old.exists() and not output.exists():
            old.rename(output)
        shutil.rmtree(old, ignore_errors=True)

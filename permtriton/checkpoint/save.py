"""Saves checkpoints: writes them to a temporary folder, verifies them tensor by tensor, and renames the folder."""

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from permtriton.checkpoint.files import CONFIG_FILE, describe_files, read_tensors
from permtriton.checkpoint.quantizer import checkpoint_config
from permtriton.checkpoint.report import to_json
from permtriton.config import CompileConfig
from permtriton.errors import OutputError, VerificationError
from permtriton.machine import available_memory, peak_memory
from permtriton.model.checks import check_finite_tensor, check_same_outputs, check_weight, model_outputs
from permtriton.model.experts import stacked_name
from permtriton.model.load import REPORT_FILE
from permtriton.model.plan import Plan, linear_module
from permtriton.prune.state_file import StateFile

SHARD_SIZE = "5GB"


@dataclass
class CompiledModel:
    """A pruned model and the record of its compilation.

    Attributes:
        model: transformers model with N:M weights; in layout ``fused`` some of its norms and linears permute channels.
        tokenizer: tokenizer of the model, saved with it; None if there is none.
        config: every option.
        plan: sites and channel spaces.
        indices: space name -> unit index from the dense order to the present one, int64 ``[units]``.
        report: content of ``permtriton.json``, as `permtriton.checkpoint.report.compilation_report` builds it.
        reference_ids: int64 ``[sequences, tokens]``, on which a reloaded checkpoint must give the outputs of ``model``.
        states: files that hold the state of long stages, deleted once the model is saved.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    config: CompileConfig
    plan: Plan
    indices: dict[str, Tensor]
    report: dict[str, Any]
    reference_ids: Tensor
    states: Sequence[StateFile] = ()

    def save(self, output: str | Path, *, overwrite: bool = False) -> Path:
        """Writes a Hugging Face checkpoint with ``permtriton.json``, and verifies it before it is renamed into place.

        Args:
            output: folder to write.
            overwrite: whether an earlier output of permtriton may be replaced.

        Returns:
            The absolute path of the folder.

        Raises:
            OutputError: the folder exists and may not be replaced, or cannot be written.
            VerificationError: the written checkpoint fails a check; nothing is left behind.
        """
        path = save_checkpoint(self, Path(output), overwrite=overwrite)
        for state in self.states:
            state.delete()
        return path


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuses, before any work, an output folder that could not be written at the end.

    Raises:
        OutputError: the folder exists and ``overwrite`` is off, or permtriton did not write it, or its parent is
            missing or cannot be written.
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


@contextmanager
def replacing_folder(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary folder next to ``output``, and renames it to ``output`` at the end of the ``with`` block.

    After a failure or an interruption the temporary folder is deleted, and an earlier output is unchanged.

    Raises:
        OutputError: as `check_output`, or the disk reports an error.
    """
    check_output(output, overwrite=overwrite)
    output = output.resolve()
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        yield partial
        _rename(partial, output)
    except OSError as error:
        raise _not_written(output, error.strerror or str(error)) from error
    except Exception as error:
        if "No space left" in str(error):  # safetensors wraps the error of the disk
            raise _not_written(output, "no space left on the disk") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_checkpoint(compiled: CompiledModel, output: Path, *, overwrite: bool) -> Path:
    """Writes and verifies a checkpoint: a plain one, or one of format "dense" if modules permute at run time.

    Stacked experts are stored as the model holds them, one tensor per stack, whatever the original files look like.

    Raises:
        OutputError: as `replacing_folder`.
        VerificationError: as `verify_checkpoint`.
    """
    pruned = pruned_parameters(compiled.model, compiled.plan)
    with replacing_folder(output, overwrite=overwrite) as partial:
        started = time.perf_counter()
        stacked = any(compiled.model.get_parameter(name).ndim > 2 for name in pruned)
        compiled.model.save_pretrained(partial, max_shard_size=SHARD_SIZE, save_original_format=not stacked)
        if compiled.tokenizer is not None:
            compiled.tokenizer.save_pretrained(partial)
        share_mode(partial)
        saved = time.perf_counter()
        compiled.report["verification"] = verify_checkpoint(compiled, partial, pruned)
        compiled.report["pruned_weights"] = pruned
        compiled.report["files"] = describe_files(sorted(partial.glob("*.safetensors")))
        seconds = {"save": round(saved - started, 3), "verify": round(time.perf_counter() - saved, 3)}
        compiled.report["seconds"].update(seconds)
        compiled.report["memory"]["peak"] = peak_memory(compiled.model.device)
        (partial / REPORT_FILE).write_text(to_json(compiled.report) + "\n", encoding="utf-8")
    return output.resolve()


def share_mode(folder: Path) -> None:
    """Gives the files of weights the mode of config.json, because safetensors makes them readable by the owner only."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / CONFIG_FILE, weights)


def pruned_parameters(model: nn.Module, plan: Plan) -> dict[str, int]:
    """Returns each pruned parameter with its input dimension; a stack of experts is one parameter."""
    dims = {}
    for _, name in plan.linears():
        stacked = stacked_name(model, name)
        if stacked is not None:
            dims[stacked[0]] = 2
        else:
            dims[f"{name}.weight"] = 0 if isinstance(linear_module(model, name), Conv1D) else 1
    return dims


def _not_written(output: Path, why: str) -> OutputError:
    return OutputError(f"output {output} cannot be written: {why}. Nothing was saved; an earlier output is unchanged")


def verify_checkpoint(compiled: CompiledModel, folder: Path, pruned: Mapping[str, int]) -> dict[str, object]:
    """Checks a written checkpoint.

    Every tensor must be finite and equal to the tensor in memory, every pruned weight must be N:M, and the reloaded
    model must give the same outputs.

    Args:
        compiled: compiled model that was written.
        folder: folder of the checkpoint.
        pruned: parameter name -> input dimension, as `pruned_parameters` returns them.

    Returns:
        The numbers of checked tensors and pruned weights, and how the reloaded model was compared.

    Raises:
        VerificationError: a check failed; the message names the first such tensor.
    """
    model: Any = compiled.model
    config = compiled.config
    permuted = checkpoint_config(model, str(config.sparsity)) is not None
    in_memory = model.hf_quantizer.get_state_dict_and_metadata(model)[0] if permuted else model.state_dict()
    seen = set()
    for name, tensor in read_tensors(sorted(folder.glob("*.safetensors"))):
        seen.add(name)
        check_finite_tensor(name, tensor)
        if name in pruned:
            weight = tensor.view(model.get_parameter(name).shape)
            check_weight(name, weight.movedim(pruned[name], -1).flatten(0, -2), config.sparsity)
        if name in in_memory and not _same(tensor, in_memory[name].detach().cpu()):
            raise VerificationError(f"{name}: what was written differs from the model in memory")
    if missing := sorted(set(pruned) - seen):
        raise VerificationError(f"{missing[0]} and {len(missing) - 1} more pruned weights are not in the checkpoint")
    if permuted and (missing := sorted(name for name in in_memory if name.endswith(".index") and name not in seen)):
        raise VerificationError(f"{missing[0]} and {len(missing) - 1} more permutations are not in the checkpoint")
    return {"tensors": len(seen), "pruned_weights": len(pruned), **_compare_reloaded(compiled, folder)}


def _same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def _compare_reloaded(compiled: CompiledModel, folder: Path) -> dict[str, object]:
    """Loads the checkpoint as a user would and compares the outputs, if a second model fits into memory."""
    model = compiled.model
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    free = available_memory(model.device)
    if free is not None and size * 1.2 > free:
        return {
            "reloaded": "not run: a second copy does not fit into memory; every tensor was compared bit by bit instead"
        }
    try:
        reloaded: PreTrainedModel = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
        torch.nn.Module.to(reloaded, model.device)
    except Exception as error:  # transformers raises many kinds
        raise VerificationError(f"the saved checkpoint cannot be loaded again: {str(error).splitlines()[0]}") from error
    difference = check_same_outputs(
        model_outputs(model, compiled.reference_ids),
        model_outputs(reloaded.eval(), compiled.reference_ids),
        model.dtype,
        "reloading the saved checkpoint",
    )
    return {"reloaded": "same outputs", "reload_difference": difference}


def _rename(partial: Path, output: Path) -> None:
    """Renames ``partial`` to ``output``; after an exception either the old or the new folder is there, complete."""
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
    try:
        if output.exists():
            output.rename(old)
        partial.rename(output)
    finally:
        if old.exists() and not output.exists():
            old.rename(output)
        shutil.rmtree(old, ignore_errors=True)

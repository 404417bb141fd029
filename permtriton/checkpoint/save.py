"""Saves checkpoints: writes them to a temporary folder and verifies them tensor by tensor before it takes its place."""

import shutil
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.checkpoint.card import ALONE, WITH_PERMTRITON, write_record
from permtriton.checkpoint.forms import Record, Reloaded, Report, Tensors, Verification, Written
from permtriton.checkpoint.names import StoredNames, stored_names
from permtriton.checkpoint.output import replacing_folder
from permtriton.checkpoint.quantizer import checkpoint_config
from permtriton.checkpoint.shards import describe_files, read_tensors
from permtriton.config import CommonConfig
from permtriton.data.media import Processor
from permtriton.data.samples import Samples
from permtriton.errors import ModelError, PermTritonError, VerificationError, first_line
from permtriton.model.checks import check_finite_tensor, check_same_outputs, check_weight, model_outputs
from permtriton.model.expert_linears import input_dim
from permtriton.model.experts import stacked_name
from permtriton.model.headers import CONFIG_FILE
from permtriton.passes.plan import Plan
from permtriton.running.micro_batch import is_out_of_memory
from permtriton.running.offload import OffloadFolder
from permtriton.util.machine import available_memory, peak_memory, release_memory
from permtriton.util.output_files import disk_error, real_path
from permtriton.util.sparsity import NMPattern, PrunedWeight

SHARD_SIZE = "5GB"


@dataclass
class Pruned:
    """A pruned model and what is saved with it.

    Attributes:
        model: transformers model with N:M weights; in layout ``fused`` some of its norms and linears permute channels.
        tokenizer: tokenizer or processor of the model; None if there is none.
        config: every option.
        plan: sites and channel spaces.
        report: content of ``permtriton.json``, as `permtriton.driver.record.compilation_record` builds it, and once it
            is saved, with what was checked.
        reference: samples on which a reloaded checkpoint must give the outputs of ``model``.
        offload: where the model's large parameters are; None for memory.
    """

    model: PreTrainedModel
    tokenizer: Processor | None
    config: CommonConfig
    plan: Plan
    report: Report | Record
    reference: Samples
    offload: OffloadFolder | None


def save_checkpoint(compiled: Pruned, output: Path, *, overwrite: bool) -> Record:
    """Writes and verifies a checkpoint: a plain one, or one of format "dense" if modules permute at run time.

    Stacked experts are stored as the model holds them, one tensor per stack, whatever the original files look like; see
    `permtriton.checkpoint.names`.

    Returns:
        The content of its ``permtriton.json``.

    Raises:
        OutputError: as `replacing_folder`.
        VerificationError: as `verify_checkpoint`.
        ModelError: as `permtriton.checkpoint.names.stored_names`.
    """
    pruned = pruned_parameters(compiled.model, compiled.plan)
    permuted = checkpoint_config(compiled.model, str(compiled.config.sparsity)) is not None
    names = stored_names(compiled.model, pruned, original=not permuted)
    with replacing_folder(output, overwrite=overwrite) as partial:
        started = time.perf_counter()
        with _transformers(compiled.model):
            compiled.model.save_pretrained(partial, max_shard_size=SHARD_SIZE, save_original_format=names.original)
            if compiled.tokenizer is not None:
                compiled.tokenizer.save_pretrained(partial)
        share_mode(partial)
        saved = time.perf_counter()
        verified = verify_checkpoint(compiled, partial, pruned, names)
        seconds = {"save": round(saved - started, 3), "verify": round(time.perf_counter() - saved, 3)}
        record: Record = {
            **compiled.report,
            **_written(partial, verified, names, pruned, str(compiled.config.sparsity)),
            "seconds": {**compiled.report["seconds"], **seconds},
            "memory": {**compiled.report["memory"], "peak": peak_memory(compiled.model.device)},
        }
        return write_record(partial, record, WITH_PERMTRITON if permuted else ALONE, real_path(output).name)


def save_trained(
    model: Any,
    tokenizer: Any,
    record: Record,
    pruned: Mapping[str, PrunedWeight],
    output: Path,
    *,
    state: dict[str, Tensor] | None,
    overwrite: bool,
) -> Path:
    """Writes and verifies the checkpoint of a model whose kept weights were trained; see `save_checkpoint`.

    Args:
        tokenizer: tokenizer or processor, or None.
        record: content of ``permtriton.json`` of the folder that was trained.
        pruned: parameter name -> its input dimension and pattern.
        state: whole tensors of a model that is divided among ranks; None to take the model's.

    Raises:
        OutputError, VerificationError, ModelError: as `save_checkpoint`.
    """
    sparsity = record["config"]["sparsity"]
    permuted = checkpoint_config(model, sparsity) is not None
    if permuted and state is not None:
        raise ModelError("a model in layout fused cannot be saved while it is divided among ranks: use portable")
    names = stored_names(model, pruned, original=not permuted)
    with replacing_folder(output, overwrite=overwrite) as partial:
        original = names.original
        with _transformers(model):
            model.save_pretrained(partial, max_shard_size=SHARD_SIZE, save_original_format=original, state_dict=state)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
        share_mode(partial)
        checked = _verify_tensors(model, partial, pruned, names, permuted, state)
        verified: Verification = {
            **checked,
            "reloaded": "not run: every tensor was compared bit by bit instead",
        }
        report: Record = {
            **record,
            "trained": model.name_or_path,
            "dtype": str(model.dtype).removeprefix("torch."),
            "evaluation": {"text": "not measured since the weights were trained"},
            **_written(partial, verified, names, pruned, sparsity),
        }
        report.pop("export", None)
        write_record(partial, report, WITH_PERMTRITON if permuted else ALONE, real_path(output).name)
    return real_path(output)


@contextmanager
def _transformers(model: Any) -> Iterator[None]:
    """Turns what transformers raises while it saves into our own error; a full disk or memory has one already."""
    try:
        yield
    except Exception as error:  # it raises many kinds
        if isinstance(error, PermTritonError) or disk_error(error) or is_out_of_memory(error):
            raise
        raise ModelError(f"transformers cannot save this {type(model).__name__}: {first_line(error)}") from error


def share_mode(folder: Path) -> None:
    """Gives the files of weights the mode of config.json, because safetensors makes them readable by the owner only."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / CONFIG_FILE, weights)


def pruned_parameters(model: nn.Module, plan: Plan) -> dict[str, PrunedWeight]:
    """Returns each pruned parameter with its input dimension and pattern; a stack of experts is one parameter."""
    patterns: dict[str, NMPattern] = {}
    for _, name in plan.linears():
        stack = stacked_name(model, name)
        patterns[stack[0] if stack else f"{name}.weight"] = plan.patterns[name]
    return {name: PrunedWeight(input_dim(model, name), pattern) for name, pattern in patterns.items()}


def _written(
    folder: Path,
    verification: Verification,
    names: StoredNames,
    pruned: Mapping[str, PrunedWeight],
    sparsity: str,
) -> Written:
    """Returns the entries of ``permtriton.json`` that say what is in a folder; `write_record` adds the card.

    Args:
        sparsity: the pattern of the config, which goes without saying.
    """
    patterns = {names.stored[name]: str(weight.pattern) for name, weight in pruned.items()}
    own = {name: pattern for name, pattern in patterns.items() if pattern != sparsity}
    entries = {
        "verification": verification,
        "pruned_weights": {names.stored[name]: weight.dim for name, weight in pruned.items()},
        **({"patterns": own} if own else {}),
        "files": describe_files(sorted(folder.glob("*.safetensors"))),
        "card": None,
    }
    return cast(Written, entries)


def verify_checkpoint(
    compiled: Pruned, folder: Path, pruned: Mapping[str, PrunedWeight], names: StoredNames
) -> Verification:
    """Checks a written checkpoint.

    Every tensor must be finite and equal to the tensor in memory, every pruned weight must be N:M, and the reloaded
    model must give the same outputs.

    Args:
        pruned: parameter name -> its input dimension and pattern, as `pruned_parameters` returns them.

    Returns:
        The numbers of checked tensors and pruned weights, and how the reloaded model was compared.

    Raises:
        VerificationError: a check failed; the message names the first such tensor.
    """
    permuted = checkpoint_config(compiled.model, str(compiled.config.sparsity)) is not None
    checked = _verify_tensors(compiled.model, folder, pruned, names, permuted)
    return {**checked, **_compare_reloaded(compiled, folder)}


def _verify_tensors(
    model: Any,
    folder: Path,
    pruned: Mapping[str, PrunedWeight],
    names: StoredNames,
    permuted: bool,
    state: Mapping[str, Tensor] | None = None,
) -> Tensors:
    """Checks the tensors of a checkpoint against ``state``, or against the model; returns how many were checked.

    Args:
        permuted: whether modules of the model permute.
    """
    if state is None:
        state = model.hf_quantizer.get_state_dict_and_metadata(model)[0] if permuted else model.state_dict()
    in_memory = names.tensors(model, state)
    seen = _check_tensors(model, in_memory, folder, pruned, names)
    indices = {name for name in in_memory if name.endswith(".index")} if permuted else set()
    _check_complete(set(names.stored.values()) | indices, seen)
    return {"tensors": len(seen), "pruned_weights": len(pruned)}


def _check_tensors(
    model: nn.Module,
    in_memory: Mapping[str, Tensor],
    folder: Path,
    pruned: Mapping[str, PrunedWeight],
    names: StoredNames,
) -> set[str]:
    """Checks every tensor of a checkpoint and returns their names; afterwards no tensor keeps its file mapped."""
    parameters = {stored: name for name, stored in names.stored.items()}
    seen = set()
    for name, tensor in read_tensors(sorted(folder.glob("*.safetensors"))):
        seen.add(name)
        check_finite_tensor(name, tensor)
        if parameter := parameters.get(name):
            weight = tensor.view(model.get_parameter(parameter).shape)
            kept = pruned[parameter]
            check_weight(name, weight.movedim(kept.dim, -1).flatten(0, -2), kept.pattern)
        if name in in_memory:
            _check_same(name, tensor, in_memory[name].detach().cpu())
    return seen


def _check_same(name: str, written: Tensor, in_memory: Tensor) -> None:
    if written.dtype != in_memory.dtype or not torch.equal(written, in_memory):
        raise VerificationError(f"{name}: what was written differs from the model in memory")


def _check_complete(expected: Set[str], written: Set[str]) -> None:
    if missing := sorted(expected - written):
        raise VerificationError(
            f"{missing[0]} and {len(missing) - 1} more pruned weights or permutations are not in the checkpoint"
        )


def _compare_reloaded(compiled: Pruned, folder: Path) -> Reloaded:
    """Loads the checkpoint as a user would and compares the outputs, if a second model fits into memory or files."""
    if compiled.offload is not None:
        with compiled.offload.loading(), compiled.offload.working(compiled.model):
            return _reloaded(compiled, folder)
    not_run = "not run: a second copy does not fit into memory; every tensor was compared bit by bit instead"
    size = sum(p.numel() * p.element_size() for p in compiled.model.parameters())
    if size * 1.2 > available_memory(compiled.model.device):
        return {"reloaded": not_run}
    try:
        return _reloaded(compiled, folder)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    release_memory()  # of the failed attempt, which the error's traceback kept alive
    return {"reloaded": not_run}


def _reloaded(compiled: Pruned, folder: Path) -> Reloaded:
    model = compiled.model
    try:
        reloaded: PreTrainedModel = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
        torch.nn.Module.to(reloaded, model.device)
    except Exception as error:  # transformers raises many kinds
        if is_out_of_memory(error):
            raise
        raise VerificationError(f"the saved checkpoint cannot be loaded again: {first_line(error)}") from error
    difference = check_same_outputs(
        model_outputs(model, compiled.reference),
        partial(model_outputs, reloaded.eval(), compiled.reference),
        reloaded,
        "reloading the saved checkpoint",
    )
    return {"reloaded": "same outputs", "reload_difference": difference}

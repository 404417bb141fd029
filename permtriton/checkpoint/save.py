"""Saves a model: it is written to a temporary folder, verified tensor by tensor, and then renamed into its place."""

import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from permtriton.checkpoint.card import ALONE, WITH_PERMTRITON, write_record
from permtriton.checkpoint.folder import describe_weights
from permtriton.checkpoint.names import stored_names
from permtriton.checkpoint.output import replacing_folder
from permtriton.checkpoint.pruned import Pruned, pruned_parameters
from permtriton.checkpoint.quantizer import checkpoint_config
from permtriton.checkpoint.read_record import Record
from permtriton.checkpoint.verify import NOT_RELOADED, compare_reloaded, verify_tensors
from permtriton.errors import ModelError, PermTritonError, first_line
from permtriton.model.copied_files import copied_files
from permtriton.model.core import embedding_of, takes_decoder_ids
from permtriton.model.headers import CONFIG_FILE
from permtriton.model.source import LEGACY_TEMPLATE, PROCESSOR_FILES, Source, source_of_loaded
from permtriton.model.tokenizer import REMADE, TOKENIZERS, tokenizer_of
from permtriton.util.machine import peak_memory
from permtriton.util.micro_batch import is_out_of_memory
from permtriton.util.output_files import disk_error, real_path
from permtriton.util.sparsity import PrunedWeight

SHARD_SIZE = "5GB"
FURTHER_LAYERS = re.compile(r"(^|[._])(mtp|nextn)([._]|$)")  # in names about layers that predict further tokens


def save_checkpoint(compiled: Pruned, output: Path, *, overwrite: bool) -> Record:
    pruned = pruned_parameters(compiled.model, compiled.plan)
    return save(
        compiled.model, compiled.tokenizer, compiled.report, pruned, output, overwrite=overwrite, compiled=compiled
    )


def save(
    model: Any,
    tokenizer: Any,
    record: Record,
    pruned: Mapping[str, PrunedWeight],
    output: Path,
    *,
    overwrite: bool,
    compiled: Pruned | None = None,
) -> Record:
    """Writes and verifies a checkpoint that transformers alone loads, or one in format "dense" if modules permute.

    Args:
        tokenizer: tokenizer or processor, or None.
        record: content of ``permtriton.json``, of the compilation or of the folder whose kept weights were trained.
        pruned: pruned weights, by the names of the parameters.
        compiled: the compilation; None for a model that was loaded from a folder and trained.

    Returns:
        The content of the new ``permtriton.json``.
    """
    source = compiled.source if compiled else source_of_loaded(model)
    sparsity = record["config"]["sparsity"]  # patterns that equal it are not recorded
    permuted = checkpoint_config(model, sparsity) is not None
    names = stored_names(model, pruned, original=not permuted)
    patterns = {name: str(w.pattern) for name, w in names.pruned.items() if str(w.pattern) != sparsity}
    with replacing_folder(output, overwrite=overwrite) as partial:
        started = time.perf_counter()
        _write(model, tokenizer, source, names.original, partial)
        saved = time.perf_counter()
        verified: dict[str, Any] = verify_tensors(model, partial, names)
        verified |= compare_reloaded(compiled, partial) if compiled else NOT_RELOADED
        written: Record = {
            **record,
            "verification": verified,
            "pruned_weights": {name: weight.dim for name, weight in names.pruned.items()},
            **({"patterns": patterns} if patterns else {}),
            "files": describe_weights(partial),
            "card": None,
        }
        written.pop("export", None)  # it describes the folder that was trained
        if compiled is None:
            written["dtype"] = str(model.dtype).removeprefix("torch.")
        else:
            seconds = {"save": round(saved - started, 3), "verify": round(time.perf_counter() - saved, 3)}
            written["seconds"] = {**record["seconds"], **seconds}
            written["memory"] = {**record["memory"], "peak": peak_memory(compiled.device or model.device)}
        if compiled is None or compiled.is_trained:  # the evaluation in the record is older
            written["trained"] = model.name_or_path
            written["evaluation"] = {"text": "not measured since the weights were trained"}
        return write_record(partial, written, WITH_PERMTRITON if permuted else ALONE, real_path(output).name)


def _write(model: Any, tokenizer: Any, source: Source | None, original: bool, partial: Path) -> None:
    """Saves model and tokenizer, and copies other files of the source."""
    _correct(model)
    try:
        model.save_pretrained(partial, max_shard_size=SHARD_SIZE, save_original_format=original)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
    except Exception as error:  # save_pretrained raises many kinds
        if isinstance(error, PermTritonError) or disk_error(error) or is_out_of_memory(error):
            raise
        raise ModelError(f"transformers cannot save this {type(model).__name__}: {first_line(error)}") from error
    if source is not None:
        _copy_beside(source, model.name_or_path, tokenizer, partial)
    share_mode(partial)


def _correct(model: Any) -> None:
    """Makes the configs fit what is saved: a head that is not tied, no layers that predict further tokens."""
    configs = [model.config, model.config.get_text_config(decoder=True)]
    configs += [model.generation_config] if model.can_generate() else []
    reads_ids = model.main_input_name == "input_ids" and not takes_decoder_ids(model)
    tables = [embedding_of(model), model.get_output_embeddings()] if reads_ids else []
    weights = [weight for table in tables if (weight := getattr(table, "weight", None)) is not None]
    untied = len(weights) == 2 and weights[0] is not weights[1]
    further = any(FURTHER_LAYERS.search(name) for name, _ in model.named_parameters())  # most classes load none
    for config in configs:
        if untied and getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False  # readers that trust it would leave the head out
        for name, value in [] if further else [*vars(config).items()]:
            if FURTHER_LAYERS.search(name) and type(value) in (bool, int, list, dict):
                setattr(config, name, type(value)())  # 0 layers, and an empty list of types


def _copy_beside(source: Source, model_name: str, tokenizer: Any, partial: Path) -> None:
    """Copies the files that `copied_files` names, except those already saved and links out of the folder."""
    saved = {name for name in (*PROCESSOR_FILES, *REMADE) if (partial / name).exists()}
    remade = {*REMADE} if saved & {*REMADE} else set[str]()
    remade |= {*PROCESSOR_FILES, LEGACY_TEMPLATE} if saved & {*PROCESSOR_FILES} else set[str]()
    read_from = getattr(tokenizer_of(tokenizer), "name_or_path", None)
    if read_from not in (None, model_name) and real_path(Path(read_from)) != real_path(source.folder):
        remade |= {*TOKENIZERS}  # a tokenizer from elsewhere
    for name in copied_files(source):
        if name not in remade and not (partial / name).exists() and (path := source.find(name)):
            copy_file(path, path.parents[name.count("/")], partial)


def copy_file(path: Path, folder: Path, partial: Path) -> bool:
    """Copies a file of ``folder`` to the same place in ``partial``, unless it is a link out of the folder.

    Any file could be published through such a link. Links from the hub's cache to its ``blobs`` are followed.

    Returns:
        Whether the file was copied.
    """
    inside = [folder, *([folder.parent.parent / "blobs"] * (folder.parent.name == "snapshots"))]
    if not any(real_path(path).is_relative_to(real_path(root)) for root in inside):
        return False
    copy = partial / path.relative_to(folder)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, copy)  # without its mode, which may forbid writing
    return True


def share_mode(folder: Path) -> None:
    """Gives the files of weights the mode of config.json, because safetensors makes them readable by the owner only."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / CONFIG_FILE, weights)

"""Loads models and tokenizers from local folders, from the Hugging Face hub, or the demo: safetensors, or GGUF."""

import os
import struct
import tempfile
import unicodedata
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto
from transformers.utils import cached_file

from permtriton.errors import ConfigError, ModelError, OutputError, first_line, reading, shown, without_panics
from permtriton.kernels import autotune
from permtriton.model.core import check_towers
from permtriton.model.headers import (
    CONFIG_FILE,
    INDEX_FILE,
    REPORT_FILE,
    WEIGHTS_FILE,
    StoredTensor,
    check_regular,
    checkpoint_files,
    read_headers,
    read_json,
)
from permtriton.model.modules import is_packed, is_permuted
from permtriton.model.sizes import build_empty, check_numbers
from permtriton.model.source import Source, dtype_of, resolve_device
from permtriton.running.offload import NO_GPU, OffloadFolder
from permtriton.util.extras import require
from permtriton.util.output_files import disk_error

PICKLED = ("*.bin", "*.pt", "*.pth")
ADAPTER = "adapter_config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILE = "tokenizer.json"
MOST_TOKENS, MOST_GROWTH = 2**24, 1000


def load_original(
    source: Source, *, saved: bool = False, offload: OffloadFolder | None = None
) -> tuple[PreTrainedModel, Any]:
    """Loads a model to prune, and its tokenizer or processor, as `load_processor` returns it.

    Args:
        saved: whether the model will be saved, so that what could not be saved is refused now.

    Raises:
        ModelError: permtriton compiled the model, its tokenizer or a config could not be saved again, or as
            `load_model` and `load_processor`.
        OutputError: the folder for temporary files cannot be written, or as `load_model`.
        ConfigError: as `load_model`.
    """
    model = load_model(source, allow_compiled=False, offload=offload)
    tokenizer = load_processor(source, model)
    if saved:
        rehearse_saving(source.name, model, tokenizer)
    return model, tokenizer


def load_model(source: Source, allow_compiled: bool = True, offload: OffloadFolder | None = None) -> PreTrainedModel:
    """Loads a model with the class that its config names, in eval mode, on the device of ``source``.

    Args:
        allow_compiled: whether to accept a model that permtriton compiled.

    Raises:
        ModelError: no such folder, no config, no safetensors, an unknown class, sizes that do not fit the weights,
            missing weights, weights that are integers or not finite, or a compiled model that is not accepted.
        ConfigError: an unknown dtype, a device that is unknown or missing, or a GPU with ``offload``.
        OutputError: the disk of ``offload`` is full.
    """
    dtype, device = dtype_of(source), resolve_device(source.device)
    if offload is not None and device.type != "cpu":
        raise ConfigError(NO_GPU.format(device=device))
    if not allow_compiled and source.holds(REPORT_FILE):
        raise _compiled_already(source)
    _refuse_pickles(source)
    stored = _stored(source)
    config = _config(source, stored)
    if not allow_compiled and _is_compiled(config):
        raise _compiled_already(source)
    _check_named_weights(source, config)
    model_class = _model_class(source, config)
    if not source.trust_remote_code:  # code of the model's own may not build without memory
        build_empty(model_class, config, stored, source.name)
    with (
        reading(f"{source.name} cannot be loaded as {model_class.__name__}", ModelError),
        unchanged_weights(source, also_replaced=True),
        nullcontext() if offload is None else offload.loading(),
    ):
        model, info = model_class.from_pretrained(
            source.location,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are in the info; the error of transformers does not name them
            **_placement(source, config, device),
            **_arguments(source),
            **_dequantizing(source),
        )
    if differing := sorted(info["mismatched_keys"]):
        name, stored_shape, shape = differing[0]
        raise ModelError(
            f"{source.name}: {name} has the shape {list(stored_shape)}, but {model_class.__name__} with this "
            f"config.json needs {list(shape)}"
            + (f", and {len(differing) - 1} more differ" if differing[1:] else "")
            + ": a size in config.json is damaged, or it belongs to other weights"
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{source.name} holds no weights for {missing[0]}"
            + (f" and {len(missing) - 1} more" if missing[1:] else "")
            + f", which {model_class.__name__} needs: the checkpoint is incomplete, or config.json names another class"
        )
    if source.gguf is None and getattr(config, "quantization_config", None) is None:
        _check_floating(model, _fetched(source) if stored is None else stored)
    check_weights(model)
    if source.gguf is not None:
        model.name_or_path = source.name  # not the folder that the file is in
    autotune.use_beside(Path(source.location))
    return model.to(device).eval()


def _placement(source: Source, config: Any, device: torch.device) -> dict[str, str]:
    """Returns where transformers loads a model: on a GPU, packed weights stay packed only if it loads them there."""
    if not _is_compiled(config) or device.type == "cpu":
        return {}
    require(f"{source.name} on a GPU", "accelerate")
    return {"device_map": str(device)}


@contextmanager
def unchanged_weights(source: Source, *, also_replaced: bool = False) -> Iterator[None]:
    """Checks that nothing wrote to a model's files inside the ``with`` block.

    Weights on the CPU are mapped from these files, so that a change to a file changes the model in memory. A file that
    was replaced by another one stays mapped as it was.

    Args:
        source: source of the model; only folders are checked.
        also_replaced: whether files must not be replaced either, because they are being opened.

    Raises:
        ModelError: a file was changed; the message names it.
    """
    weights = [source.gguf.path] if source.gguf else sorted(Path(source.location).glob("*.safetensors"))
    files = {path: path.stat() for path in weights}
    yield
    for path, before in files.items():
        after = path.stat() if path.is_file() else None
        if after is None or after.st_ino != before.st_ino:
            changed = also_replaced
        else:
            changed = (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns)
        if changed:
            raise ModelError(
                f"{path} was changed while it was in use, so that the model in memory may be neither the old nor the "
                "new one: nothing was saved; run the same command again once nothing writes to it"
            )


def load_empty_model(source: Source, allow_compiled: bool = False) -> PreTrainedModel:
    """Builds the model on the meta device from its config alone; no weights are read.

    Args:
        allow_compiled: whether to accept a model that permtriton compiled, and build its original architecture.

    Raises:
        ModelError: no such folder, no config, an unknown class, sizes that no model has or that do not fit the weights
            where these are there, or a compiled model that is not accepted.
    """
    stored = None
    with suppress(ModelError):  # no weights, or not all of them: the config is enough
        stored = _stored(source)
    config = _config(source, stored)
    model_class = _model_class(source, config)
    if _is_compiled(config):
        if not allow_compiled:
            raise _compiled_already(source)
        del config.quantization_config
    return build_empty(model_class, config, stored, source.name)


def load_processor(source: Source, model: PreTrainedModel) -> Any:
    """Loads what makes a model's inputs: its tokenizer, or the processor of images or sound; None if there is none.

    Raises:
        ModelError: the folder holds one that cannot be loaded, or the connection to the hub is lost.
    """
    if model.main_input_name == "input_ids":
        return load_tokenizer(source)
    problems: list[Exception] = []
    loaders: list[Any] = [
        transformers.AutoProcessor,
        transformers.AutoImageProcessor,
        transformers.AutoFeatureExtractor,
    ]
    if source.folder is not None and not source.holds("tokenizer_config.json"):
        loaders.append(loaders.pop(0))  # it would make an empty tokenizer up, which would then be saved
    for loader in loaders:
        try:
            return loader.from_pretrained(source.location, **_arguments(source))
        except Exception as error:  # they raise many kinds, also where a folder holds a processor of another kind
            problems.append(error)
    if any(map(source.holds, PROCESSOR_FILES)) or _is_connection_lost(problems[0]):
        raise ModelError(f"{source.name}: its processor cannot be loaded: {first_line(problems[0])}") from problems[0]
    return None


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer; returns None if there is none.

    Raises:
        ModelError: the folder holds a tokenizer that cannot be loaded, or the connection to the hub is lost.
    """
    try:
        with reading(f"{source.name}: its tokenizer cannot be loaded", ModelError), without_panics():
            _check_growth(source)
            tokenizer = AutoTokenizer.from_pretrained(source.location, **_arguments(source))
            _check_vocabulary(source, tokenizer)
            return tokenizer
    except ModelError as error:  # a missing tokenizer and a damaged one raise the same kinds
        if source.holds("tokenizer_config.json") or (source.gguf and source.gguf.has_tokenizer):
            raise
        if source.folder is None and _is_connection_lost(error):
            problem = f"{source.name}: its tokenizer cannot be fetched: {first_line(error.__cause__ or error)}"
            raise ModelError(f"{problem} Check the network, or give a local folder") from error
        return None


def _check_growth(source: Source) -> None:
    """Refuses a tokenizer that replaces characters by many, again and again: any text would fill the memory."""
    if not source.holds(TOKENIZER_FILE):
        return
    path = Path(source.location, TOKENIZER_FILE)
    grown: list[tuple[str, float]] = []  # what a character may have become, "" for any -> by how many times longer
    for step in _steps_of(read_json(path).get("normalizer")):
        text, content = map(_folded, _replaced(step))
        if not content:
            continue
        again = [growth for before, growth in grown if not text or not before or set(text) <= set(before)]
        growth = max(len(content) / len(_replaced(step)[0] or "x"), 1) * max([1, *again])
        grown.append(("" if step["type"] in ("ByteLevel", "Precompiled") else content, growth))
        if growth > MOST_GROWTH:
            raise ModelError(
                f"{path}: its normalizers make text {growth:.0e} times as long: expected at most {MOST_GROWTH}"
            )


def _replaced(step: Mapping[str, Any]) -> tuple[str, str]:
    """Returns what a normalizer replaces, "" for any text, and by what at the longest; "" if it adds no characters."""
    kind, pattern = step.get("type"), step.get("pattern")
    if kind == "ByteLevel":
        return "", "byte"  # a character has at most four
    if kind == "Precompiled":
        with suppress(ValueError, TypeError, struct.error):  # the tokenizer itself refuses it
            table = b64decode(step.get("precompiled_charsmap", ""))
            (tree,) = struct.unpack_from("<I", table)  # what follows the tree are the replacements, each with a zero
            return "", max(table[4 + tree :].split(b"\0"), key=len).decode("latin1")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    content = step.get({"Replace": "content", "Prepend": "prepend"}.get(str(kind), ""))
    return text if isinstance(text, str) else "", content if isinstance(content, str) else ""


def _folded(text: str) -> str:
    """Returns a text as NFKD and lower case, which other normalizers may make of it."""
    return unicodedata.normalize("NFKD", text).casefold()


def _steps_of(normalizer: Any) -> Iterator[dict[str, Any]]:
    """Yields the normalizers of a sequence, and of those inside it, in their order."""
    if not isinstance(normalizer, dict):
        return
    yield normalizer
    inner = normalizer.get("normalizers")
    for each in inner if isinstance(inner, list) else []:
        yield from _steps_of(each)


def _check_vocabulary(source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses absurd ids and additions: saving lists all ids below the largest one, and the process would die of it."""
    vocabulary: dict[str, int] = {}
    with suppress(NotImplementedError):  # a tokenizer with code of its own
        vocabulary = tokenizer.get_vocab()
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", 0))
    if largest >= MOST_TOKENS:
        raise ModelError(
            f"{source.name}: its tokenizer gives {shown(token)} the id {largest}, expected less than {MOST_TOKENS}: it "
            "is damaged"
        )
    if (added := tokenizer.num_special_tokens_to_add()) > MOST_GROWTH:
        raise ModelError(f"{source.name}: its tokenizer adds {added} tokens to each text: expected at most {MOST_GROWTH}")


def check_original(model: PreTrainedModel) -> None:
    """Refuses a model that is compiled already, that only compares others' outputs, or whose weights are damaged.

    One that transformers dequantized from a GGUF file loses the mark that it was quantized, as nothing could save it.

    Raises:
        ModelError: a module permutes channels or is packed, there is no last hidden state, or a weight is not finite
            or in GGUF's blocks.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and quantizer.quantization_config.quant_method == "gguf":
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                raise ModelError(
                    f"{name} is still in GGUF's blocks: load the model with quantization_config="
                    "GgufConfig(dequantize=True)"
                )
        quantizer.remove_quantization_config(model)
    for name, module in model.named_modules():
        if is_permuted(module) or is_packed(module):
            raise ModelError(
                f"this model is compiled already ({name} is a {type(module).__name__}): compile the original model "
                "instead"
            )
    check_towers(model)
    check_weights(model)


def check_not_compiled(model: PreTrainedModel) -> None:
    """Refuses a model in memory that was loaded from a folder which permtriton wrote.

    Raises:
        ModelError: its folder holds the record of a compilation.
    """
    if model.name_or_path and os.path.isfile(os.path.join(model.name_or_path, REPORT_FILE)):
        raise _compiled_already(Source(model.name_or_path))


def check_loaded(model: PreTrainedModel) -> None:
    """Refuses a model that was given in memory without its weights.

    Raises:
        ModelError: a weight is on the meta device.
    """
    if empty := next((name for name, parameter in model.named_parameters() if parameter.is_meta), None):
        raise ModelError(
            f"{empty} of this {type(model).__name__} has no values (it is on the meta device): load the weights first, "
            "or give the folder in place of the model"
        )


def check_weights(model: PreTrainedModel) -> None:
    """Refuses weights that are complex, NaN or infinite.

    Raises:
        ModelError: a weight is not finite; the message names the first such parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        values = parameter.float() if parameter.dtype.itemsize == 1 else parameter  # torch has no isfinite of float8
        if parameter.is_complex():
            raise ModelError(
                f"{name} is {parameter.dtype}, expected floating-point weights: permtriton prunes no other"
            )
        if not bool(values.isfinite().all()):
            bad = int((~values.isfinite()).sum())
            raise ModelError(
                f"{name}: {bad} of {parameter.numel()} weights are NaN or infinite; the checkpoint is damaged"
            )


def _check_floating(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> None:
    """Refuses integers in place of weights: transformers takes quantized weights for large numbers without a config.

    It also takes the real parts of complex numbers. Masks and positions, which old checkpoints hold, are no weights.
    """
    parameters = [f".{name}" for name, _ in model.named_parameters()]
    for name, tensor in stored.items():
        if tensor.dtype.startswith(("I", "U", "BOOL", "C")) and (
            name.endswith(".weight") or any(each.endswith(f".{name}") for each in parameters)
        ):
            raise ModelError(
                f"{tensor.file}: {name} is {tensor.dtype}, expected floating-point weights: quantized weights mean "
                "nothing without their scales, and config.json has no quantization_config; give a dequantized model"
            )


def _is_compiled(config: Any) -> bool:
    """Whether permtriton wrote the weights, which may also have no permtriton.json (`save_pretrained` writes none)."""
    stored = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    return bool(method == "permtriton")


def _is_connection_lost(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, LocalEntryNotFoundError | ConnectionError | TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _compiled_already(source: Source) -> ModelError:
    return ModelError(f"{source.name} has already been compiled by permtriton: pass the original model")


def rehearse_saving(name: str, model: PreTrainedModel, tokenizer: Any) -> None:
    """Refuses now what could not be saved at the end: saves all but the weights, and asks which of these are shared.

    Transformers checks some values of configs, and whether a class declares the weights that it shares, only there.

    Args:
        name: what the model is called in the error.
        tokenizer: tokenizer or processor; None for none.

    Raises:
        ModelError: a config, the tokenizer or the weights could not be saved.
        OutputError: the folder for temporary files cannot be written.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    parts: dict[str, Callable[[str], object]] = {
        "its config.json cannot be saved again": model.config.save_pretrained,
        "with this config.json, it cannot be saved again": lambda folder: model.save_pretrained(
            folder, state_dict={}, is_main_process=False
        ),
        "weights that share their values, which its class does not declare, cannot be saved (give each a copy)": (
            lambda folder: remove_tied_weights_from_state_dict(model.state_dict(), model)
        ),
    }
    if model.can_generate():
        parts["its generation_config.json cannot be saved again"] = model.generation_config.save_pretrained
    if tokenizer is not None:
        parts["its tokenizer cannot be saved again"] = tokenizer.save_pretrained
    with _temporary_folder() as folder:
        for problem, save in parts.items():
            with reading(f"{name}: {problem}", ModelError), _temporary_files():
                save(folder)


@contextmanager
def _temporary_folder() -> Iterator[str]:
    with ExitStack() as stack:
        with _temporary_files():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        yield folder


@contextmanager
def _temporary_files() -> Iterator[None]:
    """Says of an error of the disk which folder it is about."""
    try:
        yield
    except Exception as error:  # transformers raises many kinds
        if (reported := disk_error(error)) is None:
            raise
        named = "the folder for temporary files"
        with suppress(OSError):  # where there is none
            named = f"{named}, {tempfile.gettempdir()},"
        raise OutputError(f"{named} cannot be written: {reported.strerror}") from error


def _stored(source: Source) -> dict[str, StoredTensor] | None:
    """Returns the tensors of a checkpoint, after checking its headers and index; None for a hub name."""
    if source.gguf is not None:
        return source.gguf.stored
    return None if source.folder is None else read_headers(checkpoint_files(source.folder))


def _fetched(source: Source) -> dict[str, StoredTensor]:
    """Returns the tensors of a model that was just loaded by its hub name; none of one that the hub had to convert."""
    config = cached_file(source.location, CONFIG_FILE, local_files_only=True)
    with suppress(ModelError):
        return read_headers(checkpoint_files(Path(str(config)).parent))
    return {}


def _check_named_weights(source: Source, config: Any) -> None:
    """Refuses a config that names the file of weights: transformers would read it, even if it is a pickle."""
    if (named := getattr(config, "transformers_weights", None)) is not None:
        raise ModelError(
            f"{source.name}: config.json names the weights {shown(named)} (transformers_weights), but permtriton reads "
            f"{WEIGHTS_FILE}, or the files that {INDEX_FILE} names, only: give them these names and remove the entry"
        )


def config_of(source: Source) -> Any:
    """Returns a model's config; its weights need not be there.

    Raises:
        ModelError: no such model, or its config is damaged.
    """
    return _config(source, None)


def _config(source: Source, stored: Mapping[str, StoredTensor] | None) -> Any:
    _check_revision(source)
    if source.gguf is not None:
        with reading(f"{source.gguf.path}: transformers {transformers.__version__} cannot read it", ModelError):
            return AutoConfig.from_pretrained(source.location, **_arguments(source))
    check_folder(source)
    if source.folder is None:
        missing = "there is no such folder, and no such model can be fetched from the hub"
        with reading(f"{source.name}: {missing}", ModelError):
            return AutoConfig.from_pretrained(source.location, **_arguments(source))
    path = source.folder / CONFIG_FILE
    check_numbers(read_json(path), stored, str(path))
    with reading(f"{source.name}: its config.json cannot be used", ModelError):
        return AutoConfig.from_pretrained(source.location, **_arguments(source))


def check_folder(source: Source) -> None:
    """Refuses a path that is not a folder, and a folder that is not a model's or holds pipes or devices.

    Raises:
        ModelError: saying which.
        ConfigError: a revision of a folder.
    """
    if source.folder is None:
        if os.path.exists(source.name) or source.name.startswith((".", "/", "~")) or source.name.count("/") > 1:
            raise ModelError(f"{source.name} is not a folder: give a Hugging Face model folder, a hub name, or demo")
        return
    _check_revision(source)
    check_regular(source.folder)
    if not source.holds(CONFIG_FILE):
        raise ModelError(f"{source.name} holds no config.json: it is not a Hugging Face model folder")
    if source.holds(ADAPTER):
        raise ModelError(f"{source.name} holds an adapter ({ADAPTER}): merge it into its model and save that first")


def _check_revision(source: Source) -> None:
    if source.revision is not None and (source.folder is not None or os.path.exists(source.name)):
        raise ConfigError(
            f"`revision={source.revision}` has no effect on {source.name}, which is on this machine: leave it out"
        )


def _model_class(source: Source, config: Any) -> Any:
    names = config.architectures or ([] if source.gguf is None else _head(config))
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(
            f'{source.name}: config.json names no class in "architectures": add one, such as LlamaForCausalLM'
        )
    with reading(f"{source.name}: its class {shown(names[0])} cannot be imported", ModelError):
        model_class = getattr(transformers, names[0], None)
        if model_class is None and source.trust_remote_code:
            model_class = _remote_class(config, names[0], source)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ModelError(
            f"{source.name}: {names[0]} is not a model class of transformers {transformers.__version__}: upgrade "
            "transformers, or, if the model comes with its own code and you trust it, use `trust_remote_code=True`"
        )
    if model_class.forward is nn.Module.forward:
        raise ModelError(
            f"{source.name}: {names[0]} in config.json is only a base for model classes: name the one that was trained"
        )
    return model_class


def _head(config: Any) -> list[str]:
    """Returns the class that predicts tokens with a config that names none, as that of a GGUF file."""
    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    return [mapping[config.model_type] for mapping in mappings if config.model_type in mapping]


def _remote_class(config: Any, name: str, source: Source) -> Any:
    """Returns the class ``name`` from the code that comes with the model; None if there is none."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for auto_class, path in getattr(config, "auto_map", {}).items():
        if auto_class.startswith("AutoM") and str(path).endswith(name):
            return get_class_from_dynamic_module(path, source.location, revision=source.revision, token=source.token)
    return None


def _refuse_pickles(source: Source) -> None:
    if source.gguf is not None:
        return
    check_folder(source)
    if source.folder is None or source.holds(INDEX_FILE) or any(source.folder.glob("*.safetensors")):
        return
    pickles = sorted(file.name for pattern in PICKLED for file in source.folder.glob(pattern))
    content = f"only {pickles[0]}, a pickle, which can run code when it is read" if pickles else "no weights"
    raise ModelError(f"{source.name} holds {content}: permtriton reads .safetensors only; convert the checkpoint first")


def _arguments(source: Source) -> dict[str, Any]:
    """Returns what every ``from_pretrained`` is given beside the location."""
    file = {} if source.gguf is None else {"gguf_file": source.gguf.path.name}
    return {"trust_remote_code": source.trust_remote_code, **file, **source.hub}


def _dequantizing(source: Source) -> dict[str, Any]:
    """Returns what makes transformers dequantize a GGUF file; versions without this class always do."""
    kind = getattr(transformers, "GgufConfig", None)
    return {} if source.gguf is None or kind is None else {"quantization_config": kind(dequantize=True)}

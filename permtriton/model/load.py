"""Loads models from local folders, from the Hugging Face hub, or the demo: safetensors, or GGUF."""

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import cached_file

from permtriton.errors import ConfigError, ModelError, listed, reading, shown
from permtriton.model.beside import fetch_beside, left_out, modules_of
from permtriton.model.gguf_file import ANOTHER, MAY_BE_UNUSED, GgufFile, check_config, read_quickly
from permtriton.model.headers import (
    CONFIG_FILE,
    INDEX_FILE,
    REPORT_FILE,
    WEIGHTS_FILE,
    StoredTensor,
    checkpoint_files,
    read_headers,
    read_json,
)
from permtriton.model.name import DEMO
from permtriton.model.prunable import check_weights, compiled_already
from permtriton.model.rehearsal import rehearse_saving
from permtriton.model.sizes import build_empty, check_counts
from permtriton.model.source import MODULES, Source, dtype_of, resolve_device
from permtriton.model.tokenizer import load_processor
from permtriton.util.extras import require
from permtriton.util.progress import Progress

PICKLED = ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth")  # the likeliest to hold the model first
OF_TRAINING = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")  # prefixes of a Trainer's pickles
ADAPTER = "adapter_config.json"


def load_original(
    source: Source,
    *,
    saved: bool = False,
    progress: Progress | None = None,
    unused: list[str] | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Loads a model to prune, and its tokenizer or processor, as `load_processor` returns it.

    Args:
        saved: whether the model will be saved. If so, a model that could not be saved is refused now, and the files
            that are copied when it is saved are fetched now.
    """
    model = load_model(source, allow_compiled=False, progress=progress, unused=unused)
    if (text := model.config.get_text_config(decoder=True)) is not model.config:  # transformers deletes the outer entry
        vars(text).pop("quantization_config", None)
    tokenizer = load_processor(source, model, progress)
    if saved:
        rehearse_saving(source.name, model, tokenizer)
        unknown = fetch_beside(source.at_commit(model.config))
        if unknown and progress is not None:
            progress.say(f"{', '.join(unknown)} could not be looked up on the hub: left out if the model has such")
        if progress is not None and (others := left_out(source)):
            progress.say(f"not copied, as only what is no weight comes along: {listed(others)}")
    return model, tokenizer


def load_model(
    source: Source,
    allow_compiled: bool = True,
    progress: Progress | None = None,
    unused: list[str] | None = None,
) -> PreTrainedModel:
    """Loads a model with the class that its config names, in eval mode, on the device of ``source``.

    Args:
        allow_compiled: whether to accept a model that permtriton compiled. If not, weights that another tool quantized
            are dequantized as well, if transformers can do that.
        unused: list to which the names of stored tensors are added that the class does not use, such as heads.
    """
    dtype, device = dtype_of(source), resolve_device(source.device)
    _refuse_pickles(source)
    stored = _stored(source)
    config = config_of(source)
    if not allow_compiled and (_is_compiled(config) or source.find(REPORT_FILE)):
        raise compiled_already(source)
    _check_config(source, config)
    model_class = _model_class(source, config)
    if not source.trust_remote_code:  # a model's own code may fail on the meta device
        build_empty(model_class, config, stored, source.name)
    with (
        reading(f"{source.name} cannot be loaded as {model_class.__name__}", ModelError),
        nullcontext() if source.gguf is None else read_quickly(),
    ):
        model, info = model_class.from_pretrained(
            source.location,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # lists them in the info; transformers' error names none
            **({} if source.gguf is None else {"config": config}),
            **_placement(source, config, device),
            **source.loading,
            **_dequantizing(source, None if allow_compiled else config),
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
    stored = _fetched(source) if stored is None else stored
    without_place = set(info["unexpected_keys"])
    _check_unused(model, stored, without_place, source.name)
    _note_unused(model, without_place | _ignored(model, stored), progress, unused)
    if hasattr(model, "ct_decompress_hook"):  # the hook runs when the model is called, but not for a submodule
        model.hf_quantizer.compressor.decompress_model(model)
    check_weights(model)
    if source.gguf is not None:
        _check_tensors(model, source.gguf, without_place)
        model.name_or_path = source.name  # transformers sets the file's folder
    return model.to(device).eval()


def _placement(source: Source, config: Any, device: torch.device) -> dict[str, str]:
    """Returns the arguments that load a compiled model right onto a GPU: only there do packed weights stay packed."""
    if not _is_compiled(config) or device.type == "cpu":
        return {}
    require(f"{source.name} on a GPU", "accelerate")
    return {"device_map": str(device)}


def load_empty_model(source: Source, allow_compiled: bool = False) -> PreTrainedModel:
    """Builds the model on the meta device from its config alone; no weights are read.

    Args:
        allow_compiled: whether to accept a model that permtriton compiled, and build its original architecture.
    """
    stored = None
    with suppress(ModelError):  # no weights, or not all of them: the config is enough
        stored = _stored(source)
    config = config_of(source)
    _check_config(source, config)
    model_class = _model_class(source, config)
    if _is_compiled(config):
        if not allow_compiled:
            raise compiled_already(source)
        del config.quantization_config
    return build_empty(model_class, config, stored, source.name)


def _check_unused(model: PreTrainedModel, stored: Mapping[str, StoredTensor], unused: set[str], name: str) -> None:
    """Refuses a checkpoint if the model uses a weight, but not the scale or the nonzero bias that belongs to it.

    Without them the model would compute something else. Heads, further layers and masks may be left out.
    """
    inner = f"{model.base_model_prefix}."
    used = {name.removeprefix(inner) for name in (stored.keys() - unused) | model.state_dict().keys()}
    for tensor in sorted(unused):
        inside = tensor.removeprefix(inner)
        if inside.rpartition("_scale")[0] in used:
            raise ModelError(
                f"{name}: transformers does not use {tensor}, the scale of quantized weights, which mean nothing "
                "without it: give a dequantized model"
            )
        if inside.endswith(".bias") and inside.removesuffix("bias") + "weight" in used and _is_not_zero(stored, tensor):
            raise ModelError(
                f"{name} holds {tensor}, but {type(model).__name__} with this config.json has no such bias: add the "
                "entry that makes the class use it (such as attention_bias), or remove the tensor from the checkpoint"
            )


def _note_unused(model: PreTrainedModel, names: set[str], progress: Progress | None, unused: list[str] | None) -> None:
    """Says which tensors the class does not use, and adds them to ``unused``."""
    if unused is not None:
        unused += sorted(names)
    if names and progress is not None:
        progress.say(f"tensors that {type(model).__name__} does not use are left out: {listed(sorted(names))}")


def _ignored(model: PreTrainedModel, stored: Iterable[str]) -> set[str]:
    """Returns stored tensors that transformers leaves out in silence, such as layers that predict further tokens.

    Buffers of earlier versions are not among them: a pattern only counts if it fits a weight.
    """
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    inner = f"{model.base_model_prefix}."
    used = {name.removeprefix(inner) for name in model.state_dict()}
    unused = [name for name in stored if name.removeprefix(inner) not in used]
    fitting = ({name for name in unused if re.search(pattern, name)} for pattern in patterns)
    return {name for names in fitting if any(name.endswith("weight") for name in names) for name in names}


def _check_tensors(model: PreTrainedModel, file: GgufFile, unused: set[str]) -> None:
    """Refuses a file with tensors that transformers left out, except biases that are 0 and `MAY_BE_UNUSED`.

    Args:
        unused: tensors that transformers' loading info names; for most architectures of GGUF, it names none.
    """
    with suppress(ImportError, NotImplementedError):  # raised where the loading info names unused tensors
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

        processor = TENSOR_PROCESSORS.get(file.header["general.architecture"], TensorProcessor)
        used = get_gguf_hf_weights_map(model, processor()).keys()  # names of merged experts lack ".weight"
        unused = unused | {name for name in file.stored if used.isdisjoint((name, name.removesuffix(".weight")))}
    for name in sorted(unused):
        if (name in file.biases or not name.endswith(".bias")) and not name.startswith(MAY_BE_UNUSED):
            raise ModelError(
                f"{file.path} holds {name}, but {type(model).__name__} as transformers reads it from the file has no "
                f"such tensor, {ANOTHER}"
            )


def _is_not_zero(stored: Mapping[str, StoredTensor], name: str) -> bool:
    if name not in stored:
        return True
    with safe_open(stored[name].file, framework="pt") as file:
        return bool((file.get_tensor(name) != 0).any())


def _is_compiled(config: Any) -> bool:
    """Whether the config says that permtriton wrote the weights; `save_pretrained` writes no permtriton.json."""
    stored = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    return bool(method == "permtriton")


def _stored(source: Source) -> dict[str, StoredTensor] | None:
    """Returns the tensors of a checkpoint, after checking its headers and index; None for a hub name."""
    if source.gguf is not None:
        return source.gguf.stored
    return None if source.folder is None else read_headers(checkpoint_files(source.folder))


def _fetched(source: Source) -> dict[str, StoredTensor]:
    """Returns the stored tensors of a model just loaded by its hub name; none if the hub had to convert its weights."""
    config = cached_file(source.location, CONFIG_FILE, local_files_only=True, **source.hub)
    with suppress(ModelError):
        return read_headers(checkpoint_files(Path(str(config)).parent))
    return {}


def _check_config(source: Source, config: Any) -> None:
    """Refuses a config that names its file of weights, or a quantization that transformers does not know.

    transformers would read that file even if it is a pickle, and would take the quantized codes for the weights.
    """
    if (named := getattr(config, "transformers_weights", None)) is not None:
        raise ModelError(
            f"{source.name}: config.json names the weights {shown(named)} (transformers_weights), but permtriton reads "
            f"{WEIGHTS_FILE}, or the files that {INDEX_FILE} names, only: give them these names and remove the entry"
        )
    quantization = _quantization(config)
    if isinstance(quantization, dict):
        with reading(f"{source.name}: the quantization_config of its config.json cannot be used", ModelError):
            known = AutoHfQuantizer.supports_quant_method(quantization)
        if not known:
            raise ModelError(
                f"{source.name}: transformers {transformers.__version__} does not know the quantization of config.json "
                f"({shown(quantization['quant_method'])}): give a dequantized model"
            )


def config_of(source: Source) -> Any:
    """Returns a model's config; its weights need not be there."""
    _check_revision(source)
    if source.gguf is not None:
        cannot = f"{source.gguf.path}: transformers {transformers.__version__} cannot read it"
        with reading(cannot, ModelError), read_quickly(source.gguf):
            config = AutoConfig.from_pretrained(source.location, **source.loading)
            check_config(source.gguf, config)
            return config
    check_folder(source)
    if source.folder is None:
        missing = "there is no such folder, and no such model can be fetched from the hub"
        with reading(f"{source.name}: {missing}", ModelError):
            return AutoConfig.from_pretrained(source.location, **source.loading)
    path = source.folder / CONFIG_FILE
    content = read_json(path)
    with reading(f"{source.name}: its config.json cannot be used", ModelError):
        check_counts(content, str(path))
        return AutoConfig.from_pretrained(source.location, **source.loading)


def check_folder(source: Source) -> None:
    """Refuses a path that is not a folder, and a folder that is not a model's."""
    if source.folder is None:
        if os.path.exists(source.name) or source.name.startswith((".", "/", "~")) or source.name.count("/") > 1:
            problem = "is not a folder" if os.path.exists(source.name) else "does not exist"
            raise ModelError(
                f"{source.name} {problem}: give a Hugging Face model folder, a .gguf file, a hub name, or demo"
            )
        return
    _check_revision(source)
    if source.holds(ADAPTER):
        raise ModelError(f"{source.name} holds an adapter ({ADAPTER}): merge it into its model and save that first")
    if not source.holds(CONFIG_FILE):
        inside = [name for name in modules_of(source) if source.holds(f"{name}/{CONFIG_FILE}")]
        where = f": the model that {MODULES} names is {source.name}/{inside[0]}, give that" if inside else ""
        raise ModelError(f"{source.name} holds no config.json{where or ': it is not a Hugging Face model folder'}")


def _check_revision(source: Source) -> None:
    if source.revision is not None and (source.name == DEMO or os.path.exists(source.name)):
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
        model_class: Any = getattr(transformers, names[0], None)
        if model_class is None and source.trust_remote_code:
            model_class = _remote_class(config, names[0], source)
    is_model = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
    if not is_model:
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
    """Returns the names of token-predicting classes for a config that names no class, as a GGUF file's does."""
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
            remote: Any = get_class_from_dynamic_module(
                path, source.location, revision=source.revision, token=source.token
            )
            remote.register_for_auto_class(auto_class)  # so that save_pretrained saves its code, too
            return remote
    return None


def _refuse_pickles(source: Source) -> None:
    if source.gguf is not None:
        return
    check_folder(source)
    if source.folder is None or source.holds(INDEX_FILE) or any(source.folder.glob("*.safetensors")):
        return
    files = [name for pattern in PICKLED for name in sorted(file.name for file in source.folder.glob(pattern))]
    pickles = [name for name in files if not name.startswith(OF_TRAINING)]
    if not pickles:
        raise ModelError(f"{source.name} holds no weights: give one with {WEIGHTS_FILE}, or shards and their index")
    raise ModelError(
        f"{source.name} holds only {pickles[0]}, a pickle, which can run code when it is read: permtriton reads "
        ".safetensors only; convert the checkpoint first"
    )


def _quantization(config: Any) -> Any:
    """Returns the ``quantization_config`` of a config or of its text part; None if neither has one."""
    parts = (config, config.get_text_config(decoder=True))
    return next(filter(None, (getattr(part, "quantization_config", None) for part in parts)), None)


def _dequantizing(source: Source, pruned: Any) -> dict[str, Any]:
    """Returns the arguments that make transformers dequantize; versions without ``GgufConfig`` always dequantize GGUF.

    Args:
        pruned: config of a model to prune, which is dequantized also if it is not GGUF; None for any other model.
    """
    if pruned is not None and source.gguf is None and isinstance(quantization := _quantization(pruned), dict):
        quantization["dequantize"] = True
        return {"config": pruned}
    kind = getattr(transformers, "GgufConfig", None)
    return {} if source.gguf is None or kind is None else {"quantization_config": kind(dequantize=True)}

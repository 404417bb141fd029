"""Loads models in safetensors or GGUF: from folders, from the Hugging Face hub, or the demo."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto
from transformers.quantizers import AutoHfQuantizer

from permtriton.errors import ConfigError, ModelError, listed, reading, shown
from permtriton.model.copied_files import module_folders
from permtriton.model.gguf_file import ANOTHER, MAY_BE_UNUSED, GgufFile, check_config, read_quickly
from permtriton.model.headers import (
    CONFIG_FILE,
    INDEX_FILE,
    REPORT_FILE,
    WEIGHTS_FILE,
    StoredTensor,
    indexed_files,
    read_checkpoint,
    read_json,
)
from permtriton.model.prunable import check_weights, compiled_already, rehearse_saving
from permtriton.model.source import MODULES, Source, dtype_of, resolve_device
from permtriton.model.tokenizer import load_processor
from permtriton.util.extras import require
from permtriton.util.progress import NoProgress, Progress

ADAPTER = "adapter_config.json"
# Patterns of the files that are fetched from the hub in the folders that `MODULES` lists.
OF_A_MODULE = ("*.json", "*.txt", "*.model", "*.safetensors")


def load_original(
    source: Source, *, saved: bool = False, progress: Progress | None = None
) -> tuple[PreTrainedModel, Any]:
    """Loads a model to prune, and its tokenizer or processor, as `load_processor` returns it.

    Args:
        saved: whether the model will be saved. If so, a model that could not be saved is refused now.
    """
    model = load_model(source, allow_compiled=False, progress=progress)
    if (text := model.config.get_text_config(decoder=True)) is not model.config:  # transformers deletes the outer entry
        vars(text).pop("quantization_config", None)
    tokenizer = load_processor(source, model, progress)
    if saved:
        rehearse_saving(source.name, model, tokenizer)
    return model, tokenizer


def load_model(source: Source, allow_compiled: bool = True, progress: Progress | None = None) -> PreTrainedModel:
    """Loads a model with the class that its config names, in eval mode, on the device of ``source``.

    Args:
        allow_compiled: whether to accept a model that permtriton compiled. If not, weights that another tool quantized
            are dequantized as well, if transformers can do that.
    """
    progress = progress or NoProgress()
    progress.say(f"loading {source.described}")
    with progress.stage("load", 0):
        return _loaded(source, allow_compiled, progress)


def _loaded(source: Source, allow_compiled: bool, progress: Progress) -> PreTrainedModel:
    dtype, device = dtype_of(source), resolve_device(source.device)
    config = config_of(source)
    if not allow_compiled and (_is_compiled(config) or source.find(REPORT_FILE)):
        raise compiled_already(source.name)
    model_class = _model_class(source, config)
    _fetch_weights(source)
    stored = {} if source.gguf else read_checkpoint(source.folder)
    with reading(f"{source.name} cannot be loaded as {model_class.__name__}", ModelError), read_quickly(source.gguf):
        model, info = model_class.from_pretrained(
            source.folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # lists them in the info; transformers' error names none
            **source.loading,
            **_options(source, config, str(device), dequantize=not allow_compiled),
        )
    if differing := sorted(info["mismatched_keys"]):
        tensor, shape, needed = differing[0]
        raise ModelError(
            f"{source.name}: {tensor} has the shape {list(shape)}, but {model_class.__name__} with this config.json "
            f"needs {list(needed)}{f', and {len(differing) - 1} more differ' if differing[1:] else ''}: a size in "
            "config.json is damaged, or it belongs to other weights"
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{source.name} holds no weights for {missing[0]}"
            + (f" and {len(missing) - 1} more" if missing[1:] else "")
            + f", which {model_class.__name__} needs: the checkpoint is incomplete, or config.json names another class"
        )
    model.name_or_path = source.name  # transformers sets the folder
    model.config._commit_hash = source.at_commit().revision  # for `source_of_loaded`; transformers does not save it
    without_place = set(info["unexpected_keys"])
    if source.gguf is not None:
        _check_tensors(model, source.gguf, without_place)
    elif names := _left_out(model, stored, without_place, source.name):
        progress.say(f"tensors that {model_class.__name__} does not use are left out: {listed(names)}")
    if hasattr(model, "ct_decompress_hook"):  # the hook runs before the whole model, but not before a submodule alone
        model.hf_quantizer.compressor.decompress_model(model)
    check_weights(model)
    return model.to(device).eval()


def _options(source: Source, config: Any, device: str, *, dequantize: bool) -> dict[str, Any]:
    """Returns further arguments of ``from_pretrained``; to dequantize other formats than GGUF, changes ``config``."""
    if source.gguf is not None:  # older versions without the class always dequantize
        kind = getattr(transformers, "GgufConfig", None)
        return {} if kind is None else {"quantization_config": kind(dequantize=True)}
    if dequantize and isinstance(quantization := _quantization(config), dict):
        quantization["dequantize"] = True
    if not _is_compiled(config) or device == "cpu":
        return {}
    require(f"{source.name} on a GPU", "accelerate")
    return {"device_map": device}  # loaded right onto a GPU, packed weights stay packed


def load_empty_model(source: Source) -> PreTrainedModel:
    """Builds the model on the meta device from its config alone; of a compiled model, its original architecture."""
    config = config_of(source)
    if _is_compiled(config):
        del config.quantization_config
    model_class, cannot = _model_class(source, config), "cannot be built from config.json"
    with reading(f"{source.name}: {model_class.__name__} {cannot}", ModelError), torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(config)
        return model.eval()


def _left_out(model: PreTrainedModel, stored: Mapping[str, StoredTensor], unused: set[str], name: str) -> list[str]:
    """Returns the stored tensors that the class does not use, such as heads, further layers and masks.

    Refuses a checkpoint if the model uses a weight, but not the scale or the nonzero bias that belongs to it: without
    these, the model would compute something else.

    Args:
        unused: tensors that transformers' loading info names. The info leaves out tensors that a class ignores, such
            as those of layers that predict further tokens.
    """
    inner = f"{model.base_model_prefix}."
    in_model = {name.removeprefix(inner) for name in model.state_dict()}
    used = in_model | {name.removeprefix(inner) for name in stored.keys() - unused}
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
    for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ():
        fitting = {name for name in stored if name.removeprefix(inner) not in in_model and re.search(pattern, name)}
        if any(name.endswith("weight") for name in fitting):  # else they are buffers of earlier versions
            unused = unused | fitting
    return sorted(unused)


def _check_tensors(model: PreTrainedModel, file: GgufFile, unused: set[str]) -> None:
    """Refuses a file with tensors that transformers left out, except biases that are 0 and `MAY_BE_UNUSED`.

    Args:
        unused: tensors that transformers' loading info names; for most architectures of GGUF, the info names none.
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
    return isinstance(stored, dict) and stored.get("quant_method") == "permtriton"


def _fetch_weights(source: Source) -> None:
    """Fetches the weights of a hub name, the files that its index names or the only one, and what is in subfolders."""
    if source.on_hub and source.gguf is None:
        index = source.folder / INDEX_FILE
        files = indexed_files(index) if index.is_file() else [WEIGHTS_FILE]
        inside = [f"{module}/{pattern}" for module in module_folders(source) for pattern in OF_A_MODULE]
        # Of the commit of the other files.
        source.fetch(source.folder.name, [*files, *inside, "additional_chat_templates/*.jinja"])
        for file in files:
            source.has(file)  # without a network, refuses a file that the cache does not hold


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
    check_folder(source)
    problem = f"transformers {transformers.__version__} cannot read it"
    if source.gguf is None:
        problem = "its config.json cannot be used"
        read_json(source.folder / CONFIG_FILE)
    with reading(f"{source.name}: {problem}", ModelError), read_quickly(source.gguf):
        config = AutoConfig.from_pretrained(source.folder, **source.loading)
        if source.gguf is not None:
            check_config(source.gguf, config)
    _check_config(source, config)
    return config


def check_folder(source: Source) -> None:
    """Refuses a path that is no folder, a folder that is not a model's, and a revision of what is on this machine."""
    if source.revision is not None and not source.on_hub:
        raise ConfigError(
            f"`revision={source.revision}` has no effect on {source.name}, which is on this machine: leave it out"
        )
    if source.gguf is not None:
        return
    if source.find(ADAPTER):
        raise ModelError(f"{source.name} holds an adapter ({ADAPTER}): merge it into its model and save that first")
    if not source.has(CONFIG_FILE):
        inside = [name for name in module_folders(source) if source.find(f"{name}/{CONFIG_FILE}")]
        where = f": the model that {MODULES} names is {source.name}/{inside[0]}, give that" if inside else ""
        raise ModelError(f"{source.name} holds no config.json{where or ': it is not a Hugging Face model folder'}")


def _model_class(source: Source, config: Any) -> Any:
    # The config of a GGUF file names no class: the one that predicts tokens is taken.
    heads = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    names = config.architectures or [of[config.model_type] for of in heads if source.gguf and config.model_type in of]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(
            f'{source.name}: config.json names no class in "architectures": add one, such as LlamaForCausalLM'
        )
    with reading(f"{source.name}: its class {shown(names[0])} cannot be imported", ModelError):
        model_class: Any = getattr(transformers, names[0], None)
        if model_class is None and source.trust_remote_code:
            model_class = _remote_class(config, names[0], source)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ModelError(
            f"{source.name}: {names[0]} is not a model class of transformers {transformers.__version__}: upgrade "
            "transformers, or, if the model comes with its own code and you trust it, use `trust_remote_code=True`"
        )
    return model_class


def _remote_class(config: Any, name: str, source: Source) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for auto_class, path in getattr(config, "auto_map", {}).items():
        if auto_class.startswith("AutoM") and str(path).endswith(name):
            remote: Any = get_class_from_dynamic_module(path, str(source.folder), token=source.token)
            remote.register_for_auto_class(auto_class)  # so that save_pretrained saves its code, too
            return remote
    return None


def _quantization(config: Any) -> Any:
    """Returns the ``quantization_config`` of a config or of its text part; None if neither has one."""
    parts = (config, config.get_text_config(decoder=True))
    return next(filter(None, (getattr(part, "quantization_config", None) for part in parts)), None)

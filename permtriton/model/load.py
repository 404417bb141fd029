"""Loads models and tokenizers from local folders, from the Hugging Face hub, or the demo; safetensors only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from permtriton import demo
from permtriton.errors import ConfigError, ModelError
from permtriton.kernels import autotune
from permtriton.model.modules import is_packed, is_permuted

DTYPES = {"auto": "auto", "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
REPORT_FILE = "permtriton.json"  # marks a folder that permtriton wrote
PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Source:
    """Where a model comes from and how to read it.

    Attributes:
        name: folder, hub name, or ``demo``.
        dtype: ``auto`` (the checkpoint's dtype), ``float32``, ``float16`` or ``bfloat16``.
        device: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
        trust_remote_code: whether code that comes with the model may run.
    """

    name: str
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    @property
    def location(self) -> str:
        """The folder or hub name."""
        return str(demo.FOLDER) if self.name == "demo" else self.name


def resolve_device(device: str) -> torch.device:
    """Returns the device that ``auto``, ``cpu`` or ``cuda`` means on this machine.

    Raises:
        ConfigError: another name, or ``cuda`` without a usable GPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {device!r} is unknown: choose auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device cuda: this machine has no usable CUDA GPU (or torch is a CPU build); use --device cpu"
        )
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def load_original(source: Source) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Loads a model to prune, and its tokenizer.

    Raises:
        ModelError: permtriton wrote the folder, or as `load_model` and `load_tokenizer`.
        ConfigError: as `load_model`.
    """
    if (Path(source.location) / REPORT_FILE).is_file():
        raise _compiled_already(source)
    return load_model(source), load_tokenizer(source)


def load_model(source: Source) -> PreTrainedModel:
    """Loads a model with the class that its config names, in eval mode, on the device of ``source``.

    Raises:
        ModelError: no such folder, no config, no safetensors, an unknown class, missing weights, or weights that are
            not finite.
        ConfigError: an unknown dtype, or a device that is unknown or missing.
    """
    if source.dtype not in DTYPES:
        raise ConfigError(f"dtype {source.dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    device = resolve_device(source.device)
    model_class = _model_class(source)
    _refuse_pickles(source)
    try:
        model, info = model_class.from_pretrained(
            source.location,
            dtype=DTYPES[source.dtype],
            use_safetensors=True,
            output_loading_info=True,
            **_remote_code(source),
        )
    except Exception as error:  # transformers raises many kinds for damaged files, wrong shapes or missing packages
        raise ModelError(f"{source.name} cannot be loaded as {model_class.__name__}: {_first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{source.name} holds no weights for {missing[0]}"
            + (f" and {len(missing) - 1} more" if missing[1:] else "")
            + f", which {model_class.__name__} needs: the checkpoint is incomplete, or config.json names another class"
        )
    check_weights(model)
    autotune.use_beside(Path(source.location))
    return model.to(device).eval()


def load_empty_model(source: Source, allow_compiled: bool = False) -> PreTrainedModel:
    """Builds the model on the meta device from its config alone; no weights are read.

    Args:
        source: source of the config.
        allow_compiled: whether to accept a model that permtriton compiled, and build its original architecture.

    Raises:
        ModelError: no such folder, no config, an unknown class, or a compiled model that is not accepted.
    """
    model_class = _model_class(source)
    config = _config(source)
    stored = getattr(config, "quantization_config", None) or {}
    if (stored if isinstance(stored, dict) else stored.to_dict()).get("quant_method") == "permtriton":
        if not allow_compiled:
            raise _compiled_already(source)
        del config.quantization_config
    try:
        with torch.device("meta"):
            return model_class._from_config(config).eval()
    except Exception as error:  # each model class raises kinds of its own
        raise ModelError(f"{source.name}: {model_class.__name__} cannot be built: {_first_line(error)}") from error


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer; returns None if there is none.

    Raises:
        ModelError: the folder holds a tokenizer that cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(source.location, **_remote_code(source))
    except Exception as error:  # a missing tokenizer and a damaged one raise the same kinds
        if (Path(source.location) / "tokenizer_config.json").is_file():
            raise ModelError(f"{source.name}: its tokenizer cannot be loaded: {_first_line(error)}") from error
        return None


def check_original(model: PreTrainedModel) -> None:
    """Refuses a model that is compiled already, or whose weights are damaged.

    Raises:
        ModelError: a module permutes channels at run time or holds packed weights, or a weight is not finite.
    """
    for name, module in model.named_modules():
        if is_permuted(module) or is_packed(module):
            raise ModelError(
                f"this model is compiled already ({name} is a {type(module).__name__}): compile the original model "
                "instead"
            )
    check_weights(model)


def check_weights(model: PreTrainedModel) -> None:
    """Refuses weights that are NaN or infinite.

    Raises:
        ModelError: a weight is not finite; the message names the first such parameter.
    """
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            bad = int((~parameter.isfinite()).sum())
            raise ModelError(
                f"{name}: {bad} of {parameter.numel()} weights are NaN or infinite; the checkpoint is damaged"
            )


def _compiled_already(source: Source) -> ModelError:
    return ModelError(f"{source.name} was compiled already by permtriton: give the original model")


def _config(source: Source) -> Any:
    path = Path(source.location)
    if not path.is_dir() and (path.exists() or source.name.startswith((".", "/", "~")) or source.name.count("/") > 1):
        raise ModelError(f"{source.name} is not a folder: give a Hugging Face model folder, a hub name, or demo")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{source.name} holds no config.json: it is not a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(source.location, **_remote_code(source))
    except Exception as error:  # the hub client and the config classes raise many kinds
        missing = "there is no such folder, and no such model can be fetched from the hub"
        problem = "its config.json cannot be used" if path.is_dir() else missing
        raise ModelError(f"{source.name}: {problem}: {_first_line(error)}") from error


def _model_class(source: Source) -> Any:
    config = _config(source)
    names = config.architectures or []
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(
            f'{source.name}: config.json names no class in "architectures": add one, such as LlamaForCausalLM'
        )
    model_class = getattr(transformers, names[0], None)
    if model_class is None and source.trust_remote_code:
        model_class = _remote_class(config, names[0], source.location)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ModelError(
            f"{source.name}: {names[0]} is not a model class of transformers {transformers.__version__}: upgrade "
            "transformers, or, if the model comes with its own code and you trust it, use --trust-remote-code"
        )
    return model_class


def _remote_class(config: Any, name: str, location: str) -> Any:
    """Returns the class ``name`` from the code that comes with the model; None if there is none."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for auto_class, path in getattr(config, "auto_map", {}).items():
        if auto_class.startswith("AutoM") and str(path).endswith(name):
            return get_class_from_dynamic_module(path, location)
    return None


def _refuse_pickles(source: Source) -> None:
    path = Path(source.location)
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return
    pickles = sorted(file.name for pattern in PICKLED for file in path.glob(pattern))
    content = f"only {pickles[0]}, a pickle, which can run code when it is read" if pickles else "no weights"
    raise ModelError(f"{source.name} holds {content}: permtriton reads .safetensors only; convert the checkpoint first")


def _remote_code(source: Source) -> dict[str, bool]:
    return {"trust_remote_code": source.trust_remote_code}


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

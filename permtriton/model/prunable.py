"""Refuses models in memory that cannot be pruned, or that could not be saved again, before the work begins."""

import os
from copy import deepcopy
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from permtriton.errors import ModelError, reading
from permtriton.model.checks import all_finite
from permtriton.model.core import check_towers
from permtriton.model.headers import REPORT_FILE
from permtriton.model.modules import is_packed, is_permuted


def check_original(model: PreTrainedModel) -> None:
    """Refuses a model that is compiled, divided between devices, only compares outputs, or has unusable weights.

    The quantization config of a model that transformers dequantized from GGUF is removed, as it prevents saving.
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
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise ModelError(
            f"this {type(model).__name__} is divided between {' and '.join(devices)}: load it without device_map, or "
            "give the folder in place of the model"
        )
    check_towers(model)
    check_weights(model)


def check_not_compiled(model: PreTrainedModel) -> None:
    if model.name_or_path and os.path.isfile(os.path.join(model.name_or_path, REPORT_FILE)):
        raise compiled_already(model.name_or_path)


def check_loaded(model: PreTrainedModel) -> None:
    if empty := next((name for name, parameter in model.named_parameters() if parameter.is_meta), None):
        raise ModelError(
            f"{empty} of this {type(model).__name__} has no values (it is on the meta device): load the weights first, "
            "or give the folder in place of the model"
        )


def check_weights(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        values = parameter.float() if parameter.dtype.itemsize == 1 else parameter  # torch has no isfinite of float8
        if not all_finite(values):
            bad = int((~values.isfinite()).sum())
            raise ModelError(
                f"{name}: {bad} of {parameter.numel()} weights are NaN or infinite; the checkpoint is damaged"
            )


def compiled_already(name: str) -> ModelError:
    return ModelError(f"{name} has already been compiled by permtriton: pass the original model")


def rehearse_saving(name: str, model: PreTrainedModel, tokenizer: Any) -> None:
    """Refuses a model that could not be saved at the end: saves all but its weights, and resolves its tied weights.

    transformers checks some values of configs, and whether a class declares its tied weights, only when it saves.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    with reading(f"{name} could not be saved again", ModelError), TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        model.save_pretrained(folder, state_dict={}, is_main_process=False)
        remove_tied_weights_from_state_dict(model.state_dict(), model)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def check_made_by_config(model: PreTrainedModel) -> None:
    """Refuses a model whose parameters differ from those that its class makes: saved, it would load as another model.

    Accepts added modules, which are saved although no class reads them, and untied weights, which are loaded untied.
    """
    try:
        with torch.device("meta"):
            made = type(model)._from_config(deepcopy(model.config))  # _from_config changes the config
    except Exception:  # a class may read values, which meta tensors lack; the saved folder is loaded at the end
        return
    expected: dict[str, list[int] | None] = {name: list(weight.shape) for name, weight in made.named_parameters()}
    for prefix, module in made.named_modules():
        expected |= {f"{prefix}.{name}": None for name, weight in module._parameters.items() if weight is None}
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            raise ModelError(
                f"this {type(model).__name__} differs from what its class makes of its config, so that it could not be "
                f"loaded again: {name} is {shapes.get(name, 'missing or tied')}, expected {shape or 'none'}: "
                "change the config, give a model whose class makes these parameters, or undo the changes (merge "
                "adapters, remove parametrizations, compile no module inside)"
            )

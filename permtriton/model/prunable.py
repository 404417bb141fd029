"""Which models in memory can be pruned: those with finite weights, that permtriton has not compiled already."""

import os
from itertools import pairwise

from transformers import PreTrainedModel

from permtriton.errors import ModelError
from permtriton.model.checks import all_finite
from permtriton.model.core import check_towers
from permtriton.model.headers import REPORT_FILE
from permtriton.model.modules import is_packed, is_permuted
from permtriton.model.source import Source


def check_original(model: PreTrainedModel) -> None:
    """Refuses a model that is compiled, divided between devices, only compares outputs, or has unusable weights.

    Of a model that transformers dequantized from GGUF, the quantization config is removed: with it, it cannot be saved.
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
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise ModelError(
                f"{name} was made inside torch.inference_mode, so that it cannot be changed: load the model outside"
            )
    check_towers(model)
    _check_memory(model)
    check_weights(model)


def check_not_compiled(model: PreTrainedModel) -> None:
    if model.name_or_path and os.path.isfile(os.path.join(model.name_or_path, REPORT_FILE)):
        raise compiled_already(Source(model.name_or_path))


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


def _check_memory(model: PreTrainedModel) -> None:
    """Refuses two parameters that share memory: a change of one would change the other, too."""
    there = [
        (tensor.data_ptr(), tensor.nbytes, name) for name, tensor in model.named_parameters() if not tensor.is_meta
    ]
    for (start, size, name), (following, _, other) in pairwise(sorted(extent for extent in there if extent[1])):
        if following < start + size:
            raise ModelError(
                f"{name} and {other} share memory, but are two parameters: make one nn.Parameter of them (tied "
                "weights), or copy one of them"
            )


def compiled_already(source: Source) -> ModelError:
    return ModelError(f"{source.name} has already been compiled by permtriton: pass the original model")

"""Which linears are stored in 8 bits, in formats fp8 and packed-fp8, and how format fp8 is described to other programs.

Both formats store float8 e4m3 with a scale per output channel. Activations are quantized per token while the model
runs, so that nothing needs calibrating, and both folders compute the same. A zero stays a zero, so that the model stays
N:M; a kept weight below ``scale / 1024`` becomes 0, too.

Format fp8 is compressed-tensors' layout, which vLLM reads by itself, and transformers where that package is installed:

    W [out, in]  ->  weight        float8_e4m3fn [out, in], W / scale rounded
                     weight_scale  [out, 1] in the dtype of W: max |W| of the row / 448, or the scale by which the step
                                   ``round`` has rounded the row

Format packed-fp8 stores the kept values of the same weight, and their positions. Stacked experts, transposed
weights and tied weights are packed in the dtype of the model.
"""

import re
from collections.abc import Mapping, Set
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton.checkpoint.card import WITH_COMPRESSED_TENSORS
from permtriton.checkpoint.folder import Folder
from permtriton.checkpoint.format_writer import FormatWriter
from permtriton.checkpoint.names import loaded_names
from permtriton.errors import ModelError
from permtriton.model.experts import stacks

LAYOUT, SCHEME = "float-quantized", "FP8_DYNAMIC"  # as compressed-tensors calls them


def packed_fp8_writer(source: Folder) -> FormatWriter:
    """Returns a writer that packs all pruned weights; those of linears, unless tied, in 8 bits."""
    model = source.empty_model()
    tied = {name for pair in dict(getattr(model, "all_tied_weights_keys", None) or {}).items() for name in pair}
    linears = {f"{name}.weight" for name in _linears(model)} - tied
    rounded = {name for name, new in loaded_names(model, source.pruned).items() if new in linears}
    return FormatWriter(source, packed=source.pruned, rounded=rounded)


class Fp8Writer(FormatWriter):
    """Stores pruned linears, and the linears beside them, in 8 bits; all other tensors unchanged.

    Linears beside a pruned one are those in the same module of any layer, such as a dense query beside a pruned key:
    inference engines join such linears into one, which must have one dtype.
    """

    loads_with = WITH_COMPRESSED_TENSORS

    def __init__(self, source: Folder) -> None:
        model = source.empty_model()
        check_quantizable(model)
        names, linears = loaded_names(model, source.names()), _linears(model)
        weights = {name: new for name, new in names.items() if new.removesuffix(".weight") in linears}
        if other := sorted(source.pruned.keys() - weights.keys()):
            raise ModelError(
                f"{other[0]} is not the weight of an nn.Linear, which format fp8 needs: use dense or packed"
            )
        places = {_place(name) for name in source.pruned}
        rounded = {name: new for name, new in weights.items() if _place(name) in places}
        super().__init__(source, rounded=rounded)
        quantized = {name.removesuffix(".weight") for pair in rounded.items() for name in pair}
        beside = {name.removesuffix(".weight") for pair in weights.items() for name in pair}
        self._ignored = _ignored(model, quantized, (beside | linears) - quantized)

    def quantization_config(self, hashes: Mapping[str, str]) -> dict[str, Any]:
        from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

        config = QuantizationConfig(
            config_groups={"group_0": preset_name_to_scheme(SCHEME, ["Linear"])},
            format=LAYOUT,
            quantization_status="compressed",
            ignore=self._ignored,
        )
        entries: dict[str, Any] = config.model_dump(mode="json")
        return entries


def check_quantizable(model: PreTrainedModel) -> None:
    """Refuses a model whose layers cannot be stored in 8 bits, before any work."""
    for name, module in model.named_modules():
        if isinstance(module, Conv1D) or stacks(module):
            raise ModelError(
                f"{name} is a {type(module).__name__}, but format fp8 stores the weights of nn.Linear only, neither "
                "stacked experts nor transposed weights: use dense or packed"
            )


def _linears(model: PreTrainedModel) -> set[str]:
    return {name for name, module in model.named_modules() if type(module) is nn.Linear}


def _ignored(model: PreTrainedModel, quantized: Set[str], dense: Set[str]) -> list[str]:
    """Returns the entry ``ignore``: names, and a pattern of all names outside the layers with quantized linears.

    Both also hold for other classes with the same base model, whose heads have other linears, and for names with and
    without the prefix of the base model. A pattern of the quantized linears would need the names that vLLM gives to
    joined linears; it does not rename lists of layers.

    Args:
        quantized, dense: names of the linears in 8 bits and of all others, both in the folder and in the model.
    """
    inner = f"{model.base_model_prefix}.".lstrip(".")
    places = "|".join(sorted({_numbered(name) or f"{re.escape(name.removeprefix(inner))}$" for name in quantized}))
    elsewhere = rf"(?!$|(.*\.)?({places}))"  # vLLM has linears without a name
    bare = {name.removeprefix(inner) for name in dense if not re.match(elsewhere, name)}
    return [*sorted(dense | bare | {inner + name for name in bare}), f"re:{elsewhere}"]


def _place(weight: str) -> str:
    """Returns the name of the module that holds a linear, with ``*`` in place of each number, such as a layer's."""
    return re.sub(r"\.\d+(?=\.)", ".*", weight.rpartition(".")[0].rpartition(".")[0] + ".")


def _numbered(linear: str) -> str:
    """Returns a pattern for the outermost numbered list that holds the linear's module, such as the layers; or none."""
    match = re.match(r"(?:.*?\.)?([^.]+)\.\d+\.", linear)
    return rf"{re.escape(match[1])}\.\d+\." if match else ""

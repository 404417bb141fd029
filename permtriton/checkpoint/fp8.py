"""Stores linears in 8 bits: float8 e4m3 with a scale per output channel, as compressed-tensors lays it out.

vLLM reads that layout by itself, transformers where compressed-tensors is installed. Activations are quantized per
token while the model runs, so that nothing needs calibrating.

    W [out, in]  ->  weight        float8_e4m3fn [out, in], W / scale rounded
                     weight_scale  [out, 1] in the dtype of W: max |W| of the row / 448, or the scale by which the step
                                   ``round`` has rounded the row

A zero stays a zero, so that the model stays N:M; a kept weight below ``scale / 1024`` becomes 0, too.
"""

import re
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton.checkpoint.card import WITH_COMPRESSED_TENSORS
from permtriton.checkpoint.folder import Folder
from permtriton.checkpoint.format_writers import FormatWriter
from permtriton.checkpoint.names import loaded_names
from permtriton.errors import ModelError
from permtriton.kernels.quantize import dequantized, round_to_fp8
from permtriton.model.checks import check_finite_tensor
from permtriton.model.expert_linears import stacks
from permtriton.model.load import load_empty_model
from permtriton.model.name import location_of
from permtriton.model.nm_checks import check_weight
from permtriton.model.source import Source

LAYOUT, SCHEME = "float-quantized", "FP8_DYNAMIC"  # as compressed-tensors calls them
NOTHING_ROUNDED = {"quantized": 0, "rounded": 0, "further_zeros": 0}


class Fp8Writer(FormatWriter):
    """Stores pruned linears, and the linears beside them, in 8 bits; all other tensors as they are.

    Linears beside a pruned one are those in the same module of any layer, such as a dense query beside a pruned key:
    inference engines join such linears into one, which must have one dtype.

    Attributes:
        quantized: name of a quantized weight in the folder -> its name in the model that transformers loads.
    """

    def __init__(self, source: Folder) -> None:
        super().__init__(source)
        self._model = load_empty_model(Source(location_of(source.path), device="cpu"), allow_compiled=True)
        check_quantizable(self._model)
        names = loaded_names(self._model, source.names())
        linears = {name: linear for name, linear in self._model.named_modules() if type(linear) is nn.Linear}
        weights = {name: new for name, new in names.items() if new.removesuffix(".weight") in linears}
        if other := sorted(source.pruned.keys() - weights.keys()):
            raise ModelError(
                f"{other[0]} is not the weight of an nn.Linear, which format fp8 needs: use dense or packed"
            )
        places = {_place(name) for name in source.pruned}
        self.quantized = {name: new for name, new in weights.items() if _place(name) in places}
        left = linears.keys() - {name.removesuffix(".weight") for name in self.quantized.values()}
        stored = {name.removesuffix(".weight") for name, new in weights.items() if new.removesuffix(".weight") in left}
        self._ignored = self._not_quantized(left | stored)
        self.loads_with, self.counts = WITH_COMPRESSED_TENSORS, dict(NOTHING_ROUNDED)

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name not in self.quantized:
            return super().parts(name, tensor)
        weight, scale = rounded(tensor, self.counts)
        return {name: weight, f"{name}_scale": scale}

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

    def names(self) -> list[str]:
        return [*super().names(), *(f"{name}_scale" for name in self.quantized)]

    def check(self, name: str, written: Folder) -> None:
        """Checks that a quantized weight is finite, and N:M if it is pruned; compares the bits of others."""
        if name not in self.quantized:
            super().check(name, written)
            return
        weight = dequantized(written.tensor(name), written.tensor(f"{name}_scale")).float()
        check_finite_tensor(name, weight)
        if name in self.source.pruned:
            check_weight(name, weight, self.source.pruned[name].pattern)

    def _not_quantized(self, left: Set[str]) -> list[str]:
        """Returns the entry ``ignore``: names, and a pattern of all names outside the layers with quantized linears.

        Both also hold for other classes with the same base model, whose heads have other linears, and for names with
        and without the prefix of the base model. A pattern of the quantized linears would need the names that vLLM
        gives to joined linears; it does not rename lists of layers.

        Args:
            left: names of the linears that are not quantized.
        """
        inner = f"{self._model.base_model_prefix}.".lstrip(".")
        names = {name.removesuffix(".weight") for pair in self.quantized.items() for name in pair}
        places = "|".join(sorted({_numbered(name) or f"{re.escape(name.removeprefix(inner))}$" for name in names}))
        elsewhere = rf"(?!$|(.*\.)?({places}))"  # vLLM has linears without a name
        bare = {name.removeprefix(inner) for name in left if not re.match(elsewhere, name)}
        return [*sorted(left | bare | {inner + name for name in bare}), f"re:{elsewhere}"]


def check_quantizable(model: PreTrainedModel) -> None:
    """Refuses a model whose layers cannot be stored in 8 bits, before any work."""
    for name, module in model.named_modules():
        if isinstance(module, Conv1D) or stacks(module):
            raise ModelError(
                f"{name} is a {type(module).__name__}, but format fp8 stores the weights of nn.Linear only, neither "
                "stacked experts nor transposed weights: use dense or packed"
            )


def rounded(tensor: Tensor, counts: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Returns a weight ``[out, in]`` in float8 e4m3, and its scales ``[out, 1]`` in its own dtype.

    Args:
        counts: numbers of linears (``quantized``), of those whose weights were not on FP8's grid already (``rounded``),
            and of kept weights that became 0 (``further_zeros``), to which this adds.
    """
    weight, scale = round_to_fp8(tensor)
    counts["quantized"] += 1
    counts["rounded"] += not torch.equal(dequantized(weight, scale), tensor)
    counts["further_zeros"] += int(((weight.view(torch.uint8) == 0) & (tensor != 0)).sum())
    return weight, scale


def _place(weight: str) -> str:
    """Returns the name of the module that holds a linear, with ``*`` in place of each number, such as a layer's."""
    return re.sub(r"\.\d+(?=\.)", ".*", weight.rpartition(".")[0].rpartition(".")[0] + ".")


def _numbered(linear: str) -> str:
    """Returns a pattern for the outermost numbered list that a linear is in, such as the layers; empty for none."""
    match = re.match(r"(?:.*?\.)?([^.]+)\.\d+\.", linear)
    return rf"{re.escape(match[1])}\.\d+\." if match else ""

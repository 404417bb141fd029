"""Stores pruned linears packed in 8 bits: kept values in float8 e4m3, their positions, and a scale per row.

Values and scales are those of format fp8 (``fp8.py``), and activations are quantized in the same way while the model
runs, so that both folders compute the same. Pruned weights that are no linear's (stacked experts, transposed weights)
are stored packed in their own dtype, and all other tensors as they are.
"""

from torch import Tensor, nn

from permtriton.checkpoint.folder import Folder
from permtriton.checkpoint.format_writers import PackedWriter, check_same_bits
from permtriton.checkpoint.fp8 import NOTHING_ROUNDED, rounded
from permtriton.checkpoint.names import loaded_names
from permtriton.checkpoint.quantization_config import packed_entry
from permtriton.kernels.quantize import dequantized, round_to_fp8
from permtriton.kernels.sparse_linear_fp8 import pack_fp8
from permtriton.model.checks import check_finite_tensor
from permtriton.model.load import load_empty_model
from permtriton.model.name import location_of
from permtriton.model.nm_checks import check_weight
from permtriton.model.source import Source


class PackedFp8Writer(PackedWriter):
    """Stores the pruned weights of linears (``quantized``: their names in the folder) packed in FP8."""

    def __init__(self, source: Folder) -> None:
        super().__init__(source)
        model = load_empty_model(Source(location_of(source.path), device="cpu"), allow_compiled=True)
        tied = {name for pair in dict(getattr(model, "all_tied_weights_keys", None) or {}).items() for name in pair}
        linears = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear} - tied
        self.quantized = {name for name, new in loaded_names(model, source.pruned).items() if new in linears}
        self.counts = dict(NOTHING_ROUNDED)

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name not in self.quantized:
            return super().parts(name, tensor)
        pruned = self.source.pruned[name]
        self._packed[name] = packed_entry(tensor.shape, pruned, str(self.source.pattern), in_fp8=True)
        rounded(tensor, self.counts)
        values, positions, scale = pack_fp8(tensor, pruned.pattern)
        parts = {"_values": values, "_positions": positions, "_scale": scale, "": tensor.new_empty(0)}
        return {name + part: stored for part, stored in parts.items()}

    def check(self, name: str, written: Folder) -> None:
        """Checks that a weight in FP8 is the rounded one, finite, and N:M."""
        if name not in self.quantized:
            super().check(name, written)
            return
        weight = written.tensor(name)
        check_finite_tensor(name, weight)
        check_weight(name, weight, self.source.pruned[name].pattern)
        check_same_bits(name, dequantized(*round_to_fp8(self.source.tensor(name))), weight)

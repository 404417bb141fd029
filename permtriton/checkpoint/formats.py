"""The formats in which `permtriton.export` stores pruned weights. **Add a format here**, and in `WRITERS` of export.py.

`permtriton.checkpoint.format_writer` says what a format's writer is.
"""

from enum import StrEnum


class Format(StrEnum):
    PACKED = "packed"
    PACKED_FP8 = "packed-fp8"
    DENSE = "dense"
    FP8 = "fp8"


MEANINGS = {
    Format.PACKED: "kept values and positions, 9/16 of the dense size at 2:4 and 16 bits; loads after import "
    "permtriton",
    Format.PACKED_FP8: "kept values in float8 e4m3 with a scale per row, and positions, 5/16 of the dense size at 2:4 "
    "and 16 bits; activations are quantized, too; loads after import permtriton",
    Format.DENSE: "zeros stored too",
    Format.FP8: "linears in float8 e4m3 with a scale per row, as compressed-tensors lays them out; vLLM loads it by "
    "itself, transformers with that package; refused in layout fused",
}
PACKED = (Format.PACKED, Format.PACKED_FP8)  # they store positions
IN_8_BITS = (Format.FP8, Format.PACKED_FP8)  # they round weights
HELP = " ".join(f"{name}: {meaning}." for name, meaning in MEANINGS.items())

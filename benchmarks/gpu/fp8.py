"""The rows of FP8: the packed product, and what quantizes its input."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from benchmarks.gpu.bench import Bench, Prepare
from benchmarks.gpu.kernels import eager_and_compiled
from benchmarks.gpu.models import TINY_LAYER, weighted
from benchmarks.gpu.table import BARE, DENSE, DENSE_FP8, FEW, LAYER, LAYER_8B, MANY, MORE, fp8_product_name
from benchmarks.shared import PATTERN
from permtriton.kernels.packing import pack, unpack
from permtriton.kernels.quantize import quantize
from permtriton.kernels.sparse_linear import sparse_linear
from permtriton.kernels.sparse_linear_fp8 import unpack_fp8
from permtriton.kernels.tools.case import Arguments
from permtriton.kernels.tools.cases import quantize_case, sparse_linear_fp8_case


def products(bench: Bench) -> None:
    """The packed FP8 product, which quantizes its input, against dense FP8, cuSPARSELt's FP8, and 16 bits."""
    layer = bench.pick(LAYER_8B, TINY_LAYER)
    for tokens in bench.pick((*FEW, *MORE, MANY[0]), (1, 16)):
        name = fp8_product_name(tokens)
        for rows, channels in layer:
            case, peers = sparse_linear_fp8_case(tokens, rows, channels, bench.dtype), _peers(channels)
            how: dict[str, Any] = {"seconds": 1.0, "reads": tokens in FEW, "label": f"{rows}x{channels}"}
            bench.compare(name, case, peers, unlike=(DENSE, "packed 2:4, 16 bits"), **how)
        weighted(bench, name, layer, LAYER)


def _peers(channels: int) -> dict[str, Prepare]:
    """Products of the same weight; those in FP8 quantize their input by the same kernel."""

    def in_16_bits(inputs: Arguments) -> Tensor:
        x, values, positions, scale = inputs[:4]
        return unpack_fp8(values, positions, scale, channels, PATTERN).to(x.dtype)

    def dense(inputs: Arguments) -> Callable[[], Tensor]:
        return partial(linear, inputs[0], in_16_bits(inputs))

    def packed(inputs: Arguments) -> Callable[[], Tensor]:
        return partial(sparse_linear, inputs[0], *pack(in_16_bits(inputs), PATTERN), None, None, channels, PATTERN)

    def dense_fp8(inputs: Arguments) -> Callable[[], Tensor]:
        x, values, positions, scale = inputs[:4]
        weight, row_scale = unpack(values, positions, channels, PATTERN).t(), scale.view(1, -1)

        def run() -> Tensor:
            quantized, token_scale = quantize(x, None)
            return torch._scaled_mm(quantized, weight, token_scale, row_scale, out_dtype=x.dtype)

        return run

    def by_cusparselt(inputs: Arguments) -> Callable[[], Tensor]:
        x, values, positions, scale = inputs[:4]
        form = torch._cslt_compress(unpack(values, positions, channels, PATTERN))
        missing = -len(x) % 16  # which this library wants of FP8

        def run() -> Tensor:
            quantized, token_scale = quantize(pad(x, (0, 0, 0, missing)), None)
            y = torch._cslt_sparse_mm(form, quantized.t(), alpha=scale, out_dtype=x.dtype, transpose_result=True)
            return (y * token_scale)[: len(x)].to(x.dtype)

        return run

    return {DENSE_FP8: dense_fp8, f"{BARE} FP8": by_cusparselt, "packed 2:4, 16 bits": packed, DENSE: dense}


def activations(bench: Bench) -> None:
    """Quantizing per token against eager torch, torch.compile and a copy of the same bytes."""
    for rows, channels in bench.pick([(16384, 4096), (16384, 14336), (16, 14336)], [(8, 256)]):
        case, peers = quantize_case(rows, channels, bench.dtype), eager_and_compiled(bench, lambda x, _: _eager(x))
        bench.compare(f"quantize, {rows} rows", case, peers, copies=True)


def _eager(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what `quantize_tokens` does, as people write it."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / 448
    return (wide / scale).to(torch.float8_e4m3fn), scale

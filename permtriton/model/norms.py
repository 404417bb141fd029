"""Recognises the norm that a module computes, whatever its class."""

import copy
import math
from itertools import product

import torch
from torch import nn

from permtriton.kernels.norm_permute import KINDS, NormVariant, norm_reference


def match_norm(module: nn.Module, channels: int) -> NormVariant | None:
    """Recognises a norm by its outputs on random input; returns None if it is no norm that the kernels support.

    A copy of the module on the CPU with random weights is compared with each variant in float32 and bfloat16, so the
    module may be on any device, including meta. Two variants may agree up to rounding; the one that differs from the
    module in the fewest elements is returned.

    Args:
        module: module to recognise. A norm has no children, buffers and hooks; it has a parameter ``weight`` ``[C]``,
            optionally a parameter ``bias`` ``[C]``, and its epsilon in an attribute whose name contains "eps".
    """
    parameters = dict(module.named_parameters())
    inside = [*module.children(), *module.buffers(), *module._forward_hooks, *module._forward_pre_hooks]
    if inside or not {"weight"} <= parameters.keys() <= {"weight", "bias"}:
        return None
    if any(parameter.shape != (channels,) for parameter in parameters.values()):
        return None
    epsilons = {
        value for key, value in vars(module).items() if "eps" in key and isinstance(value, float) and value >= 0
    }
    kinds = ("layer",) if "bias" in parameters else KINDS
    candidates = [NormVariant(kind, *one) for *one, kind in product(sorted(epsilons), (0.0, 1.0), kinds)]
    probe = copy.deepcopy(module).to_empty(device="cpu").eval()
    try:
        with torch.device("cpu"):  # the default device may be meta
            differing = {variant: _difference(probe, channels, variant) for variant in candidates}
    except Exception:  # a module that is no norm may raise anything on such an input
        return None
    best = min(candidates, key=lambda variant: differing[variant], default=None)
    return None if best is None or math.isinf(differing[best]) else best


@torch.no_grad()
def _difference(norm: nn.Module, channels: int, variant: NormVariant) -> float:
    """Returns the number of output elements in which ``norm`` and ``variant`` differ.

    Infinity if any element differs by more than two roundings, or if shape or dtype differ. Overwrites the parameters
    of ``norm`` with random values.
    """
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 30.0, 1e-2, 1e-3]).unsqueeze(1)  # the small rows show a difference in epsilon
    x = scale * (torch.randn(2, 4, channels, generator=generator) + 0.25)
    drawn = {name: torch.rand(channels, generator=generator) + 0.5 for name, _ in norm.named_parameters()}
    different = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        norm.to(dtype)
        for name, parameter in norm.named_parameters():
            parameter.copy_(drawn[name])
        weight, bias = norm.get_parameter("weight"), norm._parameters.get("bias")
        expected = norm_reference(x.to(dtype), weight, bias, variant)
        output = norm(x.to(dtype))
        if (output.shape, output.dtype) != (expected.shape, dtype):
            return math.inf
        tolerance = 2 * torch.finfo(dtype).eps
        if not torch.allclose(output, expected, rtol=tolerance, atol=tolerance):
            return math.inf
        different += float((output != expected).sum())
    return different

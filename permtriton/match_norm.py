"""Recognises which norm a module computes, whatever its class."""

import copy
import math

import torch
from torch import nn

from permtriton.kernels.norm_permute import NormVariant, norm_reference, norm_variants


def match_norm(module: nn.Module, channels: int) -> NormVariant | None:
    """Recognises a norm by what it computes on random input, whatever its class; None where it is none that we know.

    A copy of the module with a random weight, on the CPU, is compared with each variant in float32 and bfloat16, so a
    module on any device, meta too, can be asked. Two variants may agree to the last rounding: the one with the fewest
    different elements is taken.

    Args:
        module: without children, buffers and hooks, with a parameter ``weight`` ``[C]``, maybe ``bias`` ``[C]``, and
            its epsilon as a number in an attribute whose name contains "eps".
        channels: C.
    """
    parameters = dict(module.named_parameters())
    hooked = module._forward_hooks or module._forward_pre_hooks
    if hooked or any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return None
    if not {"weight"} <= set(parameters) <= {"weight", "bias"}:
        return None
    if any(parameter.shape != (channels,) for parameter in parameters.values()):
        return None
    epsilons = {v for k, v in vars(module).items() if "eps" in k and isinstance(v, float) and v >= 0}
    candidates = [v for eps in sorted(epsilons) for v in norm_variants(eps, "bias" in parameters)]
    probe = copy.deepcopy(module).to_empty(device="cpu").eval()
    try:
        with torch.device("cpu"):  # also where the caller builds models on the meta device
            differing = {variant: _difference(probe, channels, variant) for variant in candidates}
    except Exception:  # whatever a module that is no norm does with such an input
        return None
    best = min(candidates, key=lambda variant: differing[variant], default=None)
    return None if best is None or math.isinf(differing[best]) else best


@torch.no_grad()
def _difference(norm: nn.Module, channels: int, variant: NormVariant) -> float:
    """Returns how many elements ``norm`` and ``variant`` make different; infinity where any is further off.

    Further than two roundings, that is, or in shape or dtype. The norm's parameters are drawn anew.
    """
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 30.0, 1e-2, 1e-3]).unsqueeze(1)  # the last rows tell one epsilon from another
    x = scale * (torch.randn(2, 4, channels, generator=generator) + 0.25)
    drawn = {name: torch.rand(channels, generator=generator) + 0.5 for name, _ in norm.named_parameters()}
    different = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        norm.to(dtype)
        for name, parameter in norm.named_parameters():
            parameter.copy_(drawn[name])
        weight, bias = norm.get_parameter("weight"), norm._parameters.get("bias")
        expected = norm_reference(x.to(dtype), weight, bias, variant.eps, variant.offset, variant.kind)
        output = norm(x.to(dtype))
        if (output.shape, output.dtype) != (expected.shape, dtype):
            return math.inf
        tolerance = 2 * torch.finfo(dtype).eps
        if not torch.allclose(output, expected, rtol=tolerance, atol=tolerance):
            return math.inf
        different += float((output != expected).sum())
    return different

"""L1 distances of each line of ``left`` from each line of ``right``, block by block.

    sum_o |x_o - y_o| = 2 sum_o [x_o > y_o] (x_o - y_o) - sum_o x_o + sum_o y_o

Shapes: ``left`` and ``right`` ``[blocks, size, O]`` -> ``[blocks, size, size]``.
Bytes moved: for each of the O entries, a tile of 32 by 64 pairs reads 96 numbers twice, 0.4 bytes per pair and entry.
On a GPU the kernel of `placement_gradient` adds up the comparisons; `torch.cdist`, the reference, would run a program
per pair there, which reads 8 bytes per entry.
Floor: a comparison, a difference and a multiply-add per pair and entry.
"""

import torch
from torch import Tensor

from permtriton.kernels.operator import operator
from permtriton.kernels.placement_gradient import launched
from permtriton.kernels.swap_gains import SwapTerms


def distances_reference(left: Tensor, right: Tensor) -> Tensor:
    """Returns the L1 distance of each line of ``left`` from each line of ``right``, block by block."""
    return torch.cdist(left, right, p=1)


def distances_triton(left: Tensor, right: Tensor) -> Tensor:
    blocks, size, _ = left.shape
    x, y = (part.flatten(0, 1).t().contiguous().t() for part in (left, right))  # lines adjacent, for the kernel's loads
    present = torch.arange(blocks * size, device=left.device)
    above = launched(SwapTerms(x, x, y, y, x.new_empty(0)), present, size).view(blocks, size, size)
    return above.mul_(2).sub_(left.sum(2).unsqueeze(2)).add_(right.sum(2).unsqueeze(1))


distances = operator(
    lambda left, right: left.new_empty(*left.shape[:2], right.shape[1]),
    launcher=distances_triton,
    supports=lambda left, right: left.dtype == torch.float32,
)(distances_reference)

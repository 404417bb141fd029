# mypy: allow-untyped-defs
"""SparseGPT's pass over a block of channels: prune group by group, and let later channels compensate for the error.

With W ``[B, O]``, channels first, and U the block's part of the upper Cholesky factor of the inverse Hessian, for one
channel j after the other

    keep_j = whether w_j^2 / U_jj^2 is among the ``kept`` largest of its group, in W before the group is pruned
    e_j = (w_j - keep_j w_j) / U_jj,    W_k -= U_jk e_j for every k > j of the block,    w_j = keep_j w_j

(Frantar and Alistarh, 2023). Shapes: ``block`` ``[B, O]``, ``factor`` ``[B, B]``, ``keep`` bool ``[B, O]``, or None to
choose it -> W and e, both ``[B, O]``, float32. Bytes moved: W read, W and e written, 12 per weight; every program reads
U from the cache. Operations: 2 B per weight.

In plain torch a group takes some fifty launches, a millisecond on a GPU whatever the group's size. Rows of the weight
are independent, so a program of the Triton kernel holds the block's channels of TILE_O rows in registers and walks over
the channels. It reads a channel by summing over the tile with all others masked, since registers cannot be indexed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Config, jit, tl, triton
from permtriton.kernels.operator import operator
from permtriton.util.sparsity import NMPattern

MOST_CHANNELS, MOST_GROUP = 128, 8  # channels that a program holds, and channels of a group, whose ranks it counts

CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 16}, num_warps=4, num_stages=1),
    Config({"TILE_O": 16}, num_warps=8, num_stages=1),
    Config({"TILE_O": 32}, num_warps=8, num_stages=1),
    Config({"TILE_O": 64}, num_warps=8, num_stages=1),
)


def sparsegpt_block_reference(
    block: Tensor, factor: Tensor, keep: Tensor | None, pattern: NMPattern
) -> tuple[Tensor, Tensor]:
    """The pass in plain torch, group by group: the errors of a group are applied to all later channels at once."""
    block, errors = block.clone(), torch.empty_like(block)
    for first in range(0, len(block), pattern.group):
        last = first + pattern.group
        group, inside = block[first:last], factor[first:last, first:last]
        chosen = _largest((group / inside.diagonal()[:, None]).square(), pattern) if keep is None else keep[first:last]
        errors[first:last] = _eliminate(group, inside, chosen)
        block[last:].addmm_(factor[first:last, last:].t(), errors[first:last], alpha=-1)
    return block, errors


def _largest(scores: Tensor, pattern: NMPattern) -> Tensor:
    """Returns bool ``[M, O]``: in each column of one group's scores, the ``kept`` largest; of equal scores, the first.

    Unlike `top_n_mask` it compares all pairs at once, because for few numbers the number of calls decides the time.
    """
    no_less = scores.unsqueeze(1) >= scores  # [i, j]: row i is no less than row j
    above = torch.ones(len(scores), len(scores), dtype=torch.bool, device=scores.device).tril(-1).unsqueeze(2)
    return torch.where(above, no_less.transpose(0, 1), ~no_less).sum(1) < pattern.kept


def _eliminate(group: Tensor, factor: Tensor, keep: Tensor) -> Tensor:
    """Prunes the channels of a group in place, and returns their errors."""
    errors, pruned = torch.empty_like(group), keep.logical_not().to(group.dtype)
    for channel, (weight, error) in enumerate(zip(group, errors, strict=True)):
        torch.mul(weight, pruned[channel], out=error).div_(factor[channel, channel])
        if channel + 1 < len(group):
            group[channel + 1 :].addcmul_(factor[channel, channel + 1 :, None], error, value=-1)
    group.mul_(keep)
    return errors


@jit
def _block_kernel(
    block_ptr, factor_ptr, keep_ptr, pruned_ptr, errors_ptr, out_features, channels, KEPT: tl.constexpr,
    GROUP: tl.constexpr, CHOOSES: tl.constexpr, B: tl.constexpr, TILE_O: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)
    valid = o < out_features
    c = tl.arange(0, B)
    places = c[:, None] * out_features + o[None, :]
    there = (c < channels)[:, None] & valid[None, :]
    w = tl.load(block_ptr + places, mask=there, other=0.0)
    diagonal = tl.load(factor_ptr + c * (channels + 1), mask=c < channels, other=1.0)
    kept_bits = tl.zeros([TILE_O], tl.int32)
    for j in range(channels):
        place = j % GROUP
        if CHOOSES:
            if place == 0:
                kept_bits = tl.zeros([TILE_O], tl.int32)
                scores = w / diagonal[:, None]
                scores = scores * scores
                for a in tl.static_range(GROUP):
                    one = tl.sum(tl.where((c == j + a)[:, None], scores, 0.0), 0)[None, :]
                    before = (scores > one) | ((scores == one) & (c < j + a)[:, None])
                    before = before & ((c >= j) & (c < j + GROUP))[:, None]
                    kept_bits |= tl.where(tl.sum(before.to(tl.int32), 0) < KEPT, 1 << a, 0)
            keep = (kept_bits >> place) & 1 == 1
        else:
            keep = tl.load(keep_ptr + j * out_features + o, mask=valid, other=0) != 0
        now = tl.sum(tl.where((c == j)[:, None], w, 0.0), 0)
        left = tl.where(keep, now, now * 0.0)
        error = (now - left) / tl.load(factor_ptr + j * (channels + 1))
        later = tl.load(factor_ptr + j * channels + c, mask=(c > j) & (c < channels), other=0.0)[:, None]
        w = tl.where((c == j)[:, None], left[None, :], w - later * error[None, :])
        tl.store(errors_ptr + j * out_features + o, error, mask=valid)
    tl.store(pruned_ptr + places, w, mask=there)


def supports(block: Tensor, pattern: NMPattern) -> bool:
    """Whether the kernel supports a block: float32, up to 128 channels in groups of up to 8."""
    return block.dtype == torch.float32 and len(block) <= MOST_CHANNELS and pattern.group <= MOST_GROUP


def sparsegpt_block_triton(
    block: Tensor, factor: Tensor, keep: Tensor | None, pattern: NMPattern
) -> tuple[Tensor, Tensor]:
    block, factor = block.contiguous(), factor.contiguous()
    pruned, errors = torch.empty_like(block), torch.empty_like(block)
    channels, out_features = block.shape
    options = config_for("sparsegpt_block", CONFIGS, (out_features, channels), block.dtype).arguments()
    _block_kernel[(triton.cdiv(out_features, options["TILE_O"]),)](
        block, factor, (block if keep is None else keep.contiguous().view(torch.uint8)), pruned, errors, out_features,
        channels, KEPT=pattern.kept, GROUP=pattern.group, CHOOSES=keep is None, B=triton.next_power_of_2(channels),
        **options,
    )  # fmt: skip
    return pruned, errors


sparsegpt_block = operator(
    lambda block, *_: (torch.empty_like(block), torch.empty_like(block)),
    launcher=sparsegpt_block_triton,
    supports=lambda block, factor, keep, pattern: supports(block, pattern),
)(sparsegpt_block_reference)

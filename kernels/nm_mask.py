"""N:M masked weight under a permutation inside blocks, and the gradient of the permutation (eq. 8-10 of the paper).

With weight ``W [O, C]`` in base order, importance ``S = |W|^power * scale_C * (row_O + column_C)`` (the last factor
only where given), a permutation ``P`` that moves channels inside blocks and its ``index [C]``:

    M     = top ``kept`` of every ``group`` consecutive channels of S P,   ties to the lower channel
    W_eff = W * (M P^T)                                                    the mask brought back to base order

so that activations never move while learning. Backward, straight through the mask and the assignment, with
``A = dL/dW_eff * W`` and ``M_soft`` the softmax of ``S P`` over each group (divided by the group's mean first where
``group_scale``, see `_sharpness`), for each block of channels:

    dP = A^T M_soft + S^T dS_hat,      dS_hat = softmax_backward(A P)

Only ``[B, O] x [O, B]`` products: no ``C x C`` matrix exists, and ``W`` itself receives no gradient.
``block_sizes`` are the sizes of the blocks in channel order; ``soft`` and ``dP`` hold the blocks' matrices one after
another, flat ``[sum of sizes^2]``. Weights whose input dimension has the larger stride (``W.t()`` contiguous) gather
whole rows and are the fast case.
Bytes moved: forward W read, W_eff written; backward dW_eff and W read. The Triton kernels, on a GPU for weights of 16
and 32 bits, are in nm_mask_triton.py and nm_mask_backward_triton.py.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from permtriton.kernels.launch import on_gpu
from permtriton.kernels.nm_mask_backward_triton import nm_mask_backward_triton
from permtriton.kernels.nm_mask_triton import nm_mask_triton, supports
from permtriton.permutation import inverse


def nm_mask(
    weight: Tensor,
    scale: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    power: int,
    index: Tensor,
    soft: Tensor,
    block_sizes: Sequence[int],
    kept: int,
    group: int,
    group_scale: bool,
) -> Tensor:
    """Returns the masked weight ``[O, C]`` in base order; differentiable in ``soft`` (straight through ``index``).

    Args:
        weight: ``[O, C]``, any strides.
        scale: float32 ``[C]``.
        row: float32 ``[O]`` or None.
        column: float32 ``[C]``, given together with ``row``.
        power: exponent of ``|W|``, 1 or 2.
        index: int64 ``[C]``, a permutation inside the blocks: the hard permutation of this step.
        soft: float32 ``[sum of sizes^2]``: the relaxed permutation that ``index`` was assigned from; only its gradient
            is used.
        block_sizes: in channel order; multiples of ``group`` that sum to C.
        kept: weights kept in a group.
        group: consecutive channels in a group.
        group_scale: whether the backward softmax divides scores by the mean of their group.
    """
    return torch.ops.permtriton.nm_mask(
        weight, scale, row, column, power, index, soft, list(block_sizes), kept, group, group_scale
    )


def top_n_mask(scores_CO: Tensor, kept: int, group: int) -> Tensor:
    """Returns bool ``[C, O]``: the ``kept`` largest of every ``group`` consecutive rows, ties to the lower row.

    A score's rank in its group is counted by comparing pairs, in place of sorting tiny rows one by one.
    """
    scores = scores_CO.unflatten(0, (-1, group))
    rank = torch.arange(group - 1, -1, -1, dtype=torch.int8, device=scores.device)
    rank = rank.view(1, group, 1).repeat(scores.shape[0], 1, scores.shape[2])
    for i in range(group):
        for j in range(i + 1, group):
            wins = (scores[:, i] >= scores[:, j]).view(torch.int8)
            rank[:, i] -= wins
            rank[:, j] += wins
    return (rank < kept).flatten(0, 1)


def importance_scores(
    weight_CO: Tensor, scale: Tensor, row: Tensor | None, column: Tensor | None, power: int
) -> Tensor:
    """Returns float32 ``[C, O]`` scores of a weight ``[C, O]``; the arguments are those of `nm_mask`."""
    scores = weight_CO.to(torch.promote_types(weight_CO.dtype, torch.float32), copy=True).abs_()
    if power == 2:
        scores.square_()
    if row is not None and column is not None:
        scores.mul_(row + column.unsqueeze(1))
    return scores.mul_(scale.unsqueeze(1))


def nm_mask_reference(
    weight: Tensor,
    scale: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    power: int,
    index: Tensor,
    block_sizes: Sequence[int],
    kept: int,
    group: int,
) -> Tensor:
    """The masked weight in plain torch, a tile of blocks at a time."""
    weight_CO = weight.t()
    masked = torch.empty_like(weight_CO, memory_format=torch.contiguous_format)
    for start, size, count in _tiles(block_sizes, weight_CO):
        tile = slice(start, start + size * count)
        inside = index[tile] - start
        scores = importance_scores(weight_CO[tile], scale[tile], row, _part(column, tile), power)
        mask = top_n_mask(scores.index_select(0, inside), kept, group)
        torch.mul(weight_CO[tile], mask.index_select(0, inverse(inside)), out=masked[tile])
        masked[tile].add_(0.0)  # a negative weight times 0 is -0.0
    return masked.t()


def nm_mask_backward_reference(
    grad: Tensor,
    weight: Tensor,
    scale: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    power: int,
    index: Tensor,
    block_sizes: Sequence[int],
    group: int,
    group_scale: bool,
) -> Tensor:
    """Returns dP, flat ``[sum of sizes^2]`` in the dtype of ``scale``, a tile of blocks at a time."""
    grad_CO, weight_CO = grad.t(), weight.t()
    products = []
    for start, size, count in _tiles(block_sizes, weight_CO):
        tile = slice(start, start + size * count)
        inside = index[tile] - start
        agreement = grad_CO[tile].to(scale.dtype) * weight_CO[tile]  # A
        scores = importance_scores(weight_CO[tile], scale[tile], row, _part(column, tile), power)
        grouped = scores.index_select(0, inside).unflatten(0, (-1, group))
        if group_scale:
            sharpness = _sharpness(grouped.mean(1, keepdim=True), count)
            grouped.mul_(sharpness)
        soft = grouped.softmax(1)
        grad_scores = agreement.index_select(0, inside).unflatten(0, (-1, group)).mul_(soft)
        grad_scores.addcmul_(soft, grad_scores.sum(1, keepdim=True), value=-1)
        if group_scale:
            grad_scores.mul_(sharpness)
        blocks = (count, size, -1)
        product = torch.bmm(agreement.view(blocks), soft.view(blocks).mT)
        products.append(product.baddbmm_(scores.view(blocks), grad_scores.view(blocks).mT).reshape(-1))
    return torch.cat(products)


FLOOR = 0.1  # of a block's mean score: a group below it is not sharpened further, or dead channels would rule


def _sharpness(group_means: Tensor, blocks: int) -> Tensor:
    """Returns what scores ``[groups, group, O]`` are multiplied by before the softmax: one over their group's mean.

    The mean counts as a constant in the gradient. Where a whole block's scores are zero, so is the sharpness.
    """
    by_block = group_means.unflatten(0, (blocks, -1))
    floor = by_block.mean(1, keepdim=True) * FLOOR
    return torch.where(floor > 0, torch.maximum(by_block, floor).reciprocal(), 0).flatten(0, 1)


TILE = 1 << 19  # weights in a tile on a CPU: its temporaries stay in the cache, five times faster than whole weights


def _tiles(block_sizes: Sequence[int], weight_CO: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields (first channel, block size, blocks) of runs of blocks of one size, of about `TILE` weights on a CPU."""
    start = 0
    for size, run in groupby(block_sizes):
        left = len(list(run))
        most = max(TILE // (size * max(weight_CO.shape[1], 1)), 1) if weight_CO.device.type == "cpu" else left
        while left:
            count = min(left, most)
            yield start, size, count
            start += size * count
            left -= count


def _part(column: Tensor | None, tile: slice) -> Tensor | None:
    return None if column is None else column[tile]


@torch.library.custom_op("permtriton::nm_mask", mutates_args=())
def _nm_mask(
    weight: Tensor,
    scale: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    power: int,
    index: Tensor,
    soft: Tensor,
    block_sizes: list[int],
    kept: int,
    group: int,
    group_scale: bool,
) -> Tensor:
    return nm_mask_reference(weight, scale, row, column, power, index, block_sizes, kept, group)


@torch.library.custom_op("permtriton::nm_mask_backward", mutates_args=())
def _nm_mask_backward(
    grad: Tensor,
    weight: Tensor,
    scale: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    power: int,
    index: Tensor,
    block_sizes: list[int],
    group: int,
    group_scale: bool,
) -> Tensor:
    return nm_mask_backward_reference(grad, weight, scale, row, column, power, index, block_sizes, group, group_scale)


@on_gpu(_nm_mask)
def _(weight, scale, row, column, power, index, soft, block_sizes, kept, group, group_scale):  # type: ignore[no-untyped-def]
    masked = nm_mask_triton if supports(weight, scale) else nm_mask_reference
    return masked(weight, scale, row, column, power, index, block_sizes, kept, group)


@on_gpu(_nm_mask_backward)
def _(grad, weight, scale, row, column, power, index, block_sizes, group, group_scale):  # type: ignore[no-untyped-def]
    arguments = (grad, weight, scale, row, column, power, index, block_sizes, group, group_scale)
    if supports(weight, scale):
        return nm_mask_backward_triton(*arguments, FLOOR)
    return nm_mask_backward_reference(*arguments)


@_nm_mask.register_fake
def _(weight, scale, row, column, power, index, soft, block_sizes, kept, group, group_scale):  # type: ignore[no-untyped-def]
    return weight.new_empty(weight.shape[::-1]).t()


@_nm_mask_backward.register_fake
def _(grad, weight, scale, row, column, power, index, block_sizes, group, group_scale):  # type: ignore[no-untyped-def]
    return scale.new_empty(sum(size * size for size in block_sizes))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    weight, scale, row, column, ctx.power, index, _, ctx.block_sizes, _, ctx.group, ctx.group_scale = inputs
    ctx.save_for_backward(weight, scale, row, column, index)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    weight, scale, row, column, index = ctx.saved_tensors
    grad_soft = torch.ops.permtriton.nm_mask_backward(
        grad, weight, scale, row, column, ctx.power, index, ctx.block_sizes, ctx.group, ctx.group_scale
    )
    return (None,) * 6 + (grad_soft,) + (None,) * 4


_nm_mask.register_autograd(_backward, setup_context=_setup_context)

"""N:M masked weight under a permutation inside blocks, and the gradient of the permutation (eq. 8-10 of the paper).

With weight ``W [O, C]`` in base order, importance ``S = |W|^power * scale_C * (row_O + column_C)`` (the last factor
only if given), a permutation ``P`` that moves channels inside blocks, and its ``index [C]``:

    M     = top ``kept`` of every ``group`` consecutive channels of S P,   ties to the lower channel
    W_eff = W * (M P^T)                                                    the mask brought back to base order

so that activations never move while learning. The backward pass is straight-through in the mask and the assignment.
With ``A = dL/dW_eff * W`` and ``M_soft`` the softmax of ``S P`` over each group (with ``group_scale``, scores are first
divided by the group's mean, see `_sharpness`), for each block of channels:

    dP = A^T M_soft + S^T dS_hat,      dS_hat = softmax_backward(A P)

These are ``[B, O] x [O, B]`` products: no ``C x C`` matrix exists, and ``W`` itself receives no gradient. ``blocks``
are the sizes of the blocks in channel order; ``soft`` and ``dP`` hold the blocks' matrices one after another,
flat ``[sum of sizes^2]``. The fast case is a weight whose input dimension has the larger stride (``W.t()`` contiguous):
whole rows are gathered.
Bytes moved: forward W read, W_eff written; backward dW_eff and W read. The Triton kernels, for weights of 16 and 32
bits on a GPU, are in nm_mask_triton.py and nm_mask_backward_triton.py.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask_backward_triton import nm_mask_backward_triton
from permtriton.kernels.nm_mask_triton import nm_mask_triton, supports
from permtriton.kernels.operator import operator
from permtriton.util.permutation import inverse
from permtriton.util.sparsity import NMPattern


def top_n_mask(scores_CO: Tensor, pattern: NMPattern) -> Tensor:
    """Returns bool ``[C, O]``: the ``kept`` largest of every ``group`` consecutive rows, ties to the lower row."""
    return (group_ranks(scores_CO, pattern.group) < pattern.kept).flatten(0, 1)


def group_ranks(scores_CO: Tensor, group: int) -> Tensor:
    """Returns int8 ``[C / group, group, O]``: how many rows of its group come before each one, ties to the lower row.

    Ranks are counted by comparing pairs, which is faster than sorting many tiny rows.
    """
    scores = scores_CO.unflatten(0, (-1, group))
    rank = torch.arange(group - 1, -1, -1, dtype=torch.int8, device=scores.device)
    rank = rank.view(1, group, 1).repeat(scores.shape[0], 1, scores.shape[2])
    for i in range(group):
        for j in range(i + 1, group):
            wins = (scores[:, i] >= scores[:, j]).view(torch.int8)
            rank[:, i] -= wins
            rank[:, j] += wins
    return rank


def nm_mask_reference(
    weight: Tensor, importance: ImportanceFactors, index: Tensor, blocks: Sequence[int], pattern: NMPattern
) -> Tensor:
    """The masked weight in plain torch, one tile of blocks at a time."""
    weight_CO = weight.t()
    masked = torch.empty_like(weight_CO, memory_format=torch.contiguous_format)
    for start, size, count in _tiles(blocks, weight_CO):
        tile = slice(start, start + size * count)
        inside = index[tile] - start
        scores = importance.of_channels(tile).scores(weight_CO[tile])
        mask = top_n_mask(scores.index_select(0, inside), pattern)
        torch.mul(weight_CO[tile], mask.index_select(0, inverse(inside)), out=masked[tile])
        masked[tile].add_(0.0)  # a negative weight times 0 is -0.0
    return masked.t()


def nm_mask_backward_reference(
    grad: Tensor,
    weight: Tensor,
    importance: ImportanceFactors,
    index: Tensor,
    blocks: Sequence[int],
    group: int,
    group_scale: bool,
) -> Tensor:
    """Returns dP, flat ``[sum of sizes^2]``, without autograd: of a sum of gradients it is the sum of their dP.

    The gradient of a softmax over whole groups: how many weights a group keeps does not enter. Works on one tile of
    blocks at a time.

    Args:
        grad: dL/dW_eff, ``[O, C]``.
        weight: ``[O, C]``; this and all others as `nm_mask` takes them.
        importance: Factors of the weight's scores, whose dtype is that of the result.
        index: int64 ``[C]``.
        blocks: Sizes of the blocks.
        group: Number of channels of a group.
        group_scale: Whether scores are divided by the mean of their group.
    """
    grad_CO, weight_CO = grad.t(), weight.t()
    products = []
    for start, size, count in _tiles(blocks, weight_CO):
        tile = slice(start, start + size * count)
        inside = index[tile] - start
        agreement = grad_CO[tile].to(importance.scale.dtype) * weight_CO[tile]  # A
        scores = importance.of_channels(tile).scores(weight_CO[tile])
        grouped = scores.index_select(0, inside).unflatten(0, (-1, group))
        if group_scale:
            sharpness = _sharpness(grouped.mean(1, keepdim=True), count)
            grouped.mul_(sharpness)
        soft = grouped.softmax(1)
        grad_scores = agreement.index_select(0, inside).unflatten(0, (-1, group)).mul_(soft)
        grad_scores.addcmul_(soft, grad_scores.sum(1, keepdim=True), value=-1)
        if group_scale:
            grad_scores.mul_(sharpness)
        shape = (count, size, -1)
        product = torch.bmm(agreement.view(shape), soft.view(shape).mT)
        products.append(product.baddbmm_(scores.view(shape), grad_scores.view(shape).mT).reshape(-1))
    return torch.cat(products)


FLOOR = 0.1  # of a block's mean score: groups below it are not sharpened further, or dead channels would dominate


def _sharpness(group_means: Tensor, blocks: int) -> Tensor:
    """Returns the factor of scores ``[groups, group, O]`` before the softmax: one over their group's mean.

    The mean counts as a constant in the gradient. If all scores of a block are zero, so is the factor.
    """
    by_block = group_means.unflatten(0, (blocks, -1))
    floor = by_block.mean(1, keepdim=True) * FLOOR
    return torch.where(floor > 0, torch.maximum(by_block, floor).reciprocal(), 0).flatten(0, 1)


TILE = 1 << 19  # weights per tile on a CPU: its temporaries stay in the cache, five times faster than whole weights


def _tiles(blocks: Sequence[int], weight_CO: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields (first channel, block size, blocks) of runs of blocks of one size, of about `TILE` weights on a CPU."""
    start = 0
    for size, run in groupby(blocks):
        left = len(list(run))
        most = max(TILE // (size * max(weight_CO.shape[1], 1)), 1) if weight_CO.device.type == "cpu" else left
        while left:
            count = min(left, most)
            yield start, size, count
            start += size * count
            left -= count


nm_mask_backward = operator(
    "nm_mask_backward",
    lambda grad, weight, importance, index, blocks, *_: importance.scale.new_empty(sum(size**2 for size in blocks)),
    launcher=partial(nm_mask_backward_triton, floor=FLOOR),
    supports=lambda grad, weight, importance, *_: supports(weight, importance.scale),
)(nm_mask_backward_reference)


def _gradient(
    grad: Tensor,
    weight: Tensor,
    importance: ImportanceFactors,
    index: Tensor,
    blocks: Sequence[int],
    pattern: NMPattern,
    group_scale: bool,
) -> dict[str, Tensor]:
    return {"soft": nm_mask_backward(grad, weight, importance, index, blocks, pattern.group, group_scale)}


@operator(
    "nm_mask",
    lambda weight, *_: weight.new_empty(weight.shape[::-1]).t(),
    launcher=lambda weight, importance, index, soft, blocks, pattern, group_scale: nm_mask_triton(
        weight, importance, index, blocks, pattern
    ),
    supports=lambda weight, importance, *_: supports(weight, importance.scale),
    gradient=_gradient,
    keeps=("weight", "importance", "index", "blocks", "pattern", "group_scale"),
)
def nm_mask(
    weight: Tensor,
    importance: ImportanceFactors,
    index: Tensor,
    soft: Tensor,
    blocks: Sequence[int],
    pattern: NMPattern,
    group_scale: bool,
) -> Tensor:
    """Returns the masked weight ``[O, C]`` in base order; differentiable in ``soft`` (straight through ``index``).

    Args:
        weight: ``[O, C]``, any strides.
        importance: Factors of the weight's scores.
        index: int64 ``[C]``, a permutation inside the blocks: the hard permutation of this step.
        soft: float32 ``[sum of sizes^2]``, the relaxed permutation that ``index`` was assigned from; only its gradient
            is used.
        blocks: Sizes of the blocks in channel order; multiples of the group that sum to C.
        pattern: What each group keeps.
        group_scale: Whether the backward softmax divides scores by the mean of their group.
    """
    return nm_mask_reference(weight, importance, index, blocks, pattern)

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

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.launch import on_gpu
from permtriton.kernels.nm_mask_backward_triton import loops as backward_loops
from permtriton.kernels.nm_mask_backward_triton import nm_mask_backward_triton
from permtriton.kernels.nm_mask_triton import nm_mask_triton, supports
from permtriton.kernels.tools.cases import (
    BLOCK,
    META,
    PATTERN,
    Case,
    Floor,
    Inputs,
    generator_of,
    normal,
    random_order,
)
from permtriton.kernels.tools.timing import relative_error
from permtriton.permutation import inverse
from permtriton.sparsity import NMPattern


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
    return torch.ops.permtriton.nm_mask(
        weight, importance.scale, importance.row, importance.column, importance.power, index, soft, list(blocks),
        pattern.kept, pattern.group, group_scale,
    )  # fmt: skip


def nm_mask_backward(
    grad: Tensor,
    weight: Tensor,
    importance: ImportanceFactors,
    index: Tensor,
    blocks: Sequence[int],
    group: int,
    group_scale: bool,
) -> Tensor:
    """Returns dP, flat ``[sum of sizes^2]``, without autograd: of a sum of gradients it is the sum of their dP.

    Args:
        grad: dL/dW_eff, ``[O, C]``.
        weight: ``[O, C]``; this and all others as `nm_mask` takes them.
        importance: Factors of the weight's scores.
        index: int64 ``[C]``.
        blocks: Sizes of the blocks.
        group: Number of channels of a group.
        group_scale: Whether scores are divided by the mean of their group.
    """
    return torch.ops.permtriton.nm_mask_backward(
        grad, weight, importance.scale, importance.row, importance.column, importance.power, index, list(blocks), group,
        group_scale,
    )  # fmt: skip


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
    """Returns dP, flat ``[sum of sizes^2]`` in the dtype of ``importance.scale``, one tile of blocks at a time.

    The gradient of a softmax over whole groups: how many weights a group keeps does not enter.
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
    importance = ImportanceFactors(power, scale, row, column)
    return nm_mask_reference(weight, importance, index, block_sizes, NMPattern(kept, group))


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
    importance = ImportanceFactors(power, scale, row, column)
    return nm_mask_backward_reference(grad, weight, importance, index, block_sizes, group, group_scale)


@on_gpu(_nm_mask)
def _(weight, scale, row, column, power, index, soft, block_sizes, kept, group, group_scale):  # type: ignore[no-untyped-def]
    masked = nm_mask_triton if supports(weight, scale) else nm_mask_reference
    return masked(weight, ImportanceFactors(power, scale, row, column), index, block_sizes, NMPattern(kept, group))


@on_gpu(_nm_mask_backward)
def _(grad, weight, scale, row, column, power, index, block_sizes, group, group_scale):  # type: ignore[no-untyped-def]
    importance = ImportanceFactors(power, scale, row, column)
    arguments = (grad, weight, importance, index, block_sizes, group, group_scale)
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


def cases(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Case]:
    """Returns what is checked, tuned and measured for linears of these shapes (out, in)."""
    makers = (nm_mask_case, nm_mask_backward_case)
    return [make(o, c, dtype, device) for o, c in shapes for make in makers]


def nm_mask_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The masked weight of a linear, stored input-major as in learning, 2:4, Wanda."""

    def run(weight: Tensor, scale: Tensor, index: Tensor, sizes: list[int], _grad: Tensor) -> Tensor:
        return nm_mask(weight, ImportanceFactors(1, scale), index, scale.new_empty(0), sizes, PATTERN, True)

    def reference(weight: Tensor, scale: Tensor, index: Tensor, sizes: list[int], _grad: Tensor) -> Tensor:
        return nm_mask_reference(weight, ImportanceFactors(1, scale), index, sizes, PATTERN)

    moved = 2 * out_features * in_features * dtype.itemsize
    make = _mask_inputs(out_features, in_features, dtype, device)
    # A score that another rounding ties with its neighbour may choose otherwise; a handful in 45 million do.
    return Case("nm_mask", f"{out_features}x{in_features}", dtype, make, run, reference, relative_error, 1e-3, moved)


def nm_mask_backward_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The gradient of the soft permutation."""

    def run(weight: Tensor, scale: Tensor, index: Tensor, sizes: list[int], grad: Tensor) -> Tensor:
        return torch.ops.permtriton.nm_mask_backward(grad, weight, scale, None, None, 1, index, sizes, 4, True)

    def reference(weight: Tensor, scale: Tensor, index: Tensor, sizes: list[int], grad: Tensor) -> Tensor:
        factors = ImportanceFactors(1, scale.double())
        return nm_mask_backward_reference(grad.double(), weight.double(), factors, index, sizes, PATTERN.group, True)

    moved = 2 * out_features * in_features * dtype.itemsize + in_features * BLOCK * 4
    flops = 2 * 2 * out_features * in_features * BLOCK
    make = _mask_inputs(out_features, in_features, dtype, device)
    return Case(
        "nm_mask backward", f"{out_features}x{in_features}", dtype, make, run, reference, relative_error, 2e-2, moved,
        flops,
    )  # fmt: skip


def _mask_inputs(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> Callable[[int], Inputs]:
    sizes = [BLOCK] * (in_features // BLOCK) + ([in_features % BLOCK] if in_features % BLOCK else [])

    def make(seed: int) -> Inputs:
        generator = generator_of(seed, device)
        weight = normal((in_features, out_features), dtype, generator).t()
        scale = torch.rand(in_features, generator=generator, device=device) + 0.5
        grad = normal((in_features, out_features), dtype, generator).t()
        return weight, scale, random_order(in_features, True, generator), sizes, grad

    return make


def floors() -> Iterator[Floor]:
    """Yields the named shape whose issue floor is counted, forward and backward."""
    rows, channels, dtype = 11008, 4096, torch.bfloat16
    sizes = [BLOCK] * (channels // BLOCK)

    def inputs() -> tuple[Tensor, ImportanceFactors, Tensor]:
        weight, scale = torch.empty(channels, rows, dtype=dtype).t(), torch.empty(channels)
        return weight, ImportanceFactors(1, scale), torch.empty(channels, dtype=torch.int64)

    def forward() -> Tensor:
        return nm_mask_triton(*inputs(), sizes, PATTERN)

    def backward() -> Tensor:
        weight, factors, index = inputs()
        return nm_mask_backward_triton(weight, weight, factors, index, sizes, PATTERN.group, True, FLOOR)

    weights = rows * channels
    yield Floor(nm_mask_case(rows, channels, dtype, META), forward, weights, "weight", lambda launch: ())
    yield Floor(nm_mask_backward_case(rows, channels, dtype, META), backward, weights, "weight", backward_loops)

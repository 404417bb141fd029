"""The list of kernels, in the order of their tuning, and what each is checked and tuned on.

A module ``<op>`` beside this file has the function

    cases(shapes, tokens, dtype, device)   the `Case`s for linears of some shapes (out, in) and numbers of tokens
"""

from permtriton.kernels.tools.cases import (
    assignment,
    nm_mask,
    norm_permute,
    packing,
    permute,
    placement,
    quantize,
    sinkhorn,
    sparse_linear,
    sparse_linear_fp8,
    sparsegpt_block,
    swap_gains,
)

KERNELS = (
    permute, norm_permute, sinkhorn, assignment, nm_mask, placement, swap_gains, sparsegpt_block, packing,
    sparse_linear, quantize, sparse_linear_fp8,
)  # fmt: skip

"""The list of kernels, in the order of their tuning, and what each is checked, tuned and compiled on.

A module ``<op>`` beside this file has two functions:

    cases(shapes, tokens, dtype, device)   the `Case`s for linears of some shapes (out, in) and numbers of tokens
    builds()                               the launches that are compiled ahead of time, in every configuration
"""

from permtriton.kernels.tools.cases import (
    assignment,
    nm_mask,
    norm_permute,
    packing,
    permute,
    sinkhorn,
    sparse_linear,
    sparsegpt_block,
    swap_gains,
)

KERNELS = (permute, norm_permute, sinkhorn, assignment, nm_mask, swap_gains, sparsegpt_block, packing, sparse_linear)

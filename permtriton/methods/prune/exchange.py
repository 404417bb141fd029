"""Which pruned weight of a group takes the place of a kept one, once the kept ones are fitted?

With ``E(V) = (V - W*) H (V - W*)^T`` of a row and ``g = (V - W*) H``, the kept weight i becomes 0 and the pruned weight
j becomes ``t``. With the best ``t = (v_i H_ij - g_j) / H_jj``, all others as they are, the error falls by

    (v_i H_ij - g_j)^2 / H_jj - v_i^2 H_ii + 2 v_i g_i

SparseGPT decides group by group from the first channel to the last, before it knows what the kept weights can make up
for. Here every group of a row gives up its worst choice at once, as far as the error falls.
"""

import torch
from torch import Tensor

from permtriton.methods.prune.obs import Curvature
from permtriton.util.sparsity import NMPattern

# Pairs of weights that are looked at together: on a CPU they fit its caches, on a GPU they bound the memory.
AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}


def exchanged(weight: Tensor, gradient: Tensor, curvature: Curvature, pattern: NMPattern, share: Tensor) -> Tensor:
    """Returns a weight in which the best pair of each group has changed places, where that lowers the row's error.

    Args:
        weight: ``V``, float32 ``[out_features, in_features]``, zero where pruned.
        gradient: ``g``, of the same shape.
        curvature: of the inputs; channels that were never active take part in no exchange.
        share: of the groups of a row where the error would fall, those that fall most, float32 ``[out_features]``.
    """
    rows = max(AT_ONCE.get(weight.device.type, AT_ONCE["cpu"]) // (weight.shape[1] * pattern.group), 1)
    parts = zip(weight.split(rows), gradient.split(rows), share.split(rows), strict=True)
    return torch.cat([_exchanged(*part, curvature, pattern) for part in parts])


def _exchanged(weight: Tensor, gradient: Tensor, share: Tensor, curvature: Curvature, pattern: NMPattern) -> Tensor:
    # Places in a group come first: what is computed of all groups is then contiguous.
    size = pattern.group
    v_MOG, g_MOG = (each.unflatten(1, (-1, size)).permute(2, 0, 1).contiguous() for each in (weight, gradient))
    h_MMG = curvature.damped.unflatten(0, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2).contiguous()
    h_MG = h_MMG.diagonal().T.contiguous()
    kept_MOG = v_MOG != 0
    free_MOG = ~kept_MOG & ~curvature.dead.view(-1, size).T.unsqueeze(1)
    step_MMOG = v_MOG.unsqueeze(1) * h_MMG.unsqueeze(2) - g_MOG  # t H_jj, of (i, j)
    gain_MMOG = step_MMOG.square().div_(h_MG.unsqueeze(1))
    gain_MMOG -= (v_MOG * (v_MOG * h_MG.unsqueeze(1) - 2 * g_MOG)).unsqueeze(1)
    gain_MMOG.masked_fill_(~(kept_MOG.unsqueeze(1) & free_MOG), 0)
    gain_OG, pair_OG = gain_MMOG.flatten(0, 1).max(0)
    gained_OG = gain_OG > 0
    rank_OG = gain_OG.argsort(1, descending=True).argsort(1)
    taken_OG = gained_OG & (rank_OG < (gained_OG.sum(1) * share).unsqueeze(1))
    row, group = taken_OG.nonzero(as_tuple=True)
    out, into = pair_OG[row, group] // size, pair_OG[row, group] % size
    found_OGM = weight.unflatten(1, (-1, size)).clone()
    found_OGM[row, group, out] = 0
    found_OGM[row, group, into] = step_MMOG[out, into, row, group] / h_MG[into, group]
    return found_OGM.flatten(1)

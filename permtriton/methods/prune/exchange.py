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

AT_ONCE = 1 << 22  # pairs of weights that are looked at together, which bounds the memory


def exchanged(weight: Tensor, gradient: Tensor, curvature: Curvature, pattern: NMPattern, share: Tensor) -> Tensor:
    """Returns a weight in which the best pair of each group has changed places, where that lowers the row's error.

    Args:
        weight: ``V``, float32 ``[out_features, in_features]``, zero where pruned.
        gradient: ``g``, of the same shape.
        curvature: of the inputs; channels that were never active take part in no exchange.
        pattern: of the weight.
        share: of the groups of a row where the error would fall, those that fall most, float32 ``[out_features]``.
    """
    rows = max(AT_ONCE // (weight.shape[1] * pattern.group), 1)
    parts = zip(weight.split(rows), gradient.split(rows), share.split(rows), strict=True)
    return torch.cat([_exchanged(*part, curvature, pattern) for part in parts])


def _exchanged(weight: Tensor, gradient: Tensor, share: Tensor, curvature: Curvature, pattern: NMPattern) -> Tensor:
    size = pattern.group
    v_OGM, g_OGM = weight.unflatten(1, (-1, size)), gradient.unflatten(1, (-1, size))
    h_GMM = curvature.damped.unflatten(0, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    h_GM = h_GMM.diagonal(dim1=1, dim2=2)
    kept_OGM = v_OGM != 0
    free_OGM = ~kept_OGM & ~curvature.dead.view(-1, size)
    step_OGMM = v_OGM.unsqueeze(3) * h_GMM - g_OGM.unsqueeze(2)  # t H_jj, of (i, j)
    gain_OGMM = step_OGMM.square() / h_GM.unsqueeze(1)
    gain_OGMM -= (v_OGM * (v_OGM * h_GM - 2 * g_OGM)).unsqueeze(3)
    gain_OGMM.masked_fill_(~(kept_OGM.unsqueeze(3) & free_OGM.unsqueeze(2)), 0)
    gain_OG, pair_OG = gain_OGMM.flatten(2).max(2)
    gained_OG = gain_OG > 0
    rank_OG = gain_OG.argsort(1, descending=True).argsort(1)
    taken_OG = gained_OG & (rank_OG < (gained_OG.sum(1) * share).unsqueeze(1))
    row, group = taken_OG.nonzero(as_tuple=True)
    out, into = pair_OG[row, group] // size, pair_OG[row, group] % size
    found = v_OGM.clone()
    found[row, group, out] = 0
    found[row, group, into] = step_OGMM[row, group, out, into] / h_GM[group, into]
    return found.flatten(1)

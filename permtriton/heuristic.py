"""The heuristic channel order: RIA's two stages (Zhang et al., 2024), for any N:M.

1. Channel allocation: channels sorted by total importance are dealt out, so that every group gets one of each rank.
2. Refinement: take one channel out of each group and put them all back by a linear assignment that retains the most
   importance; for each slot in turn, until a sweep gains next to nothing.

What a group retains when channel c joins it is ``sum_o relu(s_oc - t_og)`` plus a constant, with ``t`` the N-th largest
score of the channels that stayed. As ``relu(a) = (|a| + a) / 2`` and the linear parts add up to the same for every
assignment, the best assignment maximises the L1 distances between scores and thresholds: one `torch.cdist`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from permtriton.importance import Importance
from permtriton.kernels.assignment import assignment
from permtriton.permutation import identity
from permtriton.plan import ChannelSpace, Site, linear_module, weight_in_out
from permtriton.progress import Advance
from permtriton.sparsity import NMPattern

MAX_SWEEPS = 10
ENOUGH = 1e-4  # a sweep that gains less than this part of the retained importance is the last
MAX_ROWS = 4096  # rows of scores that decide one space; more are sampled evenly from all its linears


def space_scores(
    model: nn.Module, sites: Sequence[Site], importances: Mapping[str, Importance], max_rows: int = MAX_ROWS
) -> Tensor:
    """Returns the scores of a space's channels in every linear that reads them, float32 ``[units, rows]``.

    Each linear's scores are divided by their mean, so that no layer outweighs another, and its rows are sampled evenly
    where all together are more than ``max_rows``. Channels that share a unit give a row each.
    """
    linears = [(site, name) for site in sites for name in site.linears]
    quota = max(max_rows // sum(site.copies for site, _ in linears), 1)
    rows = []
    for site, name in linears:
        scores = importances[name].scores(weight_in_out(linear_module(model, name)))
        if scores.shape[1] > quota:
            scores = scores[:, torch.linspace(0, scores.shape[1] - 1, quota, device=scores.device).long()]
        scores /= scores.mean().clamp_min(torch.finfo(scores.dtype).tiny)
        by_unit = torch.argsort(site.units, stable=True).view(site.space.units, site.copies)
        rows += [scores[by_unit[:, copy].to(scores.device)] for copy in range(site.copies)]
    return torch.cat(rows, 1)


def heuristic_index(space: ChannelSpace, scores: Tensor, pattern: NMPattern, advance: Advance) -> Tensor:
    """Returns the unit index ``[units]`` of the two stages, inside each segment of the space.

    A segment keeps its order where the stages do not retain more importance than it.

    Args:
        space: the channels.
        scores: ``[units, rows]``, as from `space_scores`.
        pattern: the sparsity pattern.
        advance: told of each segment.
    """
    index, start = identity(space.units), 0
    for size in space.segments:
        segment = slice(start, start + size)
        found = _two_stages(scores[segment], pattern)
        index[segment] = start + found.cpu()
        start += size
        advance()
    return index


def retained(scores: Tensor, index: Tensor, pattern: NMPattern) -> float:
    """Returns the importance that N:M keeps in the order of ``index``; scores ``[channels, rows]``."""
    grouped = scores[index].unflatten(0, (-1, pattern.group))
    return float(grouped.topk(pattern.kept, dim=1).values.sum(dtype=torch.float64))


def _two_stages(scores: Tensor, pattern: NMPattern) -> Tensor:
    channels = scores.shape[0]
    given = torch.arange(channels, device=scores.device)
    if channels <= pattern.group:
        return given
    by_importance = scores.sum(1).argsort(descending=True, stable=True)
    index = by_importance.view(pattern.group, -1).T.reshape(-1)
    before = retained(scores, index, pattern)
    for _ in range(MAX_SWEEPS):
        for slot in range(pattern.group):
            index = _reassign(scores, index, slot, pattern)
        after = retained(scores, index, pattern)
        if after - before <= ENOUGH * before:
            break
        before = after
    return index if after > retained(scores, given, pattern) else given


def _reassign(scores: Tensor, index: Tensor, slot: int, pattern: NMPattern) -> Tensor:
    groups = index.view(-1, pattern.group)
    others = [position for position in range(pattern.group) if position != slot]
    threshold = scores[groups[:, others]].topk(pattern.kept, dim=1).values[:, -1]
    gain = torch.cdist(scores[groups[:, slot]].unsqueeze(0), threshold.unsqueeze(0), p=1)
    chosen = assignment(gain)[0].long()
    groups = groups.clone()
    groups[:, slot] = groups[chosen, slot]
    return groups.reshape(-1)

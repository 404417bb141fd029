"""Step ``heuristic``: RIA's two-stage channel order (Zhang et al., 2024), for any N:M.

1. Channel allocation: channels in descending order of total importance are dealt out, one to each group per round.
2. Refinement: one channel is taken out of each group, and all of them are put back by the linear assignment that
   retains the most importance. A sweep does this for every slot of the group; sweeps end when one gains little.
   The time of an assignment grows with the cube of the number of groups. Where there are more than `MOST_GROUPS`,
   they are divided into parts at random, anew for every slot of every sweep; groups exchange channels only inside
   their part, and one batched assignment computes all parts.

The importance that group g retains when channel c joins it is ``sum_o relu(s_oc - t_og)`` plus a constant, where
``t_og`` is the N-th largest score in row o of the channels that stayed. Since ``relu(a) = (|a| + a) / 2`` and the
linear parts sum to the same for every assignment, the best assignment maximises the L1 distances between scores and
thresholds (`permtriton.kernels.distances`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from permtriton.kernels.assignment import assignment
from permtriton.kernels.distances import distances
from permtriton.kernels.importance import ImportanceFactors
from permtriton.methods.measure.fisher import row_weights
from permtriton.methods.measure.importance import descending, retained
from permtriton.methods.run import Run
from permtriton.methods.sizes import FLOAT32, Memory, ModelSizes
from permtriton.methods.step import BACKWARD, Stage, Step, from_options
from permtriton.passes.plan import ChannelSpace, Site, linear_module, weight_in_out
from permtriton.running.resume import StateFile
from permtriton.util import ranks
from permtriton.util.option import option
from permtriton.util.permutation import identity
from permtriton.util.progress import Advance
from permtriton.util.sparsity import NMPattern

# With several parts a sweep tries fewer exchanges: MAX_SWEEPS is multiplied by the number of parts, MIN_GAIN divided.
MAX_SWEEPS = 10
MIN_GAIN = 1e-4  # fraction of the retained importance; a sweep that gains no more is the last
MOST_GROUPS = 256  # most groups in one assignment; the assignment kernel takes no more
MAX_ROWS = 4096  # rows of scores that decide the order of one space; of more rows, an even sample is taken


@dataclass(frozen=True)
class Heuristic(Step):
    """Options of the step ``heuristic``, which deals channels to groups by importance and then reassigns them."""

    name: ClassVar[str] = "heuristic"
    prefix: ClassVar[str] = "heuristic"
    summary: ClassVar[str] = "channels dealt out and reassigned by importance (RIA's two stages): seconds to minutes"
    stage: ClassVar[Stage] = Stage.ORDER

    row_weights: Literal["fisher", "none"] = option(
        "none", "How much each output row counts: fisher (by its effect on the loss) or none (all alike)."
    )

    gradients = from_options(lambda step: step.row_weights == "fisher")

    def memory(self, sizes: ModelSizes) -> Memory:
        rows = min(MAX_ROWS, sizes.pruned // sizes.width)
        scores = 4 * max(sizes.spaces, default=0) * rows * FLOAT32
        return Memory(max(scores + sizes.mask, sizes.gradients * self.gradients))

    def passes(self, sizes: ModelSizes) -> float:
        return 1 + BACKWARD * self.gradients

    def state_bytes(self, sizes: ModelSizes) -> int:
        return sum(sizes.spaces) * 8 * self.gradients  # int64

    def run(self, run: Run) -> None:
        if all(space.frozen for space in run.plan.spaces):
            return
        # Indices from row weights are saved: row weights follow from gradients, which differ from run to run on a GPU.
        state = run.state(self.name) if self.gradients else StateFile(None, {})
        run.reorder(state.once(lambda: (self.indices(run), {}))[0])

    def indices(self, run: Run) -> dict[str, Tensor]:
        """Returns space name -> unit index, int64 ``[units]``."""
        rows = row_weights(run) if self.gradients else None
        importances, plan = run.importances(), run.plan
        spaces = [space for space in plan.spaces if not space.frozen]
        with run.progress.stage("heuristic", sum(len(space.segments) for space in ranks.dealt(spaces))) as advance:

            def order(space: ChannelSpace) -> Tensor:
                scores = space_scores(run.model, plan.sites_of(space), importances, rows).to(run.placement.device)
                return heuristic_index(space, scores, plan.pattern_of(space), advance)

            return {space.name: index for space, index in zip(spaces, ranks.deal(spaces, order), strict=True)}


def space_scores(
    model: nn.Module,
    sites: Sequence[Site],
    importances: Mapping[str, ImportanceFactors],
    row_weights: Mapping[str, Tensor] | None = None,
    max_rows: int = MAX_ROWS,
) -> Tensor:
    """Returns the scores of a space's units in all linears that read them, float32 ``[units, rows]``.

    With row weights ``f``, scores that are linear in ``|W|`` are multiplied by ``sqrt(f)`` and quadratic ones by ``f``.
    Without row weights, each linear's scores are divided by their mean, so that no layer outweighs another. RIA's
    scores are divided by their mean in both cases: they have no unit, so losses in different linears are not
    comparable. Of a linear with more rows than its part of ``max_rows``, an even sample is taken; the linear counts by
    the sample where scores are divided by their mean, else by all rows. Each channel of a shared unit adds its rows.
    """
    linears = [(site, name) for site in sites for name in site.linears]
    quota = max(max_rows // sum(site.copies for site, _ in linears), 1)
    rows = []
    for site, name in linears:
        scores = importances[name].scores(weight_in_out(linear_module(model, name)))
        if row_weights is not None:
            scores *= row_weights[name].pow(importances[name].power / 2)
        if (size := scores.shape[1]) > quota:
            scores = scores[:, torch.linspace(0, size - 1, quota, device=scores.device).long()]
            scores *= size / quota  # the sum over sampled rows estimates that over all; dividing by the mean cancels it
        if row_weights is None or importances[name].row is not None:
            scores /= scores.mean().clamp_min(torch.finfo(scores.dtype).tiny)
        rows += [scores[channels.to(scores.device)] for channels in site.channels_by_unit.unbind(1)]
    return torch.cat(rows, 1)


def heuristic_index(space: ChannelSpace, scores: Tensor, pattern: NMPattern, advance: Advance) -> Tensor:
    """Returns the unit index ``[units]`` that the two stages find inside each segment of a space.

    A segment keeps its order where the new one retains no more importance. Scores are ``[units, rows]``.
    """
    index = identity(space.units)
    for start, size in space.spans:
        segment = slice(start, start + size)
        index[segment] = start + _two_stages(scores[segment], pattern).cpu()
        advance()
    return index


def _two_stages(scores: Tensor, pattern: NMPattern) -> Tensor:
    channels = scores.shape[0]
    unchanged = torch.arange(channels, device=scores.device)
    if channels <= pattern.group:
        return unchanged
    by_importance = scores.sum(1).argsort(descending=True, stable=True)
    index = by_importance.view(pattern.group, -1).T.reshape(-1)
    last_total, parts = retained(scores, index, pattern), _parts(channels // pattern.group)
    generator = torch.Generator().manual_seed(0)
    for _ in range(MAX_SWEEPS * parts):
        for slot in range(pattern.group):
            index = reassigned(scores, index, slot, pattern, generator)
        total = retained(scores, index, pattern)
        if total - last_total <= MIN_GAIN / parts * last_total:
            break
        last_total = total
    return index if total > retained(scores, unchanged, pattern) else unchanged


def _parts(groups: int) -> int:
    return -(-groups // MOST_GROUPS)


def reassigned(scores: Tensor, index: Tensor, slot: int, pattern: NMPattern, generator: torch.Generator) -> Tensor:
    """Returns ``index`` with the channels at one slot of all groups reassigned; many groups are divided into parts.

    Parts are random and have the same number of groups; the groups left over are unchanged in this call.
    """
    groups = index.view(-1, pattern.group).clone()
    parts = _parts(len(groups))
    chosen: Tensor | slice = slice(None)
    if parts > 1:
        chosen = torch.randperm(len(groups), generator=generator)[: len(groups) // parts * parts].to(groups.device)
    members = groups[chosen]
    staying_scores = [scores[members[:, position]] for position in range(pattern.group) if position != slot]
    threshold = next(islice(descending(staying_scores), pattern.kept - 1, None))
    candidates = members[:, slot].view(parts, -1)
    gain = distances(scores[candidates], threshold.view(*candidates.shape, -1))
    groups[chosen, slot] = candidates.gather(1, assignment(gain).long()).flatten()
    return groups.flatten()

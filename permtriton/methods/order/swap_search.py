"""Search for a channel order by gains of swaps, measured on the model itself.

The weights do not change and stay in base order; each pruned linear sees its weight through an N:M mask that follows
the present order. A round takes the gradient of the loss over all calibration sequences and with it the gain, exact
to first order, of every swap of two channels (`permtriton.kernels.swap_gains`), less ``damping`` times the curvature
of the loss: the second-order rise from every weight that the swap flips. It chooses disjoint swaps with positive
gains, applies them to all spaces at once, and keeps them only if the loss falls; else it tries again with twice the
damping, which leaves fewer and safer swaps. The result is therefore never worse than the start. As in a trust region,
the damping of a round that succeeded at once is lowered for the next one.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.config import CommonConfig
from permtriton.data.samples import Samples
from permtriton.errors import ConfigError
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.swap_gains import swap_gains
from permtriton.methods.measure.fisher import fisher_information
from permtriton.methods.measure.objective import Objective
from permtriton.methods.options import Searching
from permtriton.methods.order.hard_masks import HardMasks, hard_masked
from permtriton.passes.plan import ChannelSpace, Plan
from permtriton.running import ranks
from permtriton.running.state import StateFile
from permtriton.util.permutation import identity, moved
from permtriton.util.progress import Progress

PARTNERS = 8  # best partners of each channel that the matching chooses from
GAINS_AT_ONCE = 1 << 24  # gains of a panel of channels with all their partners, in memory at once
RAISE, LOWER = 2.0, 0.6  # factors of the damping after a trial that failed, and after a round that succeeded at once
TRIALS = 5  # sets of swaps that a round tries at most
LEAST_DAMPING = 1e-2
LEAST_GAIN = 1e-3  # of the loss; two rounds in a row that gain less are the last


@dataclass(frozen=True)
class Round:
    """The outcome of one round.

    Attributes:
        round: Number of the round, from 1; 0 is the base order.
        loss: Mean loss over the calibration sequences, in the order that the round ends with.
        swaps: Number of swaps that were kept, over all spaces.
        predicted: Fall of the loss that the gains of the kept swaps predict.
        damping: Factor of the curvature in the gains of the last trial.
        trials: Number of sets of swaps that were tried; all but the last failed.
        moved: Number of units, over all spaces, that are not where the base order has them.
        seconds: Time of the round.
    """

    round: int
    loss: float
    swaps: int
    predicted: float
    damping: float
    trials: int
    moved: int
    seconds: float


@dataclass
class SearchedOrder:
    """The result of the search.

    Attributes:
        indices: Space name -> unit index relative to the base order, int64 ``[units]`` on the CPU.
        history: All rounds so far; the first is the base order.
        finished: Whether the last round was the last one.
    """

    indices: dict[str, Tensor]
    history: list[Round] = field(default_factory=list)
    finished: bool = False

    @property
    def loss(self) -> float:
        """Mean loss over the calibration sequences in the order found."""
        return self.history[-1].loss


@dataclass(frozen=True)
class Swaps:
    """Swaps of two positions; no two of them touch the same group.

    Attributes:
        space: Number of the space of each swap, int64 ``[swaps]``.
        left: First position, int64 ``[swaps]``.
        right: Second position, int64 ``[swaps]``.
        gain: Predicted fall of the loss, float32 ``[swaps]``.
    """

    space: Tensor
    left: Tensor
    right: Tensor
    gain: Tensor

    @property
    def count(self) -> int:
        """Number of swaps."""
        return self.gain.numel()

    def applied(self, spaces: Sequence[ChannelSpace], indices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the unit indices after the swaps."""
        new = dict(indices)
        for number, space in enumerate(spaces):
            left, right = self.left[self.space == number], self.right[self.space == number]
            index = indices[space.name].clone()
            index[left], index[right] = indices[space.name][right], indices[space.name][left]
            new[space.name] = index
        return new


class SearchFile(StateFile):
    """The state between rounds."""

    def load(self) -> SearchedOrder | None:
        """Returns the result so far, or None where there is no file.

        Raises:
            OutputError: The state belongs to another run, or is damaged.
        """
        state = self.read()
        if state is None:
            return None
        tensors, texts = state
        history = [Round(**row) for row in json.loads(texts["history"])]
        return SearchedOrder(tensors, history, json.loads(texts["finished"]))

    def save(self, result: SearchedOrder) -> None:
        """Replaces the state by the result so far.

        Raises:
            OutputError: The file cannot be written.
        """
        history = json.dumps([asdict(each) for each in result.history])
        self.write(result.indices, {"history": history, "finished": json.dumps(result.finished)})


def search(  # noqa: PLR0913
    model: PreTrainedModel,
    plan: Plan,
    importances: Mapping[str, ImportanceFactors],
    samples: Samples,
    objective: Objective,
    options: Searching,
    config: CommonConfig,
    progress: Progress,
    state: SearchFile | None = None,
) -> SearchedOrder:
    """Searches a unit index for every space that may move.

    Args:
        model: Dense model, its channels in base order; unchanged on return.
        objective: The loss, with the dense model's outputs on ``samples``.
        state: Storage of the state between rounds, to continue from and to write to; None keeps no state.

    Raises:
        CalibrationError: The loss or its gradient is not finite.
        ConfigError: No permutation is left to search.
        OutputError: The state belongs to another run, is damaged, or cannot be written.
    """
    spaces = [space for space in plan.spaces if not space.frozen]
    if not spaces:
        raise ConfigError(
            "no permutation is left to search: none of this model's channels may move (see permtriton inspect); leave "
            "the step searched out"
        )
    fisher = fisher_information(model, plan, objective.kind, samples, config, progress)
    with hard_masked(model, plan, importances, fisher, config) as masks:
        searcher = Searcher(masks, spaces, samples, objective, options)
        result = state.load() if state else None
        if result is None:
            base = {space.name: identity(space.units) for space in spaces}
            result = SearchedOrder(base, [Round(0, searcher.loss(base), 0, 0.0, options.damping, 0, 0, 0.0)])
        else:
            progress.say(f"continuing after round {result.history[-1].round} of an interrupted run")
        share = ranks.own_rows(len(samples)).numel()
        with progress.stage("search", options.rounds * share) as advance:
            advance((len(result.history) - 1) * share)
            while not result.finished:
                last, first = result.history[-1], result.history[0]
                note = f"round {last.round + 1}, loss {last.loss:.4f}, base {first.loss:.4f}, {last.swaps} swaps"
                searcher.round(result, partial(advance, note=note))
                if state:
                    state.save(result)
    return result


class Searcher:
    """The rounds of one search."""

    def __init__(
        self,
        masks: HardMasks,
        spaces: Sequence[ChannelSpace],
        samples: Samples,
        objective: Objective,
        options: Searching,
    ) -> None:
        self._masks, self._spaces, self._samples = masks, spaces, samples
        self._objective, self._options = objective, options

    def loss(self, indices: Mapping[str, Tensor]) -> float:
        """Returns the mean loss over all sequences in an order.

        Raises:
            CalibrationError: The loss is not finite.
            VerificationError: The order is no permutation.
        """
        for space in self._spaces:
            space.check(indices[space.name])
        self._masks.set(indices)
        return self._masks.loss(self._objective, self._samples)

    def round(self, result: SearchedOrder, advance: Callable[[int], None] | None = None) -> None:
        """Runs one round and records it in ``result``.

        Args:
            advance: Called with the number of sequences after each backward pass.

        Raises:
            CalibrationError: The loss or its gradient is not finite.
        """
        started, before = time.perf_counter(), result.history[-1]
        least = min(LEAST_DAMPING, self._options.damping)
        damping = max(before.damping * (LOWER if before.trials == 1 else 1), least)
        self._masks.set(result.indices)
        self._masks.take_gradients(self._objective, self._samples, advance)
        swaps, loss, trials = None, before.loss, 0
        while trials < TRIALS and damping >= least:
            proposed = self.swaps(result.indices, damping)
            if not proposed.count:
                damping *= LOWER
                continue
            indices = proposed.applied(self._spaces, result.indices)
            new_loss, trials = self.loss(indices), trials + 1
            if new_loss < before.loss:
                result.indices, swaps, loss = indices, proposed, new_loss
                break
            damping *= RAISE
        self._masks.drop_gradients()
        result.history.append(
            Round(
                round=before.round + 1,
                loss=loss,
                swaps=swaps.count if swaps else 0,
                predicted=float(swaps.gain.sum()) if swaps else 0.0,
                damping=damping,
                trials=trials,
                moved=sum(moved(index) for index in result.indices.values()),
                seconds=time.perf_counter() - started,
            )
        )
        losses = [each.loss for each in result.history[-3:]]
        weak = len(losses) == 3 and all(a - b < LEAST_GAIN * a for a, b in pairwise(losses))
        result.finished = weak or before.round + 1 >= self._options.rounds

    def swaps(self, indices: Mapping[str, Tensor], damping: float) -> Swaps:
        """Returns disjoint swaps of all spaces with positive gains, chosen greedily.

        Args:
            indices: Space name -> unit index of the present order, in which the gradients were taken.
            damping: Factor of the curvature in the gains.
        """

        def of_space(place: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            space = self._spaces[place]
            parts = [self._partners(space, indices, damping, batch) for batch in _panels(space)]
            left, right, gain = (torch.cat(each) for each in zip(*parts, strict=True))
            chosen = disjoint(left, right, gain, space.group)
            return torch.full_like(chosen, place), left[chosen], right[chosen], gain[chosen]

        places = range(len(self._spaces))
        # Where each rank holds some rows of the weights, all ranks add up the gains of every space.
        per_space = [of_space(place) for place in places] if self._masks.spread else ranks.deal(places, of_space)
        return Swaps(*(torch.cat(parts) for parts in zip(*ranks.on_first(lambda: per_space), strict=True)))

    def _partners(
        self, space: ChannelSpace, indices: Mapping[str, Tensor], damping: float, panels: "Sequence[_Panel]"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (left position, right position, gain) of the best partners of the left positions of some panels."""
        group = space.group
        totals: list[Tensor] = []
        for terms in self._masks.terms(space, indices, damping, self._samples.positions):
            gains = [swap_gains(terms.of_positions(each.left), terms.of_positions(each.right)) for each in panels]
            totals = [total.add_(more) for total, more in zip(totals, gains, strict=True)] if totals else gains
        if self._masks.spread:
            ranks.add_up(totals)
        none = torch.empty(0, dtype=torch.int64)
        partners = [(none, none, torch.empty(0))]
        for (left, right), total in zip(panels, totals, strict=False):  # no totals for experts that no token visits
            places = torch.arange(right.numel()), torch.arange(left.numel()).unsqueeze(1)
            twice = (places[0] <= places[1]) | (left.unsqueeze(1) // group == right // group)
            best = total.masked_fill_(twice.to(total.device), -math.inf).topk(min(PARTNERS, right.numel()), dim=1)
            useful = best.values > 0
            rows = useful.nonzero()[:, 0].cpu()
            partners.append((left[rows], right[best.indices[useful].cpu()], best.values[useful].cpu()))
        left, right, gain = (torch.cat(each) for each in zip(*partners, strict=True))
        return left, right, gain


class _Panel(NamedTuple):
    """Positions whose swaps with later positions are looked at together.

    Attributes:
        left: int64 ``[positions]``, whole groups.
        right: int64 ``[positions]``: those of ``left``, and the later ones that they may change places with.
    """

    left: Tensor
    right: Tensor


def _panels(space: ChannelSpace) -> list[list[_Panel]]:
    """Returns the panels of a space in batches whose gains fit in memory together."""
    group, size = space.group, 0
    batches: list[list[_Panel]] = [[]]
    for first, segment in space.spans:
        positions = torch.arange(first, first + segment)
        height = max(GAINS_AT_ONCE // segment // group, 1) * group
        for start in range(0, segment, height):
            panel = _Panel(positions[start : start + height], positions[start:])
            more = panel.left.numel() * panel.right.numel()
            if batches[-1] and size + more > GAINS_AT_ONCE:
                batches.append([])
                size = 0
            batches[-1].append(panel)
            size += more
    return batches


def disjoint(left: Tensor, right: Tensor, gain: Tensor, group: int) -> Tensor:
    """Returns the numbers of the swaps that a greedy choice by falling gain takes, touching every group at most once.

    Swaps that are the best of both their groups are taken together, until none is left.

    Args:
        left: First position of each swap, int64 ``[swaps]``.
        right: Second position, int64 ``[swaps]``.
        gain: Gain, float32 ``[swaps]``.
    """
    order = gain.argsort(descending=True, stable=True)
    ends = torch.stack((left, right))[:, order] // group
    alive = torch.arange(order.numel())  # ranks of the swaps that may still be taken
    groups = int(ends.max()) + 1 if order.numel() else 0
    taken = []
    while alive.numel():
        best = torch.full((groups,), order.numel())
        for end in ends:
            best.scatter_reduce_(0, end[alive], alive, "amin")
        wins = (best[ends[0, alive]] == alive) & (best[ends[1, alive]] == alive)
        taken.append(alive[wins])
        used = torch.zeros(groups, dtype=torch.bool)
        used[ends[:, alive[wins]].flatten()] = True
        alive = alive[~(used[ends[0, alive]] | used[ends[1, alive]])]
    return order[torch.cat(taken).sort().values] if taken else order

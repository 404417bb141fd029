"""Step ``searched``: an order found by swaps of channels, whose gains follow from gradients of the whole model.

The weights do not change and stay in base order; each pruned linear sees its weight through an N:M mask that follows
the present order. A round computes the gradient of the loss over all calibration sequences, and from it the gain of
every swap of two channels (`permtriton.kernels.swap_gains`): exact to first order, less a damping times the curvature
of the loss, which is the second-order rise from every weight that the swap flips. The round chooses disjoint swaps with
positive gains, applies them to all spaces at once, and keeps them only if the loss falls; else it tries again with
twice the damping, which leaves fewer and safer swaps. So the result is never worse than the start. As in a trust
region, the next round has a lower damping after one whose first trial succeeded.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from permtriton.config import CommonConfig
from permtriton.errors import ConfigError
from permtriton.kernels.swap_gains import swap_gains
from permtriton.methods.measure.fisher import curvatures
from permtriton.methods.measure.losses import ObjectiveKind, minimises
from permtriton.methods.measure.postconditions import check_no_worse
from permtriton.methods.order.hard_masks import HardMasks, hard_masked
from permtriton.methods.run import Run
from permtriton.methods.sizes import FLOAT32, Memory, ModelSizes
from permtriton.methods.step import Outcome, Stage, Step, from_options
from permtriton.passes.plan import ChannelSpace
from permtriton.util import ranks
from permtriton.util.option import option
from permtriton.util.permutation import identity, moved

PARTNERS = 8  # best partners of each position, from which disjoint swaps are chosen
GAINS_AT_ONCE = 1 << 24  # gains of swaps that are in memory at once
DAMPING = 4.0  # weight of the curvature in the gains of the first round; it adapts to how well the gains predict
RAISE, LOWER = 2.0, 0.6  # factors of the damping after a trial that failed, and after a round that succeeded at once
TRIALS = 5  # sets of swaps that a round tries at most
LEAST_DAMPING = 1e-2
LEAST_GAIN = 1e-3  # share of the loss; the search ends after two rounds in a row that lower the loss by less

# Left and right positions, in whole groups: the swaps of every left one with every right one are evaluated together.
Panel = tuple[Tensor, Tensor]
# Left and right positions of swaps, int64 ``[swaps]``, and how much the loss should fall by each of them, float32.
Swaps = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Searched(Step):
    """Options of the step ``searched``, which improves the order of earlier steps by swaps of channels."""

    name: ClassVar[str] = "searched"
    prefix: ClassVar[str] = "search"
    summary: ClassVar[str] = "swaps of channels chosen by their exact gains, round by round: minutes to hours"
    stage: ClassVar[Stage] = Stage.ORDER
    onloads: ClassVar[bool] = False
    gradients = True

    rounds: int = option(
        12,
        "Most rounds: a round measures all gains, swaps the best channels and keeps the swaps if the loss falls.",
        minimum=1,
    )
    loss: Literal["auto", ObjectiveKind] = option("auto", minimises())

    objective = from_options(lambda step: step.loss)

    def conflicts(self, config: CommonConfig, steps: Sequence[Step]) -> str:
        chooses = [step.name for step in steps if step.stage is Stage.PRUNE and not step.keeps_values]
        if chooses:
            return (
                f"step {self.name} before {chooses[0]} is refused: an order searched for masks alone is no better than "
                f"the heuristic one once {chooses[0]} changes the weights; leave {self.name} out, or prune with mask"
            )
        return ""

    def memory(self, sizes: ModelSizes) -> Memory:
        weights = sizes.pruned * (sizes.element + max(FLOAT32, sizes.element))  # dense weights, and gradients
        gains = (4 * sizes.largest_weight + 3 * GAINS_AT_ONCE) * FLOAT32
        return Memory(sizes.gradients + weights // sizes.shares + gains, sizes.targets)

    def passes(self, sizes: ModelSizes) -> float:
        return 6 * (self.rounds + 1)

    def state_bytes(self, sizes: ModelSizes) -> int:
        return 2 * sum(sizes.spaces) * 8

    def run(self, run: Run) -> Outcome:
        indices, outcome = self.search(run)
        check_no_worse(outcome.history[0]["loss"], outcome.kept_row["loss"], "the search")
        run.reorder(indices)
        run.promise(self, outcome.kept_row["loss"])
        return outcome

    def search(self, run: Run) -> tuple[dict[str, Tensor], Outcome]:
        """Returns space name -> unit index relative to the base order, int64 ``[units]``, and the outcome.

        The history has a row per round: the number of ``swaps`` that were kept, the fall of the loss that their gains
        predict (``predicted``), the ``damping`` after the last trial, the number of ``trials`` (only the last one can
        succeed; none has if ``swaps`` is 0), and the number of units that are ``moved`` from the base order.
        """
        spaces = [space for space in run.plan.spaces if not space.frozen]
        if not spaces:
            raise ConfigError(
                "no permutation is left to search: none of this model's channels may move (see permtriton inspect); "
                "leave the step searched out"
            )
        objective, state = run.objective(self), run.state(self.name)
        curvature_by_linear = curvatures(run, objective.kind)
        with run.placed_model() as model, hard_masked(run, model, objective, curvature_by_linear) as masks:
            searcher = Searcher(masks, spaces)
            if (saved_state := state.read()) is not None:
                indices, history = saved_state[0], saved_state[1]["history"]
                run.progress.say(f"continuing after round {history[-1]['round']} of an interrupted run")
            else:
                indices = {space.name: identity(space.units) for space in spaces}
                start = {"round": 0, "loss": searcher.loss(indices), "swaps": 0, "predicted": 0.0}
                history = [{**start, "damping": DAMPING, "trials": 0, "moved": 0, "seconds": 0.0}]
            num_sequences = ranks.own_rows(len(run.samples)).numel()
            with run.progress.stage("search", self.rounds * num_sequences) as advance:
                advance((len(history) - 1) * num_sequences)
                while not self._finished(history):
                    last, losses = history[-1], f"loss {history[-1]['loss']:.4f}, base {history[0]['loss']:.4f}"
                    note = f"round {last['round'] + 1}, {losses}, {last['swaps']} swaps"
                    indices, row = searcher.round(indices, last, partial(advance, note=note))
                    history.append(row)
                    state.write(indices, history=history)
        return indices, Outcome("round", history)

    def _finished(self, history: Sequence[Mapping[str, Any]]) -> bool:
        losses = [row["loss"] for row in history[-3:]]
        weak = len(losses) == 3 and all(a - b < LEAST_GAIN * a for a, b in pairwise(losses))
        return weak or len(history) > self.rounds


def swapped(indices: Mapping[str, Tensor], swaps: Mapping[str, Swaps]) -> dict[str, Tensor]:
    """Returns the unit indices after swaps that touch each position of a space at most once."""
    changed = dict(indices)
    for name, (left, right, _) in swaps.items():
        changed[name] = indices[name].clone()
        changed[name][left], changed[name][right] = indices[name][right], indices[name][left]
    return changed


class Searcher:
    def __init__(self, masks: HardMasks, spaces: Sequence[ChannelSpace]) -> None:
        self._masks, self._spaces = masks, spaces

    def loss(self, indices: Mapping[str, Tensor]) -> float:
        self._masks.set(indices)
        return self._masks.loss()

    def round(
        self, indices: dict[str, Tensor], last: Mapping[str, Any], advance: Callable[[int], None] = lambda _steps: None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the unit indices after a round, and its row in the history; ``last`` is the row before."""
        start_time = time.perf_counter()
        damping = max(last["damping"] * (LOWER if last["trials"] == 1 else 1), LEAST_DAMPING)
        self._masks.set(indices)
        self._masks.take_gradients(advance)
        gain, loss, trials = torch.empty(0), last["loss"], 0
        while trials < TRIALS and damping >= LEAST_DAMPING:
            proposed = self.swaps(indices, damping)
            proposed_gain = torch.cat([gain for *_, gain in proposed.values()])
            if not proposed_gain.numel():
                damping *= LOWER
                continue
            changed = swapped(indices, proposed)
            new_loss, trials = self.loss(changed), trials + 1
            if new_loss < last["loss"]:
                indices, gain, loss = changed, proposed_gain, new_loss
                break
            damping *= RAISE
        self._masks.drop_gradients()
        return indices, {
            "round": last["round"] + 1,
            "loss": loss,
            "swaps": gain.numel(),
            "predicted": float(gain.sum()),
            "damping": damping,
            "trials": trials,
            "moved": sum(moved(index) for index in indices.values()),
            "seconds": time.perf_counter() - start_time,
        }

    def swaps(self, indices: Mapping[str, Tensor], damping: float) -> dict[str, Swaps]:
        """Returns space name -> swaps with positive gains, chosen greedily, no two of which touch the same group."""

        def of_space(space: ChannelSpace) -> Swaps:
            partners = [best for batch in _panels(space) for best in self._partners(space, indices, damping, batch)]
            left, right, gain = (torch.cat(part) for part in zip(*partners, strict=True))
            chosen = disjoint(left, right, gain, space.group_units)
            return left[chosen], right[chosen], gain[chosen]

        # Where each rank holds some rows of the weights, all ranks add up the gains of every space.
        spaces, spread = self._spaces, self._masks.spread
        swaps = list(map(of_space, spaces)) if spread else ranks.deal(spaces, of_space)
        return dict(zip((space.name for space in spaces), ranks.on_first(lambda: swaps), strict=True))

    def _partners(
        self, space: ChannelSpace, indices: Mapping[str, Tensor], damping: float, panels: Sequence[Panel]
    ) -> Iterator[Swaps]:
        """Yields the swaps of each panel's left positions with their best partners."""
        group, totals = space.group_units, list[Tensor]()
        for terms in self._masks.terms(space, indices, damping):
            gains = [swap_gains(terms.of_positions(left), terms.of_positions(right)) for left, right in panels]
            totals = [total.add_(gain) for total, gain in zip(totals, gains, strict=True)] if totals else gains
        if self._masks.spread:
            ranks.add_up(totals)
        for (left, right), total in zip(panels, totals, strict=True):
            places = torch.arange(right.numel()), torch.arange(left.numel()).unsqueeze(1)
            twice = (places[0] <= places[1]) | (left.unsqueeze(1) // group == right // group)
            best = total.masked_fill_(twice.to(total.device), -math.inf).topk(min(PARTNERS, right.numel()), dim=1)
            useful = best.values > 0
            rows = useful.nonzero()[:, 0].cpu()
            yield left[rows], right[best.indices[useful].cpu()], best.values[useful].cpu()


def _panels(space: ChannelSpace) -> list[list[Panel]]:
    """Returns the panels of a space in batches whose gains fit in memory together."""
    group, size = space.group_units, 0
    batches: list[list[Panel]] = [[]]
    for first, segment in space.spans:
        positions = torch.arange(first, first + segment)
        height = max(GAINS_AT_ONCE // segment // group, 1) * group
        for start in range(0, segment, height):
            left, right = positions[start : start + height], positions[start:]
            pairs = left.numel() * right.numel()
            if batches[-1] and size + pairs > GAINS_AT_ONCE:
                batches.append([])
                size = 0
            batches[-1].append((left, right))
            size += pairs
    return batches


def disjoint(left: Tensor, right: Tensor, gain: Tensor, group: int) -> Tensor:
    """Returns the indices of the swaps that are chosen greedily by descending gain, with every group at most once.

    Each pass takes all swaps that are the best of both their groups at once, until no swap is left.
    """
    order = gain.argsort(descending=True, stable=True)
    ends = torch.stack((left, right))[:, order] // group
    alive = torch.arange(order.numel())  # places in ``order`` of the swaps that may still be taken
    groups = int(ends.max()) + 1 if order.numel() else 0
    chosen = []
    while alive.numel():
        best = torch.full((groups,), order.numel())
        for end in ends:
            best.scatter_reduce_(0, end[alive], alive, "amin")
        wins = (best[ends[0, alive]] == alive) & (best[ends[1, alive]] == alive)
        chosen.append(alive[wins])
        used_groups = torch.zeros(groups, dtype=torch.bool)
        used_groups[ends[:, alive[wins]].flatten()] = True
        alive = alive[~(used_groups[ends[0, alive]] | used_groups[ends[1, alive]])]
    return order[torch.cat(chosen).sort().values] if chosen else order

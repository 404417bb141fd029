"""Training after pruning: the schedule, the choice of the round to keep, and resuming after an interruption.

How a step changes the weights that pruning kept is in `permtriton.methods.train.kept_weights`.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from permtriton.errors import CalibrationError
from permtriton.methods.measure.postconditions import check_loss
from permtriton.methods.run import Run
from permtriton.methods.step import Outcome, Step
from permtriton.methods.train.kept_weights import KeptWeights
from permtriton.passes.plan import layer_modules
from permtriton.running.backward import checkpointed, loss_scale, with_gradients
from permtriton.running.mixed_precision import mixed_precision
from permtriton.running.resume import StateFile
from permtriton.util import ranks
from permtriton.util.micro_batch import MicroBatch
from permtriton.util.progress import Advance

WARM_UP = 0.05  # share of the steps in which the learning rate rises to its peak
HELD_OUT, MOST_HELD_OUT = 0.1, 24  # share of the sequences held out to choose the round, and their maximum number


@dataclass(frozen=True)
class Schedule:
    """The sequences of every step, the held-out sequences, and the peak learning rate."""

    # indices of the sequences of each step, int64 ``[...]``, by round; a round is an epoch or a part of one
    rounds: Sequence[Sequence[Tensor]]
    held_out: Tensor  # indices of the sequences that decide which round is kept, int64 ``[...]``
    tokens: int  # tokens of a sequence
    learning_rate: float  # peak learning rate, relative to the size of a weight

    @property
    def steps(self) -> int:
        return self.steps_until(len(self.rounds))

    def steps_until(self, rounds: int) -> int:
        """Returns the number of steps in the first ``rounds`` rounds."""
        return sum(map(len, self.rounds[:rounds]))


class Trainer:
    """Runs a schedule and keeps the best round by held-out loss."""

    def __init__(self, run: Run, step: Step, weights: KeptWeights, schedule: Schedule) -> None:
        samples, objective = run.samples_for(step).to(run.model.device, run.model.dtype), run.objective(step)
        self._loss_of = partial(objective.of, run.model, samples)  # indices of sequences -> their mean loss
        self._run, self._weights, self._schedule, self._step_name = run, weights, schedule, step.name
        self._micro_batch = MicroBatch(run.config.micro_batch_size)
        self._best_snapshot = weights.snapshot()

    def run(self) -> Outcome:
        model, config = self._run.model, self._run.working_config
        # A layer that comes to the GPU only while it runs is run again in the backward pass.
        recompute = config.activation_checkpointing or self._run.store.onloads
        with self._weights.trainable(model), checkpointed(layer_modules(model, self._run.plan) if recompute else []):
            return self._continue()

    def _continue(self) -> Outcome:
        """Trains from the last round that an interrupted run finished, or from the start."""
        state, progress = self._run.state(StateFile, self._step_name), self._run.progress
        outcome = self._load(state)
        rounds_done = max(len(outcome.history) - 1, 0)
        if outcome.history:
            progress.say(f"{self._step_name}: continuing after round {rounds_done} of an interrupted run")
        with progress.stage(self._step_name, self._schedule.steps) as advance:
            advance(self._schedule.steps_until(rounds_done))
            self._fit(outcome, advance, state)
        return outcome

    def _fit(self, outcome: Outcome, advance: Advance, state: StateFile | None) -> None:
        """Trains the rounds that are left, and writes the weights of the best one into the model."""
        history, rounds = outcome.history, self._schedule.rounds
        if not history:
            history.append({"round": 0, "loss": None, "held_out": self._held_out_loss(), "seconds": 0.0})
        note = f", last held-out {history[-1]['held_out']:.4f}"
        if len(history) <= len(rounds):
            self._find_size(rounds[0][0])
        present_round = None  # the round whose weights the model holds; None for those it was loaded with
        for round_number in range(len(history), len(rounds) + 1):
            start_time, steps_done = time.perf_counter(), self._schedule.steps_until(round_number - 1)
            losses: list[float] = []
            for step, sequence_indices in enumerate(rounds[round_number - 1], start=steps_done):
                if losses:  # the last step is reported below, with the held-out loss
                    advance(1, f"loss {losses[-1]:.4f}{note}")
                losses.append(self._step(sequence_indices, step))
            held_out_loss, mean_loss = self._held_out_loss(), sum(losses) / len(losses)
            seconds = time.perf_counter() - start_time
            history.append({"round": round_number, "loss": mean_loss, "held_out": held_out_loss, "seconds": seconds})
            if held_out_loss < history[outcome.kept or 0]["held_out"]:
                self._best_snapshot = {}  # frees the old snapshot before the next one is made
                outcome.kept, self._best_snapshot = round_number, self._weights.snapshot()
            present_round = round_number
            note = f", held-out {held_out_loss:.4f} (was {history[0]['held_out']:.4f})"
            advance(1, f"loss {losses[-1]:.4f}{note}")
            self._save(state, outcome)
        self._weights.check()
        if present_round != outcome.kept:
            self._weights.write(self._best_snapshot)
            self._weights.check()
            description = f"{self._step_name}, held out, when its weights were kept"
            check_loss(history[outcome.kept or 0]["held_out"], self._held_out_loss(), self._weights.dtype, description)

    def _step(self, sequence_indices: Tensor, step: int) -> float:
        rate = self._schedule.learning_rate * rate_at(step, self._schedule.steps)
        self._weights.begin(rate, loss_scale(sequence_indices.numel() * self._schedule.tokens))
        try:
            loss = self._check(ranks.total(self._run_backward(sequence_indices)))
            self._weights.finish()
        except FloatingPointError as error:
            raise self._not_finite(f"gradient of {error}") from error
        return loss

    def _run_backward(self, sequence_indices: Tensor) -> float:
        with mixed_precision(self._run.model, self._run.config.mixed_precision):
            return self._micro_batch.run(partial(self._backward, sequence_indices))

    def _backward(self, sequence_indices: Tensor, size: int) -> float:
        """Runs forward and backward on the sequences, ``size`` at a time; returns this rank's part of the mean loss."""
        parts = ranks.parts(sequence_indices, size)
        in_one_pass = self._weights.updates_in_backward and ranks.count() == len(parts) == 1
        self._weights.forget(in_one_pass)
        total = 0.0
        for part in parts:
            loss = with_gradients(self._loss_of(part), self._run.model) * (part.numel() / sequence_indices.numel())
            total += float(loss.detach())
            if in_one_pass:
                self._check(total)
            (loss * self._weights.scale).backward()
        return total

    def _find_size(self, indices: Tensor) -> None:
        """Lowers the micro-batch size to what fits in memory, by a backward pass that changes no weight.

        Where weights change during the backward pass, running out of memory would leave a step half done.
        """
        if self._weights.updates_in_backward and ranks.count() == 1 and 1 < indices.numel() <= self._micro_batch.size:
            with self._weights.ignored_gradients():
                self._run_backward(indices)

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        held_out = self._schedule.held_out

        def total(size: int) -> float:
            losses = [self._loss_of(part) * part.numel() for part in ranks.parts(held_out, size)]
            return float(torch.stack(losses).sum()) if losses else 0.0

        return self._check(ranks.total(self._micro_batch.run(total)) / held_out.numel())

    def _save(self, state: StateFile | None, outcome: Outcome) -> None:
        if state is not None:
            tensors = {f"best.{name}": values for name, values in self._best_snapshot.items()}
            if len(outcome.history) <= len(self._schedule.rounds):  # after the last one, the best weights are enough
                tensors |= self._weights.state()
            state.write(tensors, {"history": json.dumps(outcome.history), "kept": json.dumps(outcome.kept)})

    def _load(self, state: StateFile | None) -> Outcome:
        """Restores what `_save` wrote, and returns the outcome so far."""
        if state is None or (saved_state := state.read()) is None:
            return Outcome("round", kept=0)
        tensors, texts = saved_state
        outcome = Outcome("round", json.loads(texts["history"]), json.loads(texts["kept"]))
        if len(outcome.history) <= len(self._schedule.rounds):
            self._weights.restore(tensors, self._schedule.steps_until(len(outcome.history) - 1))
        self._best_snapshot = {name: tensors[f"best.{name}"] for name in self._best_snapshot}
        return outcome

    def _check(self, loss: float) -> float:
        if not math.isfinite(loss):
            raise self._not_finite("loss")
        return loss

    def _not_finite(self, subject: str) -> CalibrationError:
        return CalibrationError(
            f"{self._step_name}: the {subject} is not finite: activations overflow (try `dtype=float32`), "
            f"the learning rate {self._schedule.learning_rate:g} is too high, or the weights are damaged"
        )


def rate_at(step: int, total: int) -> float:
    """Returns the share of the peak learning rate at a step: a linear warm-up, then a cosine down to 0."""
    warm_up = max(round(WARM_UP * total), 1)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up + 1) / (total - warm_up + 1)))


def split_held_out(sequences: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns the indices of the sequences to train on, and of those held out.

    A single sequence is both: its loss decides which round is kept.
    """
    if sequences == 1:
        return torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(seed))
    count = num_held_out(sequences)
    return order[count:].sort().values, order[:count].sort().values


def num_held_out(sequences: int) -> int:
    """Returns how many of ``sequences`` (at least 2) are held out to choose the round to keep."""
    return min(max(int(HELD_OUT * sequences), 1), MOST_HELD_OUT)


def num_to_draw(num_trained: int) -> int:
    """Returns the number to draw so that ``num_trained`` remain after the held-out split."""
    return num_trained + min(max(int(num_trained * HELD_OUT / (1 - HELD_OUT)), 1), MOST_HELD_OUT)

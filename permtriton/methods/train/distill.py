"""Step ``distill``: trains all kept weights of a pruned model together to reproduce the dense model's outputs.

A tenth of the samples, at most 24, is held out. Their loss is measured after every epoch, or after every round of
an epoch with more than `ROUND` steps. The weights with the lowest held-out loss are kept, perhaps the initial ones.
How a step changes weights is in `permtriton.methods.train.kept_weights`.
"""

import math
import time
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import ClassVar, Literal

import torch
from torch import Tensor

from permtriton.config import OptimizerKind
from permtriton.errors import CalibrationError
from permtriton.methods.measure.losses import ObjectiveKind, minimises
from permtriton.methods.measure.postconditions import check_loss
from permtriton.methods.run import Run
from permtriton.methods.sizes import FLOAT32, Memory, ModelSizes
from permtriton.methods.step import BACKWARD, Outcome, Stage, Step, from_options
from permtriton.methods.train.kept_weights import KeptWeights, weights_of
from permtriton.running.backward import loss_scale, with_gradients
from permtriton.running.mixed_precision import mixed_precision
from permtriton.running.resume import StateFile
from permtriton.util import ranks
from permtriton.util.micro_batch import MicroBatch
from permtriton.util.option import option
from permtriton.util.permutation import epoch_order
from permtriton.util.progress import Advance

HALF = 2  # bytes
MOST_FURTHER = 63
ROUND = 64  # most steps of a round, or the steps that read three times the held-out samples, if these are more
WARM_UP = 0.05  # share of the steps in which the learning rate rises to its peak
HELD_OUT, MOST_HELD_OUT = 0.1, 24  # share of the samples held out to choose the round, and their maximum number
WITHOUT_STEPS = {"distill_steps": (0,)}


@dataclass(frozen=True)
class Distill(Step):
    """Options of the step ``distill``, which trains all kept weights jointly to reproduce the dense model's outputs."""

    name: ClassVar[str] = "distill"
    prefix: ClassVar[str] = "distill"
    summary: ClassVar[str] = "kept weights trained together, to give the dense model's outputs: minutes to hours"
    stage: ClassVar[Stage] = Stage.TRAIN
    shards: ClassVar[bool] = False
    gradients = True
    reads_generated = True

    epochs: int = option(
        20,
        "Passes over all samples that it reads; more where there are fewer further ones than asked for.",
        minimum=1,
        needs=WITHOUT_STEPS,
    )
    learning_rate: float = option(
        5e-3,
        "Peak learning rate, with cosine decay to 0: relative to the root mean square of a linear's kept weights.",
        positive=True,
    )
    batch_size: int = option(8, "Sequences per optimiser step.", minimum=1)
    optimizer: Literal[OptimizerKind] = option(
        "adam",
        "What changes the weights: adam, which keeps two numbers per weight, or adafactor: one per row and column.",
    )
    further: int = option(
        0,
        "Further samples of the calibration text to train on, per sample of --samples; where it has fewer, or none may "
        "be drawn, all samples are read more often.",
        maximum=MOST_FURTHER,
        needs=WITHOUT_STEPS,
    )
    steps: int = option(
        0,
        "Optimiser steps on samples that calibration does not read, where there are, in place of all those epochs; 0 "
        "for epochs.",
    )
    loss: Literal["auto", ObjectiveKind] = option("auto", minimises())

    objective = from_options(lambda step: step.loss)
    backward_batch = from_options(lambda step: step.batch_size)
    extra_per_sample = from_options(lambda step: step.further)
    fresh_samples = from_options(lambda step: num_to_draw(step.steps * step.batch_size) if step.steps else 0)
    # whether the schedule is one round, so that the only state that is saved is the one at the end
    _in_one_round = from_options(lambda step: 0 < step.steps <= ROUND)

    def uses_importance(self) -> bool:
        return False

    def memory(self, sizes: ModelSizes) -> Memory:
        collected = ranks.count() > 1 or self.batch_size > sizes.micro_batch_size
        copies = 1 if self._in_one_round else 2  # a state saved before the last round holds another copy
        weights = copies * int(sizes.pruned * sizes.kept) * sizes.element + sizes.pruned * FLOAT32 * collected
        movable = sizes.targets + self._optimizer_bytes(sizes) + weights
        return Memory(sizes.gradients + sizes.mask, movable)

    def passes(self, sizes: ModelSizes) -> float:
        return BACKWARD * self.epochs_over(sizes.calibration, sizes.sequences)

    def state_bytes(self, sizes: ModelSizes) -> int:
        kept = int(sizes.pruned * sizes.kept) * sizes.element
        return kept if self._in_one_round else 2 * (2 * kept + self._optimizer_bytes(sizes))

    def _optimizer_bytes(self, sizes: ModelSizes) -> int:
        """Returns the bytes that the optimizer keeps: Adam's moments, and the remainders of half-precision weights."""
        moments = 2 * FLOAT32 if self.optimizer == "adam" else 0
        return sizes.pruned * (moments + (HALF if sizes.element < FLOAT32 else 0))

    def epochs_over(self, calibration: int, samples: int) -> int:
        """Returns the number of epochs: enough for ``steps``, or else ``epochs``, more if there are too few samples."""
        if self.steps:
            return math.ceil(self.steps * self.batch_size / max(samples - num_held_out(samples), 1))
        return max(self.epochs, round(self.epochs * (1 + self.further) * calibration / samples))

    @torch.enable_grad()
    def run(self, run: Run) -> Outcome:
        with run.placed_model() as model:
            names = [name for _, name in run.plan.linears()]
            weights = weights_of(model, names)
            # The gradient of a shared weight arrives in parts while layers come to a GPU one by one.
            shared = len(weights) < len(names) or any(site.num_calls > 1 for site in run.plan.sites)
            try:
                return Trainer(run, self, KeptWeights(weights, self.optimizer, run.store), shared).run()
            except FloatingPointError as error:
                raise CalibrationError(
                    f"{self.name}: the {error} is not finite: activations overflow (try `dtype=float32`), "
                    f"the learning rate {self.learning_rate:g} is too high, or the weights are damaged"
                ) from error


class Trainer:
    """Trains in rounds, and keeps the round with the lowest held-out loss.

    A round is an epoch, or a part of one, over all samples that are not held out; with the option ``steps``, all
    steps are one epoch. A loss or a gradient that is not finite raises a `FloatingPointError` that names it. A weight
    that is not ``shared`` changes as soon as its gradient is known, if one backward pass has all of it.
    """

    def __init__(self, run: Run, options: Distill, weights: KeptWeights, shared: bool) -> None:
        objective = run.objective(options)
        samples, self._loss_of = objective.samples, objective.of  # `of`: indices of samples -> their mean loss
        self._run, self._options, self._weights, self._tokens = run, options, weights, samples.tokens
        self._micro_batch = MicroBatch(run.config.micro_batch_size)
        self._best_snapshot, self._updates_in_backward = weights.snapshot(), not shared and ranks.count() == 1
        trained, self._held_out = split_held_out(len(samples), seed := run.config.seed)
        num_epochs = options.epochs_over(len(run.samples), len(samples))
        orders = [epoch_order(trained.numel(), seed, number) for number in range(1, num_epochs + 1)]
        epochs = [trained[order].split(options.batch_size) for order in orders]
        if options.steps:
            epochs = [tuple(chain.from_iterable(epochs))[: options.steps]]
        # With many held-out samples, rounds are longer, so that measuring the samples remains a small part of the time.
        length = max(ROUND, 3 * self._held_out.numel() // options.batch_size)
        # Indices of the samples of each step, int64 ``[...]``, by round.
        self._rounds = [epoch[start : start + length] for epoch in epochs for start in range(0, len(epoch), length)]
        self._steps_before = list(accumulate(map(len, self._rounds), initial=0))  # last: the number of all steps

    def run(self) -> Outcome:
        """Trains from the last round that an interrupted run finished, or from the start."""
        run, name = self._run, self._options.name
        with self._weights.trainable(run.model), run.recomputing(run.model):
            state = run.state(name)
            outcome = self._load(state)
            with run.progress.stage(name, self._steps_before[-1]) as advance:
                advance(self._steps_before[max(len(outcome.history) - 1, 0)])
                self._fit(outcome, advance, state)
        return outcome

    def _fit(self, outcome: Outcome, advance: Advance, state: StateFile) -> None:
        """Trains the rounds that are left, and writes the weights of the best one into the model."""
        history, rounds = outcome.history, self._rounds
        if not history:
            history.append({"round": 0, "loss": None, "held_out": self._held_out_loss(), "seconds": 0.0})
        note = f", last held-out {history[-1]['held_out']:.4f}"
        to_train = range(len(history), len(rounds) + 1)
        if to_train:
            self._find_size(rounds[0][0])
        for round_number in to_train:
            start_time, losses = time.perf_counter(), list[float]()
            for step, sequence_indices in enumerate(rounds[round_number - 1], self._steps_before[round_number - 1]):
                if losses:  # the last step is reported below, with the held-out loss
                    advance(1, f"loss {losses[-1]:.4f}{note}")
                losses.append(self._step(sequence_indices, step))
            held_out_loss, mean_loss = self._held_out_loss(), sum(losses) / len(losses)
            seconds = time.perf_counter() - start_time
            history.append({"round": round_number, "loss": mean_loss, "held_out": held_out_loss, "seconds": seconds})
            if held_out_loss < outcome.kept_row["held_out"]:
                self._best_snapshot = {}  # frees the old snapshot before the next one is made
                outcome.kept, self._best_snapshot = round_number, self._weights.snapshot()
            note = f", held-out {held_out_loss:.4f} (was {history[0]['held_out']:.4f})"
            advance(1, f"loss {losses[-1]:.4f}{note}")
            self._save(state, outcome)
        if not to_train or outcome.kept != len(rounds):  # else the model holds the best weights
            self._weights.write(self._best_snapshot)
            loss, moment = self._held_out_loss(), "distill, held out, when its weights were kept"
            check_loss(outcome.kept_row["held_out"], loss, self._run.model.dtype, moment)

    def _step(self, sequence_indices: Tensor, step: int) -> float:
        rate = self._options.learning_rate * rate_at(step, self._steps_before[-1])
        self._weights.begin(rate, loss_scale(sequence_indices.numel() * self._tokens))
        loss = _finite(ranks.total(self._run_backward(sequence_indices)))
        self._weights.finish()
        return loss

    def _run_backward(self, sequence_indices: Tensor) -> float:
        with mixed_precision(self._run.model, self._run.config.mixed_precision):
            return self._micro_batch.run(partial(self._backward, sequence_indices))

    def _backward(self, sequence_indices: Tensor, size: int) -> float:
        """Runs forward and backward on the sequences, ``size`` at a time; returns this rank's part of the mean loss."""
        parts = ranks.parts(sequence_indices, size)
        in_one_pass = self._updates_in_backward and len(parts) == 1
        self._weights.forget(in_one_pass)
        total = 0.0
        for part in parts:
            loss = with_gradients(self._loss_of(part), self._run.model) * (part.numel() / sequence_indices.numel())
            total += float(loss.detach())
            if in_one_pass:
                _finite(total)
            (loss * self._weights.scale).backward()
        return total

    def _find_size(self, indices: Tensor) -> None:
        """Lowers the micro-batch size to what fits in memory, by a backward pass that changes no weight.

        Where weights change during the backward pass, running out of memory would leave a step half done.
        """
        if self._updates_in_backward and 1 < indices.numel() <= self._micro_batch.size:
            self._weights.begin(0.0, 1.0, changes=False)
            self._run_backward(indices)

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        held_out = self._held_out

        def total(size: int) -> float:
            losses = [self._loss_of(part) * part.numel() for part in ranks.parts(held_out, size)]
            return float(torch.stack(losses).sum()) if losses else 0.0

        return _finite(ranks.total(self._micro_batch.run(total)) / held_out.numel())

    def _save(self, state: StateFile, outcome: Outcome) -> None:
        if state.path is not None:
            tensors = {f"best.{name}": values for name, values in self._best_snapshot.items()}
            if len(outcome.history) <= len(self._rounds):  # after the last one, the best weights are enough
                tensors |= self._weights.state()
            state.write(tensors, history=outcome.history, kept=outcome.kept)

    def _load(self, state: StateFile) -> Outcome:
        """Restores what `_save` wrote, and returns the outcome so far."""
        if (saved_state := state.read()) is None:
            return Outcome("round", kept=0)
        tensors, values = saved_state
        outcome = Outcome("round", values["history"], values["kept"])
        rounds_done = len(outcome.history) - 1
        self._run.progress.say(f"{self._options.name}: continuing after round {rounds_done} of an interrupted run")
        if rounds_done < len(self._rounds):
            self._weights.restore(tensors, self._steps_before[rounds_done])
        self._best_snapshot = {name: tensors[f"best.{name}"] for name in self._best_snapshot}
        return outcome


def _finite(loss: float) -> float:
    if not math.isfinite(loss):
        raise FloatingPointError("loss")
    return loss


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

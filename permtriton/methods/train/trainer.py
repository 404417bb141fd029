"""Training parameters of a pruned model: the schedule, the round that is kept, and what an interrupted run continues.

What is trained, and how a step changes it, is a `Trainable`: the weights that pruning kept
(`permtriton.methods.train.kept_weights`), or the vectors of a model (`permtriton.methods.train.tuning`).
"""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from permtriton.config import CommonConfig
from permtriton.errors import CalibrationError
from permtriton.methods.measure.postconditions import check_loss
from permtriton.methods.train.training_step import Training, held_out
from permtriton.running import ranks
from permtriton.running.backward import frozen, loss_scale, with_gradients
from permtriton.running.micro_batch import MicroBatch
from permtriton.running.mixed_precision import mixed_precision
from permtriton.running.state import StateFile
from permtriton.util.progress import Advance, Progress

WARM_UP = 0.05  # share of the steps in which the learning rate rises to its peak

Loss = Callable[[Tensor], Tensor]  # numbers of sequences, int64 [...], to the mean loss over their tokens, float32 []


@dataclass(frozen=True)
class UpdateEpoch:
    """The outcome of one round, which is an epoch or a part of one.

    Attributes:
        epoch: number of the round, from 1; 0 is before training.
        loss: mean loss of the round's steps, each before its update; None for round 0.
        held_out: mean loss over the held-out sequences, after the round.
        seconds: time of training and evaluation.
    """

    epoch: int
    loss: float | None
    held_out: float
    seconds: float


@dataclass
class Trained:
    """The result of training.

    Attributes:
        history: all rounds so far.
        kept: number of the round with the lowest held-out loss, whose weights are kept.
    """

    history: list[UpdateEpoch] = field(default_factory=list)
    kept: int = 0

    def report(self, unit: str = "epoch") -> dict[str, Any]:
        """Returns all rounds, each with its number under ``unit``, and the one that is kept."""
        rows = [asdict(epoch) for epoch in self.history]
        return {"history": [{unit: row.pop("epoch"), **row} for row in rows], "kept": self.kept}


@dataclass(frozen=True)
class Course:
    """What is trained on, in which order.

    Attributes:
        rounds: numbers of the sequences of each step, int64 ``[...]``, round by round: epochs, or parts of one.
        held_out: numbers of the sequences that decide which round is kept, int64 ``[...]``.
        tokens: tokens of a sequence.
        learning_rate: peak learning rate, relative to the size of what is trained.
    """

    rounds: Sequence[Sequence[Tensor]]
    held_out: Tensor
    tokens: int
    learning_rate: float

    @classmethod
    def of(cls, sequences: int, tokens: int, options: Training, seed: int) -> "Course":
        """Returns epochs over all sequences but those held out; the seed and the epoch's number decide its order."""
        rows, others = split(sequences, seed)
        epochs = []
        for number in range(1, options.epochs + 1):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            epochs.append(rows[torch.randperm(rows.numel(), generator=generator)].split(options.batch_size))
        return cls(epochs, others, tokens, options.learning_rate)

    @property
    def steps(self) -> int:
        """Number of all steps."""
        return self.steps_until(len(self.rounds))

    def steps_until(self, rounds: int) -> int:
        """Returns the number of steps of the first so many rounds."""
        return sum(map(len, self.rounds[:rounds]))

    def first(self, steps: int) -> "Course":
        """Returns the first so many steps, as one round."""
        return replace(self, rounds=[list(chain.from_iterable(self.rounds))[:steps]])

    def in_rounds(self, steps: int, batch_size: int) -> "Course":
        """Returns the same steps, with every round of more than ``steps`` cut into several.

        They are longer where the held-out sequences are many, so that measuring these stays a small part.
        """
        steps = max(steps, 3 * self.held_out.numel() // batch_size)
        starts = [(each, start) for each in self.rounds for start in range(0, len(each), steps)]
        return replace(self, rounds=[each[start : start + steps] for each, start in starts])


class Trainable(ABC):
    """Parameters of a model that are trained, and how a step changes them. Use it inside `trainable`.

    Args:
        parameters: name -> parameter, of any layout; changed in place only.

    Attributes:
        changes_at_once: whether a step may change a parameter as soon as its gradient is known.
        rate: learning rate of the present step.
        scale: factor of its loss, which its gradients have, too.
    """

    changes_at_once = False
    rate = scale = 1.0
    _ignores = False

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)

    @contextmanager
    def trainable(self, model: nn.Module) -> Iterator[None]:
        """Inside the context, backward passes give the gradients of the parameters here and leave none in the model."""
        with frozen(model), ExitStack() as hooks:
            try:
                for name, parameter in self._parameters.items():
                    parameter.grad = None
                    parameter.requires_grad_(True)
                    hooks.enter_context(parameter.register_post_accumulate_grad_hook(partial(self._take, name)))
                yield
            finally:
                for parameter in self._parameters.values():
                    parameter.grad = None
                    parameter.requires_grad_(False)

    @torch.no_grad()
    def _take(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if not self._ignores:
            self.take(name, parameter.grad)
        parameter.grad = None

    @contextmanager
    def ignored_gradients(self) -> Iterator[None]:
        """Inside the context, gradients are neither collected nor used."""
        self._ignores = True
        try:
            yield
        finally:
            self._ignores = False

    @abstractmethod
    def take(self, name: str, gradient: Tensor) -> None:
        """Takes the gradient of a parameter, in the backward pass that computed it.

        Raises:
            FloatingPointError: it is not finite, and the parameter would be changed by it; the message is ``name``.
        """

    def begin(self, rate: float, scale: float) -> None:
        """Begins a step."""
        self.rate, self.scale = rate, scale

    def forget(self, at_once: bool) -> None:
        """Forgets the gradients of a backward pass that failed, or of a step that is over.

        Args:
            at_once: whether the next backward pass has all gradients of the step, which then need not be collected.
        """
        for parameter in self._parameters.values():
            parameter.grad = None

    @abstractmethod
    def finish(self) -> None:
        """Ends a step: adds what was collected up over the ranks, and changes what has not been changed yet.

        Raises:
            FloatingPointError: a gradient is not finite; the message names its parameter.
        """

    @abstractmethod
    def snapshot(self) -> dict[str, Tensor]:
        """Returns a copy of the values that the model has now, never on a GPU."""

    @abstractmethod
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Gives the model the values of a snapshot."""

    @abstractmethod
    def check(self) -> None:
        """Checks that nothing else was written.

        Raises:
            VerificationError: something was.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Returns everything that further steps depend on; inside `trainable`."""

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Takes up the state that `state` returned after so many steps."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights."""
        return next(iter(self._parameters.values())).dtype


class Trainer:
    """Steps, their schedule, and the held-out loss. Use it inside `Trainable.trainable`.

    Args:
        model: whose linears multiply, where the config says so, in mixed precision during steps.
        what: name of what is trained, for errors.
    """

    def __init__(
        self, trained: Trainable, model: nn.Module, loss_of: Loss, course: Course, config: CommonConfig, what: str
    ) -> None:
        self._trained, self._model, self._loss_of, self._course, self._what = trained, model, loss_of, course, what
        self._precision = partial(mixed_precision, model, config.mixed_precision)
        self._micro_batch = MicroBatch(config.micro_batch_size)
        self.best = trained.snapshot()

    def run(self, state: StateFile | None, progress: Progress) -> Trained:
        """Trains all rounds, or those that an interrupted run has left; returns what it made.

        Args:
            state: file that keeps the state between rounds; None keeps no state.

        Raises:
            CalibrationError: a loss or a gradient is not finite.
            OutputError: the state belongs to another run, is damaged, or cannot be written.
            VerificationError: a pruned weight was written, or the loss of the weights that are kept is another one.
        """
        result = self.load(state)
        done = max(len(result.history) - 1, 0)
        if result.history:
            progress.say(f"{self._what}: continuing after round {done} of an interrupted run")
        with progress.stage(self._what, self._course.steps) as advance:
            advance(self._course.steps_until(done))
            self._fit(result, advance, state)
        return result

    def _fit(self, result: Trained, advance: Advance, state: StateFile | None) -> None:
        """Trains the rounds that are left, and writes the weights of the best one into the model."""
        if not result.history:
            result.history.append(UpdateEpoch(0, None, self.held_out_loss(), 0.0))
        note = f", held-out {result.history[-1].held_out:.4f} before"
        if len(result.history) <= len(self._course.rounds):
            self._find_size(self._course.rounds[0][0])
        for number in range(len(result.history), len(self._course.rounds) + 1):
            started, done = time.perf_counter(), self._course.steps_until(number - 1)
            losses: list[float] = []
            for step, rows in enumerate(self._course.rounds[number - 1], start=done):
                if losses:  # the last step is reported with what is held out
                    advance(1, f"loss {losses[-1]:.4f}{note}")
                losses.append(self._step(rows, step))
            held_out = self.held_out_loss()
            seconds = time.perf_counter() - started
            result.history.append(UpdateEpoch(number, sum(losses) / len(losses), held_out, seconds))
            if held_out < result.history[result.kept].held_out:
                self.best = {}  # not to have two in memory
                result.kept, self.best = number, self._trained.snapshot()
            note = f", held-out {held_out:.4f} (was {result.history[0].held_out:.4f})"
            advance(1, f"loss {losses[-1]:.4f}{note}")
            self.save(state, result)
        self._trained.check()
        self._trained.write(self.best)
        self._trained.check()
        best = result.history[result.kept].held_out
        check_loss(
            best, self.held_out_loss(), self._trained.dtype, f"{self._what}, held out, when its weights were kept"
        )

    def _step(self, rows: Tensor, step: int) -> float:
        rate = self._course.learning_rate * schedule(step, self._course.steps)
        self._trained.begin(rate, loss_scale(rows.numel() * self._course.tokens))
        try:
            total = self._check(ranks.total(self._run_backward(rows)))
            self._trained.finish()
        except FloatingPointError as error:
            raise self._not_finite(f"gradient of {error}") from error
        return total

    def _run_backward(self, rows: Tensor) -> float:
        with self._precision():
            return self._micro_batch.run(partial(self._backward, rows))

    def _backward(self, rows: Tensor, size: int) -> float:
        """Runs some sequences, so many at a time, and returns this rank's part of their mean loss."""
        parts = ranks.parts(rows, size)
        at_once = self._trained.changes_at_once and ranks.count() == len(parts) == 1
        self._trained.forget(at_once)
        total = 0.0
        for part in parts:
            loss = with_gradients(self._loss_of(part), self._model) * (part.numel() / rows.numel())
            total += float(loss.detach())
            if at_once:
                self._check(total)
            (loss * self._trained.scale).backward()
        return total

    def _find_size(self, rows: Tensor) -> None:
        """Lowers the micro-batch to what fits, by a pass that changes nothing.

        Memory that ran out in a step which changes weights at once would leave it half done.
        """
        if self._trained.changes_at_once and ranks.count() == 1 and 1 < rows.numel() <= self._micro_batch.size:
            with self._trained.ignored_gradients():
                self._run_backward(rows)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Returns the mean loss over the held-out sequences.

        Raises:
            CalibrationError: it is not finite.
        """
        held_out = self._course.held_out

        def total(size: int) -> float:
            losses = [self._loss_of(part) * part.numel() for part in ranks.parts(held_out, size)]
            return float(torch.stack(losses).sum()) if losses else 0.0

        return self._check(ranks.total(self._micro_batch.run(total)) / held_out.numel())

    def save(self, state: StateFile | None, result: Trained) -> None:
        """Writes what training continues from."""
        if state is not None:
            tensors = {f"best.{name}": values for name, values in self.best.items()}
            if len(result.history) <= len(self._course.rounds):  # after the last round, the best weights are enough
                tensors |= self._trained.state()
            state.write(tensors, {"result": json.dumps(result.report())})

    def load(self, state: StateFile | None) -> Trained:
        """Restores what `save` wrote and returns the result so far, an empty one where there is no state.

        Raises:
            OutputError: the state belongs to another run, or is damaged.
        """
        if state is None or (stored := state.read()) is None:
            return Trained()
        tensors, texts = stored
        values = json.loads(texts["result"])
        result = Trained([UpdateEpoch(**row) for row in values["history"]], values["kept"])
        if len(result.history) <= len(self._course.rounds):
            self._trained.restore(tensors, self._course.steps_until(len(result.history) - 1))
        self.best = {name: tensors[f"best.{name}"] for name in self.best}
        return result

    def _check(self, loss: float) -> float:
        if not math.isfinite(loss):
            raise self._not_finite("loss")
        return loss

    def _not_finite(self, what: str) -> CalibrationError:
        return CalibrationError(
            f"{self._what}: the {what} is not finite: activations overflow (try `dtype=float32`), "
            f"its learning rate, {self._course.learning_rate:g} is too high, or the weights are damaged"
        )


def schedule(step: int, total: int) -> float:
    """Returns the share of the peak learning rate at a step: a linear warm-up, then a cosine down to 0."""
    warm_up = max(round(WARM_UP * total), 1)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up + 1) / (total - warm_up + 1)))


def split(sequences: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns the numbers of the sequences to train on, and of those held out.

    A single sequence is both: its loss decides which round is kept.
    """
    if sequences == 1:
        return torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(seed))
    count = held_out(sequences)
    return order[count:].sort().values, order[:count].sort().values

"""Training the weights that pruning kept: their copies in float32, the schedule, and the round that is kept.

Only kept weights are trained and only they have optimizer states, so no step can change what was pruned, and Adam takes
16 bytes per kept weight (copy, gradient and two moments): 8 per weight at 2:4. torch has no optimizer with smaller
states.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from permtriton.config import CommonConfig
from permtriton.errors import CalibrationError, VerificationError
from permtriton.methods.measure.postconditions import check_loss
from permtriton.methods.train.training import Training
from permtriton.passes.plan import linear_module
from permtriton.running import ranks
from permtriton.running.backward import frozen, loss_scale
from permtriton.running.micro_batch import MicroBatch
from permtriton.running.state import StateFile, read_records
from permtriton.util.progress import Advance

HELD_OUT = 0.1  # share of the sequences that decides which round is kept
WARM_UP = 0.05  # share of the steps in which the learning rate rises to its peak
MOMENTS = ("exp_avg", "exp_avg_sq")

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

    @classmethod
    def read(cls, values: Any, rounds: int) -> "Trained":
        """Returns the result that `report` gave, from JSON values; it has at most ``rounds`` rounds.

        Raises:
            KeyError, TypeError, ValueError: it cannot be read.
        """
        history, kept = read_records(UpdateEpoch, values["history"], rounds), values["kept"]
        if type(kept) is not int or not 0 <= kept < len(history):
            raise ValueError(f"it has {len(history)} rounds and keeps round {kept}")
        return cls(history, kept)


@dataclass(frozen=True)
class Course:
    """What is trained on, in which order.

    Attributes:
        rounds: numbers of the sequences of each step, int64 ``[...]``, round by round: epochs, or parts of one.
        held_out: numbers of the sequences that decide which round is kept, int64 ``[...]``.
        tokens: tokens of a sequence.
        learning_rate: peak learning rate, relative to `KeptWeights.pace`.
    """

    rounds: Sequence[Sequence[Tensor]]
    held_out: Tensor
    tokens: int
    learning_rate: float

    @classmethod
    def of(cls, sequences: int, tokens: int, options: Training, seed: int) -> "Course":
        """Returns epochs over all sequences but those held out; the seed and the epoch's number decide its order."""
        rows, held_out = split(sequences, seed)
        epochs = []
        for number in range(1, options.epochs + 1):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            epochs.append(rows[torch.randperm(rows.numel(), generator=generator)].split(options.batch_size))
        return cls(epochs, held_out, tokens, options.learning_rate)

    @property
    def steps(self) -> int:
        """Number of all steps."""
        return self.steps_until(len(self.rounds))

    def steps_until(self, rounds: int) -> int:
        """Returns the number of steps of the first so many rounds."""
        return sum(map(len, self.rounds[:rounds]))

    def in_rounds(self, steps: int, batch_size: int) -> "Course":
        """Returns the same steps, with every round of more than ``steps`` cut into several.

        They are longer where the held-out sequences are many, so that measuring these stays a small part.
        """
        steps = max(steps, 3 * self.held_out.numel() // batch_size)
        starts = [(each, start) for each in self.rounds for start in range(0, len(each), steps)]
        return replace(self, rounds=[each[start : start + steps] for each, start in starts])


def weights_of(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Parameter]:
    """Returns name -> weight of linears; a weight that several linears share has the name of the first."""
    weights: dict[int, tuple[str, nn.Parameter]] = {}
    for name in names:
        weight = linear_module(model, name).get_parameter("weight")
        weights.setdefault(id(weight), (name, weight))
    return dict(weights.values())


class KeptWeights:
    """The nonzero weights of some linears, copied in float32.

    Args:
        weights: name -> pruned weight, of any layout; changed in place only.
        device: device of the copies; None for those of the weights.

    Attributes:
        values: name -> float32 ``[kept weights]`` (float64 for a float64 model) with their gradient, which adds up over
            backward passes.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], device: torch.device | None = None) -> None:
        self._weights = dict(weights)
        self._masks = {name: self._trained(weight.detach()) for name, weight in weights.items()}
        self.values: dict[str, Tensor] = {}
        for name, weight in weights.items():
            kept = weight.detach().masked_select(self._masks[name])
            self.values[name] = with_gradient(kept.to(device, torch.promote_types(kept.dtype, torch.float32)))

    def _trained(self, weight: Tensor) -> Tensor:
        """Returns which entries of a weight are trained, bool of its shape."""
        return weight != 0

    def _mask(self, name: str) -> Tensor:
        """Returns which entries are trained, on the device on which the weight is now (`permtriton.running.onload`)."""
        return self._masks[name].to(self._weights[name].device)

    def pace(self, name: str) -> float:
        """Returns the size of ``values[name]``, to which the learning rate is relative: their root mean square.

        Models of different widths, whose weights differ in size tenfold, so take one learning rate. It is 1 where there
        are no values, or all are 0.
        """
        values = self.values[name].detach()
        return (float(values.square().mean().sqrt()) if values.numel() else 0.0) or 1.0

    @contextmanager
    def trainable(self, model: nn.Module) -> Iterator[None]:
        """Inside the context, backward passes add to the gradients of `values` and leave none in the model."""
        with frozen(model):
            handles = []
            try:
                for name, weight in self._weights.items():
                    weight.grad = None
                    weight.requires_grad_(True)
                    handles.append(weight.register_post_accumulate_grad_hook(self._collector(name)))
                yield
            finally:
                for handle in handles:
                    handle.remove()
                for weight in self._weights.values():
                    weight.grad = None
                    weight.requires_grad_(False)

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        total, mask = self.values[name].grad, self._masks[name]
        assert total is not None

        @torch.no_grad()
        def collect(weight: Tensor) -> None:
            assert weight.grad is not None
            total.add_(weight.grad.masked_select(mask.to(weight.device)).to(total.device))
            weight.grad = None

        return collect

    def drop_gradients(self) -> None:
        """Sets the gradients to 0, also those that a backward pass which failed left in the model."""
        for name, weight in self._weights.items():
            weight.grad = None
            total = self.values[name].grad
            assert total is not None
            total.zero_()

    @torch.no_grad()
    def snapshot(self, device: str | None = "cpu") -> dict[str, Tensor]:
        """Returns a copy of the model's kept weights in its dtype, each ``[kept weights]``, on ``device``."""
        return {
            name: weight.detach().masked_select(self._mask(name)).to(device or weight.device)
            for name, weight in self._weights.items()
        }

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Writes kept weights into the model, rounded to its dtype; the sum turns -0.0 into 0.0."""
        for name, weight in self._weights.items():
            weight.masked_scatter_(self._mask(name), values[name].to(weight) + 0.0)

    def check(self) -> None:
        """Checks that no weight that was pruned holds a value now.

        Raises:
            VerificationError: one does; the message names its linear.
        """
        for name, weight in self._weights.items():
            if written := int((weight.detach().masked_fill(self._mask(name), 0) != 0).sum()):
                raise VerificationError(
                    f"{name}: training wrote {written} weights that were pruned. Nothing was saved; this is a bug of "
                    "permtriton, please report it"
                )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights."""
        return next(iter(self._weights.values())).dtype


def with_gradient(values: Tensor) -> Tensor:
    """Returns a tensor as a leaf whose gradient is 0 so far."""
    values.requires_grad_().grad = torch.zeros_like(values)
    return values


class WeightTrainer:
    """Adam on kept weights: steps, schedule, and the held-out loss. Use it inside `KeptWeights.trainable`.

    Args:
        what: name of what is trained, for errors.
    """

    def __init__(self, kept: KeptWeights, loss_of: Loss, course: Course, config: CommonConfig, what: str) -> None:
        self._kept, self._loss_of, self._course, self._what = kept, loss_of, course, what
        self._micro_batch = MicroBatch(config.micro_batch_size)
        groups = [{"params": [values], "pace": kept.pace(name)} for name, values in kept.values.items()]
        self.optimizer = torch.optim.Adam(groups, course.learning_rate, foreach=False)
        self.best = kept.snapshot()

    def fit(self, result: Trained, advance: Advance, save: Callable[[], None] = lambda: None) -> None:
        """Trains the rounds that are left, and writes the weights of the best one into the model.

        Args:
            result: the rounds so far, extended in place.
            save: called after every round.

        Raises:
            CalibrationError: a loss or a gradient is not finite.
            VerificationError: a pruned weight was written, or the loss of the weights that are kept is another one.
        """
        if not result.history:
            result.history.append(UpdateEpoch(0, None, self.held_out_loss(), 0.0))
        note = f", held-out {result.history[-1].held_out:.4f} (was {result.history[0].held_out:.4f})"
        for number in range(len(result.history), len(self._course.rounds) + 1):
            started, losses, done = time.perf_counter(), [], self._course.steps_until(number - 1)
            for step, rows in enumerate(self._course.rounds[number - 1], start=done):
                losses.append(self._step(rows, step))
                advance(1, f"loss {losses[-1]:.4f}{note}")
            held_out = self.held_out_loss()
            seconds = time.perf_counter() - started
            result.history.append(UpdateEpoch(number, sum(losses) / len(losses), held_out, seconds))
            if held_out < result.history[result.kept].held_out:
                result.kept, self.best = number, self._kept.snapshot()
            note = f", held-out {held_out:.4f} (was {result.history[0].held_out:.4f})"
            save()
        self._kept.write(self.best)
        self._kept.check()
        best = result.history[result.kept].held_out
        check_loss(best, self.held_out_loss(), self._kept.dtype, f"{self._what}, held out, when its weights were kept")

    def _step(self, rows: Tensor, step: int) -> float:
        scale = loss_scale(rows.numel() * self._course.tokens)
        grads = [values.grad for values in self._kept.values.values() if values.grad is not None]

        def backward(size: int) -> float:
            self._kept.drop_gradients()
            total = 0.0
            for part in ranks.parts(rows, size):
                loss = self._loss_of(part) * (part.numel() / rows.numel())
                (loss * scale).backward()
                total += float(loss.detach())
            return total

        total = self._check(ranks.total(self._micro_batch.run(backward)), "loss")
        ranks.add_up(grads)
        for grad in grads:
            grad.div_(scale)
        if not bool(torch.stack([grad.isfinite().all() for grad in grads]).all()):
            self._check(math.inf, "gradient")
        for group in self.optimizer.param_groups:
            group["lr"] = self._course.learning_rate * schedule(step, self._course.steps) * group["pace"]
        self.optimizer.step()
        self._kept.write(self._kept.values)
        return total

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

        return self._check(ranks.total(self._micro_batch.run(total)) / held_out.numel(), "loss")

    def save(self, state: StateFile | None, result: Trained) -> None:
        """Writes everything that training continues from."""
        if state is None:
            return
        tensors = {f"best.{name}": best for name, best in self.best.items()}
        for name, values in self._kept.values.items():
            tensors[f"value.{name}"] = values
            for key in (*MOMENTS, "step"):
                tensors[f"{key}.{name}"] = self.optimizer.state[values][key]
        state.write(tensors, {"result": json.dumps(result.report())})

    def load(self, state: StateFile | None) -> Trained:
        """Restores weights and optimizer and returns the result so far, an empty one where there is no state.

        Raises:
            OutputError: the state belongs to another run, or is damaged.
        """
        if state is None or (stored := state.read()) is None:
            return Trained()
        tensors, texts = stored
        try:
            result = Trained.read(json.loads(texts["result"]), len(self._course.rounds))
        except (KeyError, TypeError, ValueError) as error:
            raise state.damaged(f"its history cannot be read ({error})") from error
        like: dict[str, Tensor] = {}
        for name, values in self._kept.values.items():
            like |= {f"best.{name}": self.best[name], f"step.{name}": torch.tensor(0.0)}
            like |= {f"{key}.{name}": values for key in ("value", *MOMENTS)}
        state.check_tensors(tensors, like)
        done = self._course.steps_until(len(result.history) - 1)
        if any(int(tensors[f"step.{name}"]) != done for name in self._kept.values):
            raise state.damaged(f"it is not after step {done}, where its {len(result.history) - 1} rounds end")
        with torch.no_grad():
            for name, values in self._kept.values.items():
                values.copy_(tensors[f"value.{name}"])
                moments = {key: tensors[f"{key}.{name}"].to(values) for key in MOMENTS}
                self.optimizer.state[values] = {"step": tensors[f"step.{name}"], **moments}
        self._kept.write(self._kept.values)
        self.best = {name: tensors[f"best.{name}"] for name in self.best}
        return result

    def _check(self, value: float, kind: str) -> float:
        if not math.isfinite(value):
            raise CalibrationError(
                f"{self._what}: the {kind} is not finite: activations overflow (try `dtype=float32`), "
                f"its learning rate, {self._course.learning_rate:g} is too high, or the weights are damaged"
            )
        return value


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
    held_out = max(int(HELD_OUT * sequences), 1)
    return order[held_out:].sort().values, order[:held_out].sort().values

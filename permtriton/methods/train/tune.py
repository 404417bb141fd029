"""Step ``tune``: trains the vectors of a pruned model, and a scale per weight row, to reproduce the dense outputs.

Vectors are the gains and biases of norms of any class, and the biases of linears. They have a thousandth as many values
as the weights, so they hardly overfit. Backward passes compute no weight gradients: the gradient of a scale is the sum
over tokens of the linear's output times the gradient of that output. During training, scales multiply outputs; at the
end they are folded into the weights, whose N:M pattern this cannot change.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.methods.measure.losses import ObjectiveKind, minimises
from permtriton.methods.measure.postconditions import check_loss
from permtriton.methods.run import Run
from permtriton.methods.sizes import FLOAT32, Memory, ModelSizes
from permtriton.methods.step import BACKWARD, GENERATED, Outcome
from permtriton.methods.train.kept_weights import weights_of
from permtriton.methods.train.trainer import Schedule, Trainable, Trainer, TrainingStep
from permtriton.model.core import body_of
from permtriton.model.modules import LINEAR_MODULES
from permtriton.passes.plan import Plan, weight_in_out
from permtriton.util import ranks
from permtriton.util.option import documented, option
from permtriton.util.store import Store

MOMENTS = ("exp_avg", "exp_avg_sq")
ROUNDS = 4  # rounds into which all steps are divided; the held-out loss is measured after each
TRAINED_PER_HELD_OUT, MOST_HELD_OUT = 10, 16


@documented
@dataclass(frozen=True)
class Tune(TrainingStep):
    """Options of tuning."""

    name: ClassVar[str] = "tune"
    prefix: ClassVar[str] = "tune"
    summary: ClassVar[str] = (
        "norms, biases and a scale per row trained together, on text that calibration does not read: minutes"
    )
    keeps_values: ClassVar[bool] = False

    steps: int = option(
        32, "Optimiser steps, each on sequences that calibration does not read, where there are.", minimum=1
    )
    learning_rate: float = option(
        2.5e-3,
        "Peak Adam learning rate, with cosine decay to 0: relative to a scale, and to the root mean square of a norm's "
        "gains or of a bias; where a bias is all 0, to that of the weight beside it.",
        positive=True,
    )
    batch_size: int = option(1, "Sequences per optimiser step.", minimum=1)
    generated: bool = option(True, GENERATED)
    loss: Literal["auto", ObjectiveKind] = option("auto", minimises())

    @property
    def objective(self) -> str:
        return self.loss

    @property
    def trained(self) -> int:
        return self.steps * self.batch_size

    @property
    def fresh_samples(self) -> int:
        return self.trained + min(ceil(self.trained / TRAINED_PER_HELD_OUT), MOST_HELD_OUT)

    @staticmethod
    def num_held_out(samples: int) -> int:
        """Returns how many of ``samples`` samples are held out to decide which round is kept."""
        return min(max(samples // (TRAINED_PER_HELD_OUT + 1), 1), MOST_HELD_OUT)

    def memory(self, sizes: ModelSizes) -> tuple[Memory, ...]:
        state = sizes.vectors * 6 * FLOAT32
        folding = sizes.targets + state + sizes.pruned * sizes.element + sizes.mask
        return Memory(sizes.gradients + state, sizes.targets), Memory(0, folding)

    def passes(self, sizes: ModelSizes) -> float:
        return BACKWARD * self.trained / sizes.sequences + 1

    def state_bytes(self, sizes: ModelSizes) -> int:
        return 2 * sizes.vectors * (sizes.element + 3 * FLOAT32)

    @torch.enable_grad()
    def run(self, run: Run) -> Outcome:
        with run.placed_model() as model:
            values = TunedValues(model, run.plan)
            trainer = Trainer(run, self, values, self._schedule(run.samples_for(self)))
            start = trainer.best_snapshot
            with trainer.context():
                outcome = trainer.run()
                self._fold(run.store, trainer, values, start, outcome)
            return outcome

    def _fold(
        self, store: Store, trainer: Trainer, values: "TunedValues", start: Mapping[str, Tensor], outcome: Outcome
    ) -> None:
        """Folds the scales into the weights; gives all back where their rounding outweighs what was gained."""
        unscaled_weights = values.fold(store)
        best, folded = outcome.history[outcome.kept or 0]["held_out"], trainer.held_out_loss()
        if values.dtype.itemsize >= 4:  # in half precision, rounding may change a small loss by any share of it
            check_loss(best, folded, values.dtype, "tune, held out, before its scales were folded into the weights")
        if folded > outcome.history[0]["held_out"]:
            values.unfold(unscaled_weights)
            values.write(start)
            outcome.kept = 0

    def _schedule(self, samples: Samples) -> Schedule:
        """Returns rounds of steps over all samples that are not held out, cycling through them if there are too few.

        The samples are in random order already. A single one is both trained on and held out.
        """
        num_held_out = self.num_held_out(len(samples))
        rows = torch.arange(num_held_out if len(samples) > 1 else 0, len(samples))
        batches = rows[torch.arange(self.trained) % rows.numel()].split(self.batch_size)
        ends = [round(self.steps * part / ROUNDS) for part in range(ROUNDS + 1)]
        rounds = [batches[start:end] for start, end in pairwise(ends) if end > start]
        return Schedule(rounds, torch.arange(num_held_out), samples.tokens, self.learning_rate)


class TunedValues(Trainable):
    """The vectors of a model, copied in float32, and the logarithms of the scales of its pruned linears' rows.

    Adam changes them. The learning rate is relative to the root mean square of a vector. For a vector of zeros, it is
    relative to that of the weight in the same module, whose size reflects the scale of the outputs. For the logarithms,
    which are relative already, it is used unchanged. The head's vectors stay fixed: the dense logits use them too.

    Attributes:
        values: parameter -> its values, and ``LINEAR.scale`` -> float32 ``[out_features]``, each once, however many
            modules share it.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan) -> None:
        body_ids = {id(parameter) for part in body_of(model) for parameter in part.parameters()}
        vectors = {name: p for name, p in model.named_parameters() if p.ndim == 1 and id(p) in body_ids}
        super().__init__({name: vector for name, vector in vectors.items() if name not in plan.untraced})
        self._linears, self._dtype = _linears(model, plan), model.dtype
        starts = {name: vector.detach() for name, vector in self._parameters.items()}
        starts |= {name: torch.zeros_like(weight_in_out(linears[0])[0]) for name, linears in self._linears.items()}
        self.values = {
            name: start.to(model.device, torch.promote_types(start.dtype, torch.float32), copy=True).requires_grad_()
            for name, start in starts.items()
        }
        parameters = dict(model.named_parameters(remove_duplicate=False))
        weights = {name: parameters.get(f"{name.removesuffix('bias')}weight") for name in self.values}
        groups = [{"params": [values], "pace": _pace(values, weights[name])} for name, values in self.values.items()]
        self._optimizer = torch.optim.Adam(groups, foreach=False)
        for values in self.values.values():
            moments = {key: torch.zeros_like(values, requires_grad=False) for key in MOMENTS}
            self._optimizer.state[values] = {"step": torch.tensor(0.0), **moments}

    @contextmanager
    def trainable(self, model: nn.Module) -> Iterator[None]:
        """Inside the context, linears give scaled outputs, and backward passes give the gradients of `values`."""
        with super().trainable(model), ExitStack() as hooks:
            for name, linears in self._linears.items():
                for linear in linears:
                    hooks.callback(linear.register_forward_hook(self._scaling(self.values[name])).remove)
            yield

    def _scaling(self, scale: Tensor) -> Callable[..., Tensor]:
        def scaled(linear: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            factor, bias = scale.exp(), linear._parameters.get("bias")
            scaled_output = output * factor if bias is None else output * factor + bias * (1 - factor)
            return scaled_output.to(output.dtype)

        return scaled

    def receive_gradient(self, name: str, gradient: Tensor) -> None:
        values = self.values[name]
        gradient = gradient.to(values)
        values.grad = gradient if values.grad is None else values.grad + gradient

    def forget(self, in_one_pass: bool) -> None:
        super().forget(in_one_pass)
        self._optimizer.zero_grad()

    @torch.no_grad()
    def finish(self) -> None:
        for values in self.values.values():
            values.grad = torch.zeros_like(values) if values.grad is None else values.grad
        gradients = {name: values.grad for name, values in self.values.items() if values.grad is not None}
        ranks.add_up(gradients.values())
        for name, gradient in gradients.items():
            if not bool(gradient.div_(self.scale).isfinite().all()):
                raise FloatingPointError(name)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate * group["pace"]
        self._optimizer.step()
        self.write(self.values)

    def snapshot(self) -> dict[str, Tensor]:
        """Returns a copy of the vectors, in the model's dtype, and of the logarithms of scales, on the CPU."""
        copies = {name: vector.detach().to("cpu", copy=True) for name, vector in self._parameters.items()}
        return {**copies, **{name: self.values[name].detach().to("cpu", copy=True) for name in self._linears}}

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Writes vectors into the model, rounded to its dtype, and sets scales."""
        for name, vector in self._parameters.items():
            vector.copy_(values[name] + 0.0)  # -0.0 becomes 0.0
        for name in self._linears:
            self.values[name].copy_(values[name])

    def check(self) -> None:
        """Checks nothing: only whole vectors are written."""

    def state(self) -> dict[str, Tensor]:
        state = {f"value.{name}": values for name, values in self.values.items()}
        for name, values in self.values.items():
            state |= {f"{key}.{name}": self._optimizer.state[values][key] for key in MOMENTS}
        return state

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], steps: int) -> None:
        for name, values in self.values.items():
            values.copy_(state[f"value.{name}"])
            moments = {key: state[f"{key}.{name}"].to(values) for key in MOMENTS}
            self._optimizer.state[values] = {"step": torch.tensor(float(steps)), **moments}
        self.write(self.values)

    @torch.no_grad()
    def fold(self, store: Store) -> dict[str, Tensor]:
        """Multiplies the rows of the weights by their scales, which are 1 afterwards, and returns the weights before.

        A weight that would be rounded to 0 keeps its value.
        """
        unscaled_weights = {}
        for name, linears in self._linears.items():
            weight = weight_in_out(linears[0])
            factor = self.values[name].exp().to(weight.device)
            unscaled_weights[name] = store.moved(weight.to("cpu", copy=True))
            scaled = (weight * factor).to(weight.dtype)
            weight.copy_(torch.where(scaled == 0, weight, scaled))
            self.values[name].zero_()
        return unscaled_weights

    @torch.no_grad()
    def unfold(self, unscaled_weights: Mapping[str, Tensor]) -> None:
        for name, linears in self._linears.items():
            weight_in_out(linears[0]).copy_(unscaled_weights[name])

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype


def _pace(values: Tensor, weight: Tensor | None) -> float:
    """Returns what the learning rate is relative to: the size of values, or if all are 0, of the weight beside them."""
    tensors = (tensor.detach().to(values.dtype) for tensor in (values, weight) if tensor is not None)
    return next(filter(None, (float(tensor.square().mean().sqrt()) for tensor in tensors)), 1.0)


def _linears(model: PreTrainedModel, plan: Plan) -> dict[str, list[nn.Module]]:
    """Returns the name of scales -> all modules that hold their weight, if these are linears of the model's body."""
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    body_modules = {module for part in body_of(model) for module in part.modules()}
    linears_by_scale = {}
    for name, weight in weights_of(model, [name for _, name in plan.linears()]).items():
        linears = holders[id(weight)]
        if body_modules.issuperset(linears) and all(isinstance(linear, LINEAR_MODULES) for linear in linears):
            linears_by_scale[f"{name}.scale"] = linears
    return linears_by_scale

"""The weights that pruning kept, changed in place by Adam or Adafactor.

Only kept weights are trained, so no step can change what was pruned. A weight is changed as soon as a backward pass has
its gradient, if that is all of the step's: then the gradients of a single weight are in memory at a time.

Adam has two moments per weight. Adafactor (Shazeer and Stern, arXiv 1804.04235, here without a first moment) has one
number per row and per column.

A step may be far below the spacing of a weight in half precision. So each has a remainder, what rounding has left of
its value, and both are added up in float32 while the weight is changed.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from permtriton.config import OptimizerKind
from permtriton.errors import VerificationError
from permtriton.methods.train.trainer import Trainable
from permtriton.passes.plan import linear_module
from permtriton.running import ranks
from permtriton.running.store import MEMORY, Store

SMALLEST = 1e-18  # mean square of gradients: below it, they count as 0; its square is a normal float32
MOMENTS: dict[OptimizerKind, tuple[str, str]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adafactor": ("row_var", "col_var"),
}


def weights_of(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Parameter]:
    """Returns name -> weight of linears; a weight that several linears share has the name of the first."""
    weights: dict[int, tuple[str, nn.Parameter]] = {}
    for name in names:
        weight = linear_module(model, name).get_parameter("weight")
        weights.setdefault(id(weight), (name, weight))
    return dict(weights.values())


class KeptWeights(Trainable):
    """The nonzero weights of some linears.

    The learning rate is relative to the root mean square of a linear's kept weights: models of different widths, whose
    weights differ in size tenfold, so take one learning rate.

    Args:
        weights: name -> pruned weight, of any layout; changed in place only.
        optimizer: what changes them.
        store: where masks, remainders, moments and copies are.
    """

    changes_at_once = True

    def __init__(
        self, weights: Mapping[str, nn.Parameter], optimizer: OptimizerKind = "adam", store: Store = MEMORY
    ) -> None:
        super().__init__(weights)
        self._masks = {name: store.moved(weight.detach() != 0) for name, weight in weights.items()}
        self._kind, self._store = optimizer, store
        self._optimizers = {name: _Optimizer(optimizer, self._pace(name), store) for name in weights}
        self._gradients: dict[str, Tensor] = {}
        self._changed: set[str] = set()
        self._at_once = False

    def _mask(self, name: str) -> Tensor:
        """Returns which entries are kept, on the device on which the weight is now (`permtriton.running.onload`)."""
        return self._masks[name].to(self._parameters[name].device)

    def _pace(self, name: str) -> float:
        """Returns the root mean square of the kept weights of a linear; 1 where there are none, or all are 0."""
        weight = self._parameters[name].detach()
        kept = weight.masked_select(self._mask(name)).to(torch.promote_types(weight.dtype, torch.float32))
        return (float(kept.square().mean().sqrt()) if kept.numel() else 0.0) or 1.0

    def begin(self, rate: float, scale: float) -> None:
        super().begin(rate, scale)
        self._changed.clear()

    def forget(self, at_once: bool) -> None:
        super().forget(at_once)
        self._gradients.clear()
        self._at_once = at_once

    def take(self, name: str, gradient: Tensor) -> None:
        if name in self._changed:  # by an attempt whose memory ran out later on
            return
        gradient = torch.where(self._mask(name), gradient, 0)
        if self._at_once:
            self._change(name, gradient)
        elif name in self._gradients:
            self._gradients[name] += gradient.to(self._gradients[name].device)
        else:
            self._gradients[name] = self._store.moved(gradient)

    @torch.no_grad()
    def finish(self) -> None:
        for name, weight in self._parameters.items():
            if name not in self._changed:
                gradient = self._gradients.pop(name, None)
                gradient = torch.zeros_like(weight) if gradient is None else gradient
                ranks.add_up([gradient])
                self._change(name, gradient.to(weight.device))

    def _change(self, name: str, gradient: Tensor) -> None:
        if not bool(gradient.isfinite().all()):
            raise FloatingPointError(name)
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / self.scale
        self._changed.add(name)  # before: an attempt that fails in between is not repeated for this weight
        self._optimizers[name].change(self._parameters[name], wide, self.rate)

    @torch.no_grad()
    def snapshot(self) -> dict[str, Tensor]:
        """Returns a copy of the kept weights in the model's dtype, each ``[kept weights]``, never on a GPU."""
        return {
            name: self._store.moved(weight.detach().masked_select(self._mask(name)).cpu())
            for name, weight in self._parameters.items()
        }

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Writes kept weights into the model."""
        for name, weight in self._parameters.items():
            weight.masked_scatter_(self._mask(name), values[name].to(weight))

    def check(self) -> None:
        """Checks that no weight that was pruned holds a value now.

        Raises:
            VerificationError: one does; the message names its linear.
        """
        for name, weight in self._parameters.items():
            if written := int((weight.detach().masked_fill(self._mask(name), 0) != 0).sum()):
                raise VerificationError(
                    f"{name}: training wrote {written} weights that were pruned. Nothing was saved; this is a bug of "
                    "permtriton, please report it"
                )

    def state(self) -> dict[str, Tensor]:
        tensors = {f"value.{name}": values for name, values in self.snapshot().items()}
        for name, optimizer in self._optimizers.items():
            tensors |= {f"{key}.{name}": values for key, values in optimizer.state().items()}
        return tensors

    def empty_state(self) -> dict[str, Tensor]:
        tensors = {f"value.{name}": values for name, values in self.snapshot().items()}
        for name, weight in self._parameters.items():
            tensors |= {f"{key}.{name}": values for key, values in _empty_state(weight, self._kind).items()}
        return tensors

    def restore(self, state: Mapping[str, Tensor], steps: int) -> None:
        self.write({name: state[f"value.{name}"] for name in self._parameters})
        for name, weight in self._parameters.items():
            own = {key: state[f"{key}.{name}"] for key in _empty_state(weight, self._kind)}
            self._optimizers[name].restore(own, steps)


class _Optimizer:
    """The optimizer of one weight, which is widened to float32 only while it is changed.

    Args:
        pace: size of the weight, to which Adam's learning rate is relative; Adafactor measures it at every step.
        store: where the remainder and the moments are.
    """

    def __init__(self, kind: OptimizerKind, pace: float, store: Store) -> None:
        self._pace, self._store, self._moments = 1.0 if kind == "adafactor" else pace, store, MOMENTS[kind]
        self._remainder: Tensor | None = None  # bfloat16, of the weight's shape
        self._values = nn.Parameter(torch.empty(0))
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.Adam([self._values], foreach=False)
            if kind == "adam"
            else torch.optim.Adafactor([self._values], eps=(SMALLEST, 0.0), foreach=False)
        )

    @torch.no_grad()
    def change(self, weight: Tensor, gradient: Tensor, rate: float) -> None:
        """Changes a weight in place.

        Args:
            weight: ``[..., rows, columns]``, with zeros that keep their places.
            gradient: of its shape, 0 where it is 0, float32 (float64 for such a weight).
            rate: learning rate, relative to the root mean square of the weight.
        """
        values = self._values
        values.data = weight.detach().to(gradient.dtype, copy=True)
        if self._remainder is not None:
            values.data += self._remainder.to(weight.device)
        values.grad = gradient
        self._move_moments(lambda moment: moment.to(weight.device))
        self._optimizer.param_groups[0]["lr"] = rate * self._pace
        self._optimizer.step()
        self._move_moments(self._store.moved)
        weight.copy_(values)
        weight += 0.0  # turns -0.0, which rounding may give, into 0.0
        if weight.dtype != values.dtype:
            remainder = (values - weight).to(torch.bfloat16)
            if self._remainder is None:
                self._remainder = self._store.moved(remainder)
            self._remainder.copy_(remainder)
        values.data, values.grad = values.new_empty(0), None

    def _move_moments(self, moved: Callable[[Tensor], Tensor]) -> None:
        state = self._optimizer.state[self._values]
        state.update({key: moved(state[key]) for key in self._moments if key in state})

    def state(self) -> dict[str, Tensor]:
        """Returns everything that further changes depend on, as `_empty_state`; there was one at least."""
        moments = {key: self._optimizer.state[self._values][key] for key in self._moments}
        return moments if self._remainder is None else {**moments, "remainder": self._remainder}

    def restore(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Takes up what `state` returned after so many changes."""
        moments = {key: self._store.moved(state[key]) for key in self._moments}
        self._optimizer.state[self._values] = {"step": torch.tensor(float(steps)), **moments}
        if "remainder" in state:
            self._remainder = self._store.moved(state["remainder"])


def _empty_state(weight: Tensor, kind: OptimizerKind) -> dict[str, Tensor]:
    """Returns tensors of the names, dtypes and shapes of an optimizer's state for a weight."""
    wide, (*more, rows, columns) = torch.promote_types(weight.dtype, torch.float32), weight.shape
    shapes = ((*more, rows, 1), (*more, 1, columns)) if kind == "adafactor" else (weight.shape, weight.shape)
    tensors = {key: torch.empty(shape, dtype=wide) for key, shape in zip(MOMENTS[kind], shapes, strict=True)}
    if weight.dtype != wide:
        tensors["remainder"] = torch.empty(weight.shape, dtype=torch.bfloat16)
    return tensors

"""The weights that pruning kept, changed in place by Adam or Adafactor.

Only kept weights are trained, so no step can change a pruned weight. No mask is stored: the kept weights are those that
are not 0, and no step sets one to 0. If one backward pass has the whole gradient of a step, a weight is changed as soon
as its gradient is computed, so that only one gradient is in memory at a time.

Adam has two moments per weight. Adafactor (Shazeer and Stern, arXiv 1804.04235, here without a first moment) has one
number per row and per column.

The change in a step may be far smaller than the spacing of half-precision numbers. So each weight has a remainder (its
value before rounding minus the rounded value), and the two are added in float32 when the weight is changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from permtriton.config import OptimizerKind
from permtriton.model.checks import all_finite
from permtriton.passes.plan import linear_module
from permtriton.running.backward import frozen
from permtriton.util import ranks
from permtriton.util.store import MEMORY, Store

SMALLEST = 1e-18  # keeps Adafactor from dividing by 0 where all gradients are 0; its square is a normal float32


def weights_of(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Parameter]:
    """Returns name -> weight of linears; a weight that several linears share has the name of the first."""
    first_names: dict[nn.Parameter, str] = {}
    for name in names:
        first_names.setdefault(linear_module(model, name).get_parameter("weight"), name)
    return {name: weight for weight, name in first_names.items()}


class KeptWeights:
    """The nonzero weights of some linears, which change inside `trainable`.

    The learning rate is relative to the root mean square of a linear's kept weights: models of different widths, whose
    weights differ in size tenfold, can then use the same learning rate.

    Attributes:
        rate: learning rate of the present step.
        scale: loss scale of the present step, by which its gradients are multiplied as well.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], optimizer: OptimizerKind, store: Store = MEMORY) -> None:
        self._weights, self._store = dict(weights), store
        self._optimizers = {name: _Optimizer(weight, optimizer, store) for name, weight in weights.items()}
        self._gradients: dict[str, Tensor] = {}

    @contextmanager
    def trainable(self, model: nn.Module) -> Iterator[None]:
        """Inside the context, backward passes give `receive_gradient` the gradients, and leave none in the model."""
        with frozen(model), ExitStack() as hooks:
            try:
                for name, weight in self._weights.items():
                    weight.requires_grad_(True)
                    hooks.enter_context(weight.register_post_accumulate_grad_hook(partial(self.receive_gradient, name)))
                yield
            finally:
                for weight in self._weights.values():
                    weight.grad = None
                    weight.requires_grad_(False)

    def begin(self, rate: float, scale: float, *, changes: bool = True) -> None:
        """Begins a step, or, without ``changes``, a backward pass whose gradients are dropped."""
        self.rate, self.scale = rate, scale
        self._changed = set() if changes else set(self._weights)

    def forget(self, in_one_pass: bool) -> None:
        """Forgets the gradients of a backward pass that failed, or of a step that is over.

        ``in_one_pass``: whether the next backward pass has all gradients of its step, which then are not collected.
        """
        for weight in self._weights.values():
            weight.grad = None
        self._gradients.clear()
        self._in_one_pass = in_one_pass

    @torch.no_grad()
    def receive_gradient(self, name: str, weight: Tensor) -> None:
        """Takes the gradient of a weight out of the model, during the backward pass that computes it."""
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        if name in self._changed:  # such as in an attempt that ran out of memory afterwards
            return
        mask = _mask(weight).to(gradient.dtype)  # products with booleans are slower
        gradient = (gradient * mask).to(_wide(gradient.dtype))
        if self._in_one_pass:
            self._change(name, gradient)
        elif name in self._gradients:
            self._gradients[name] += gradient.to(self._gradients[name].device)
        else:
            self._gradients[name] = self._store.moved(gradient)

    @torch.no_grad()
    def finish(self) -> None:
        """Ends a step: sums collected gradients over the ranks, and changes the weights that are not changed yet."""
        for name, weight in self._weights.items():
            if name not in self._changed:
                gradient = self._gradients.pop(name, None)
                if gradient is None:
                    gradient = self._store.moved(torch.zeros_like(weight, dtype=_wide(weight.dtype)))
                ranks.add_up([gradient])
                self._change(name, gradient.to(weight.device))

    def _change(self, name: str, gradient: Tensor) -> None:
        if not all_finite(gradient):  # infinity or NaN does no harm at pruned weights
            gradient = torch.where(_mask(self._weights[name]), gradient, 0)
            if not all_finite(gradient):
                raise FloatingPointError(f"gradient of {name}")
        self._changed.add(name)  # set first, so that the change is not applied twice if the attempt fails in between
        self._optimizers[name].change(self._weights[name], gradient.div_(self.scale), self.rate)

    @torch.no_grad()
    def snapshot(self) -> dict[str, Tensor]:
        """Returns a copy of the kept weights in the model's dtype, each ``[kept weights]`` in host memory."""
        return {name: weight.masked_select(_mask(weight)).cpu() for name, weight in self._weights.items()}

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.masked_scatter_(_mask(weight), values[name].to(weight))

    def state(self) -> dict[str, Tensor]:
        """Returns everything that further steps depend on."""
        tensors = {f"value.{name}": values for name, values in self.snapshot().items()}
        for name, optimizer in self._optimizers.items():
            tensors |= {f"{key}.{name}": values for key, values in optimizer.state.items()}
        return tensors

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Restores what `state` returned after ``steps`` steps."""
        self.write({name: state[f"value.{name}"] for name in self._weights})
        for name, optimizer in self._optimizers.items():
            optimizer.steps = steps
            for key, values in optimizer.state.items():
                values.copy_(state[f"{key}.{name}"])


class _Optimizer:
    """The optimizer of one weight, which is widened to float32 only while it is changed.

    Attributes:
        state: the moments, and in half precision the remainder, bfloat16 of the weight's shape. Together with
            the weight and the number of `steps`, they determine all further changes.
    """

    def __init__(self, weight: Tensor, kind: OptimizerKind, store: Store) -> None:
        (*batch_dims, rows, columns), wide = weight.shape, _wide(weight.dtype)
        self._fused, self._values = kind == "adam", nn.Parameter(torch.empty(0, dtype=wide))
        if self._fused:
            self._optimizer: torch.optim.Optimizer = torch.optim.Adam([self._values], fused=True)
            self._pace, shapes = _size(weight), dict.fromkeys(("exp_avg", "exp_avg_sq"), tuple(weight.shape))
        else:  # Adafactor measures the size of the weight at every step
            self._optimizer = torch.optim.Adafactor([self._values], eps=(SMALLEST, 0.0), foreach=False)
            self._pace, shapes = 1.0, {"row_var": (*batch_dims, rows, 1), "col_var": (*batch_dims, 1, columns)}
        self._moments, self._kept = tuple(shapes), _count(weight)
        state = {key: torch.zeros(shape, dtype=wide, device=weight.device) for key, shape in shapes.items()}
        if weight.dtype != wide:
            state["remainder"] = torch.zeros(weight.shape, dtype=torch.bfloat16, device=weight.device)
        self.state, self.steps = {key: store.moved(values) for key, values in state.items()}, 0

    @torch.no_grad()
    def change(self, weight: Tensor, gradient: Tensor, rate: float) -> None:
        """Changes a weight ``[..., rows, columns]`` in place; zeros keep their places.

        Args:
            gradient: 0 where the weight is 0, float32, or float64 for a float64 weight.
            rate: learning rate, relative to the root mean square of the weight.
        """
        values, remainder = self._values, self.state.get("remainder")
        # Fused Adam assumes that values, gradient and moments have the same memory layout.
        values.data = weight.detach().to(gradient.dtype, memory_format=torch.contiguous_format, copy=True)
        if remainder is not None:
            values.data += remainder.to(weight.device)
        values.grad = gradient.contiguous()
        moments = {key: self.state[key].to(weight.device) for key in self._moments}
        steps = torch.tensor(float(self.steps), device=weight.device if self._fused else "cpu")
        self._optimizer.state[values] = {"step": steps, **moments}
        self._optimizer.param_groups[0]["lr"] = rate * self._pace
        self._optimizer.step()
        self.steps += 1
        for key, moment in moments.items():
            self.state[key].copy_(moment)  # no effect where the moment is the stored tensor itself
        changed = values.detach().to(weight.dtype)
        if _count(changed) < self._kept:  # rounded to 0.0 or -0.0
            smallest = 2.0**-24 if weight.dtype == torch.float16 else torch.finfo(weight.dtype).tiny
            smallest_values = values.new_tensor(smallest).copysign(values).to(weight.dtype)
            changed = torch.where(_mask(weight) & (changed == 0), smallest_values, changed)
        weight.copy_(changed)
        if remainder is not None:
            remainder.copy_(values - weight)
        values.data, values.grad = values.new_empty(0), None
        self._optimizer.state.clear()


def _mask(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.bool)  # a fifth of the time of weight != 0


def _count(weight: Tensor) -> int:
    return int(_mask(weight).count_nonzero())  # a ninth of the time of weight.count_nonzero()


def _size(weight: Tensor) -> float:
    """Returns the root mean square of the kept weights of a linear; 1 where there are none."""
    kept_weights = weight.detach().masked_select(_mask(weight)).to(_wide(weight.dtype))
    return (float(kept_weights.square().mean().sqrt()) if kept_weights.numel() else 0.0) or 1.0


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which weights of a dtype are changed: float64 for float64 weights, else float32."""
    return torch.promote_types(dtype, torch.float32)

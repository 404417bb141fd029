"""Sends each token to the same experts as in an earlier call, so that two mixtures of experts can be compared."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from permtriton.errors import VerificationError
from permtriton.model.experts import UnstackedExperts, stacks
from permtriton.util.hooks import hooked


class Routing:
    """Sends each token to the same experts as in an earlier call of the model.

    The choice of experts is a step function: in float16 and bfloat16, adding up in another order is enough to swap
    experts with similar scores, and the token's output then jumps. To compare two models that compute the same
    function, call the first inside `recorded` and the second inside `replayed`. Only the choice is replayed, not the
    weights of the chosen experts.

    Args:
        model: model whose experts may be stacked in one call and unstacked in the other.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._chosen: list[Tensor] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        self._chosen = []
        with self._choices(lambda _module, inputs: self._chosen.append(inputs[1].clone())):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Replays the recorded choices inside the ``with`` block; the model must be called with the same inputs."""
        remaining = list(self._chosen)

        def replay(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            is_unstacked = isinstance(module, UnstackedExperts)
            experts = len(module) if is_unstacked else module.get_parameter(stacks(module)[0]).shape[0]
            before, now = remaining.pop(0).to(inputs[1].device), inputs[1]
            changed = float((now.unsqueeze(-1) != before.unsqueeze(-2)).all(-1).float().mean())
            at_random = 1 - now.shape[-1] / experts  # share of the choices that random routing changes
            if changed > 0.5 * at_random:
                raise VerificationError(
                    f"{changed:.0%} of the choices of experts in a {type(module).__name__} changed, expected none: the "
                    "router no longer computes the same scores"
                )
            return (inputs[0], before, *inputs[2:])

        with self._choices(replay):
            yield

    def _choices(self, hook: Callable[..., Any]) -> AbstractContextManager[None]:
        """Calls ``hook`` before each call of experts that take hidden states, then the numbers of chosen experts."""

        def before(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
            chooses = len(inputs) > 1 and isinstance(inputs[1], Tensor) and not inputs[1].is_floating_point()
            return hook(module, inputs) if chooses else None

        modules = [module for module in self._model.modules() if isinstance(module, UnstackedExperts) or stacks(module)]
        return hooked(module.register_forward_pre_hook(before) for module in modules)

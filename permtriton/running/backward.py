"""Helpers of backward passes through a model: they freeze weights, recompute activations and scale the loss."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from permtriton.errors import ModelError
from permtriton.model.forward import replaced_forwards


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside the context, no parameter of ``model`` requires a gradient unless the caller makes it trainable."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def checkpointed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the context, backward passes recompute the activations of layers, except in calls with a cache, as in XLM.

    transformers' own gradient checkpointing works in training mode only, which would turn on dropout.
    """

    def replacement(layer: nn.Module) -> Callable[..., Any]:
        compute = layer.forward

        def forward(*positional: Any, **named: Any) -> Any:
            if any(isinstance(argument, Cache) for argument in (*positional, *named.values())):
                return compute(*positional, **named)  # a second run would add the same tokens to the cache again
            return checkpoint(compute, *positional, use_reentrant=False, **named)

        return forward

    with replaced_forwards(layers, replacement):
        yield


def with_gradients(loss: Tensor, model: nn.Module) -> Tensor:
    """Returns ``loss``; raises a `ModelError` if autograd leads from the loss to no output of the model's linears."""
    if not loss.requires_grad:
        raise ModelError(
            f"the loss of {type(model).__name__} has no gradients by the outputs of its linears, because its own "
            "code computes the gradients of its layers: choose a recipe without gradients, such as `recipe=fast`"
        )
    return loss


def loss_scale(positions: int) -> float:
    """Returns the loss scale of a mean over ``positions``: a power of 2 near this number, against float16 underflow."""
    return 2.0 ** round(math.log2(positions))

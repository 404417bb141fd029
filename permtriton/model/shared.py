"""Linears of layers that share their weights, made one module."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from permtriton.model.modules import LINEAR_MODULES


@contextmanager
def shared_linears(model: nn.Module) -> Iterator[None]:
    """Makes linears that hold the same parameters one module inside the ``with`` block.

    transformers ties the parameters of layers that share them, but leaves each layer separate modules. As one module
    they are calibrated, masked and trained wherever the model uses them. Linears with hooks stay separate modules.
    """
    first: dict[tuple[object, ...], nn.Module] = {}
    exchanged: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for key, linear in parent._modules.items():
            if linear is None or type(linear) not in LINEAR_MODULES:
                continue
            if linear._forward_hooks or linear._forward_pre_hooks:
                continue
            same = first.setdefault((type(linear), *map(id, linear._parameters.values())), linear)
            if same is not linear:
                exchanged.append((parent, key, linear))
                parent._modules[key] = same
    try:
        yield
    finally:
        for parent, key, linear in exchanged:
            parent._modules[key] = linear

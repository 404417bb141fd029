"""Outputs of a layer's modules, kept for the layer's later runs on the same sequences.

The weights of a layer change one group of sites at a time. The layer runs once per group, and once more for the inputs
of the next layer. A module's output is final when its weights and those of all modules before it are final.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from permtriton.model.experts import stacked_name
from permtriton.model.forward import replaced_forwards
from permtriton.passes.plan import Site, linear_module


class KeptOutputs:
    """The kept outputs of one layer's pruned linears, and of the modules that contain pruned linears.

    An output is kept if all pruned linears that have run so far in the layer's present run have their final weights.
    Once the output of a module is kept, the outputs of modules inside it are dropped. An output that the model has
    changed in place is computed again. Without ``keep``, no output is kept.

    Outputs of experts are never kept, because runs that measure experts may route other tokens to them. Nor are those
    of modules that contain an expert, or that contain a module whose input is recorded as the residual stream.
    """

    def __init__(self, model: nn.Module, name: str, sites: Sequence[Site], keep: bool) -> None:
        self._model, self._keep = model, keep
        self._changing = {linear_module(model, linear) for site in sites for linear in site.linears}
        self._modules = [model.get_submodule(inner) for inner in _keepable(model, name, sites)] if keep else []
        self._outputs: dict[tuple[nn.Module, tuple[int, ...]], tuple[Any, list[int]]] = {}
        self._final = True  # whether all pruned linears that have run in the present run have final weights

    def finish(self, sites: Iterable[Site]) -> None:
        self._changing -= {linear_module(self._model, linear) for site in sites for linear in site.linears}

    @contextmanager
    def running(self, rows: Tensor, *, last: bool = False) -> Iterator[None]:
        """Inside the context, modules return the outputs that are kept for the sequences numbered ``rows``.

        In the ``last`` run, no further output is kept.
        """
        self._final = True
        with replaced_forwards(self._modules, partial(self._forward, tuple(rows.tolist()), last)):
            yield

    def clear(self) -> None:
        self._outputs.clear()

    def _forward(self, rows: tuple[int, ...], last: bool, module: nn.Module) -> Callable[..., Any]:
        compute = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output, versions = self._outputs.get((module, rows), (None, []))
            if versions and versions == _versions(output):
                return output
            output = compute(*args, **kwargs)
            self._final &= module not in self._changing
            if self._keep and self._final and not last:
                for inner_module in module.modules():
                    self._outputs.pop((inner_module, rows), None)
                self._outputs[module, rows] = output, _versions(output)
            return output

        return forward


def _versions(output: Any) -> list[int]:
    """Returns how often each tensor of an output has been changed in place."""
    return [leaf._version for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _keepable(model: nn.Module, layer: str, sites: Sequence[Site]) -> dict[str, None]:
    """Returns the names of the modules of a layer whose outputs may be kept: an ordered set."""
    linears = [linear for site in sites for linear in site.linears]
    experts = {name for site in sites for name in site.linears if site.is_routed or stacked_name(model, name)}
    watched_modules = experts | {site.residual.reader for site in sites if site.residual}
    holders = {holder for name in watched_modules for holder in _modules_around(name)}
    candidates = [module for name in linears if name not in experts for module in (name, *_modules_around(name))]
    return dict.fromkeys(module for module in candidates if module.startswith(f"{layer}.") and module not in holders)


def _modules_around(name: str) -> list[str]:
    """Returns the names of the modules that contain the module ``name``, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]

"""The steps of recipes, and what a step of one's own is made of; each name is imported when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from permtriton.kernels.nm_mask import top_n_mask
    from permtriton.methods.order.heuristic import Heuristic
    from permtriton.methods.order.learned import Learned
    from permtriton.methods.order.searched import Searched
    from permtriton.methods.prune.mask import Mask
    from permtriton.methods.prune.refit import Refit
    from permtriton.methods.prune.sparsegpt import SparseGPT
    from permtriton.methods.run import Run
    from permtriton.methods.step import Outcome, Stage, Step
    from permtriton.methods.train.distill import Distill
    from permtriton.methods.train.round import Round
    from permtriton.methods.train.tune import Tune
    from permtriton.passes.plan import linear_module, weight_in_out
    from permtriton.util.option import documented, option

_MODULES = {
    "Outcome": "methods.step",
    "Run": "methods.run",
    "Stage": "methods.step",
    "Step": "methods.step",
    "documented": "util.option",
    "linear_module": "passes.plan",
    "option": "util.option",
    "top_n_mask": "kernels.nm_mask",
    "weight_in_out": "passes.plan",
}
__all__ = [
    "Distill",
    "Heuristic",
    "Learned",
    "Mask",
    "Outcome",
    "Refit",
    "Round",
    "Run",
    "Searched",
    "SparseGPT",
    "Stage",
    "Step",
    "Tune",
    "documented",
    "linear_module",
    "option",
    "top_n_mask",
    "weight_in_out",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"permtriton.{_MODULES[name]}"), name)
    steps = {kind.__name__: kind for kind in import_module("permtriton.methods.steps").OURS}
    if name not in steps:
        raise AttributeError(f"module 'permtriton.methods' has no attribute {name!r}")
    return steps[name]


def __dir__() -> list[str]:
    return sorted(__all__)

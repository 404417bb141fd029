"""Prunes language models to N:M sparsity: the best order of channels, least-squares weights, packed checkpoints.

    import permtriton
    compiled = permtriton.compile("Qwen/Qwen3-0.6B", sparsity="2:4", data=texts, samples=128)
    print(compiled.evaluate("wikitext2"))
    compiled.save_pretrained("qwen-2of4", format="packed")

Each name is imported when it is first used, so ``import permtriton`` alone imports almost nothing. The import registers
the checkpoint format with transformers, whose ``from_pretrained`` then loads packed and permuted checkpoints, too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from permtriton.checkpoint.registration import register_with_transformers

if TYPE_CHECKING:
    from permtriton.api import compare as compare
    from permtriton.api import compile as compile
    from permtriton.api import dry_run as dry_run
    from permtriton.api import evaluate as evaluate
    from permtriton.api import export as export
    from permtriton.api import inspect as inspect
    from permtriton.checkpoint.masks import Masks as Masks
    from permtriton.checkpoint.masks import read_masks as read_masks
    from permtriton.driver.job import DryRun as DryRun
    from permtriton.driver.result import CompiledModel as CompiledModel
    from permtriton.errors import PermTritonError as PermTritonError
    from permtriton.evaluation.evaluate import Evaluated as Evaluated
    from permtriton.evaluation.report import report as report
    from permtriton.finetune.keep_pattern import KeepPattern as KeepPattern
    from permtriton.finetune.keep_pattern import KeptPattern as KeptPattern
    from permtriton.finetune.keep_pattern import keep_pattern as keep_pattern
    from permtriton.methods.recipe_config import CompileConfig as CompileConfig
    from permtriton.recipe import config_from as config_from
    from permtriton.recipe import recipes as recipes
    from permtriton.util.progress import Event as Event
    from permtriton.util.sparsity import NMPattern as NMPattern

    __version__: str

_NAMES = {
    "api": ("compare", "compile", "dry_run", "evaluate", "export", "inspect"),
    "checkpoint.masks": ("Masks", "read_masks"),
    "driver.job": ("DryRun",),
    "driver.result": ("CompiledModel",),
    "errors": ("PermTritonError",),
    "evaluation.evaluate": ("Evaluated",),
    "evaluation.report": ("report",),
    "finetune.keep_pattern": ("KeepPattern", "KeptPattern", "keep_pattern"),
    "methods.recipe_config": ("CompileConfig",),
    "recipe": ("config_from", "recipes"),
    "util.progress": ("Event",),
    "util.sparsity": ("NMPattern",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

register_with_transformers()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("permtriton")
    if name not in _MODULES:
        raise AttributeError(f"module 'permtriton' has no attribute {name!r}")
    return getattr(import_module(f"permtriton.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_MODULES, "__version__"])


if not TYPE_CHECKING:  # type checkers read the names above
    __all__ = __dir__()

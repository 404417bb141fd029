"""Channel permutations and weight updates for N:M-sparse language models, as a small compiler.

    import permtriton
    compiled = permtriton.compile(model, tokenizer, permtriton.config_from(recipe="fast"))
    compiled.save("out")

Each name is imported when it is first used, so ``import permtriton`` alone imports almost nothing. It registers the
checkpoint format with transformers, whose ``from_pretrained`` then loads packed and permuted checkpoints, too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from permtriton.checkpoint.registration import register_with_transformers

if TYPE_CHECKING:
    from permtriton.checkpoint.save import CompiledModel
    from permtriton.compiler import compile
    from permtriton.config import CompileConfig
    from permtriton.errors import PermTritonError
    from permtriton.planning import find_plan
    from permtriton.recipes import config_from
    from permtriton.sparsity import NMPattern

__all__ = ["CompileConfig", "CompiledModel", "NMPattern", "PermTritonError", "compile", "config_from", "find_plan"]

_MODULES = {
    "CompileConfig": "config",
    "CompiledModel": "checkpoint.save",
    "NMPattern": "sparsity",
    "PermTritonError": "errors",
    "compile": "compiler",
    "config_from": "recipes",
    "find_plan": "planning",
}


register_with_transformers()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'permtriton' has no attribute {name!r}")
    return getattr(import_module(f"permtriton.{_MODULES[name]}"), name)

"""Learned channel permutations for N:M-sparse language models, as a small compiler.

    import permtriton
    compiled = permtriton.compile(model, tokenizer, permtriton.CompileConfig())
    compiled.save("out")

Names are imported when first used, so that ``import permtriton`` alone costs nothing. After it, ``from_pretrained`` of
transformers loads packed and permuted checkpoints, too.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from permtriton.registration import register_with_transformers

if TYPE_CHECKING:
    from permtriton.compiler import CompiledModel, compile
    from permtriton.config import CompileConfig
    from permtriton.errors import PermTritonError
    from permtriton.planning import find_plan
    from permtriton.sparsity import NMPattern

__all__ = ["CompileConfig", "CompiledModel", "NMPattern", "PermTritonError", "compile", "find_plan"]

_HOMES = {
    "CompileConfig": "config",
    "CompiledModel": "compiler",
    "NMPattern": "sparsity",
    "PermTritonError": "errors",
    "compile": "compiler",
    "find_plan": "planning",
}


# In a checkout that shadows an installed copy, kernels/, passes/ and cli/ stand beside this folder, not in it.
if not (Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(Path(__file__).parent.parent))


register_with_transformers()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'permtriton' has no attribute {name!r}")
    return getattr(import_module(f"permtriton.{_HOMES[name]}"), name)

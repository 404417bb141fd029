"""Learned channel permutations for N:M-sparse language models, as a small compiler.

import permtriton
compiled = permtriton.compile(model, tokenizer, permtriton.CompileConfig())
compiled.save("out")
"""

from permtriton.compiler import CompiledModel, compile, find_plan
from permtriton.config import CompileConfig
from permtriton.errors import PermTritonError
from permtriton.sparsity import NMPattern

__all__ = ["CompileConfig", "CompiledModel", "NMPattern", "PermTritonError", "compile", "find_plan"]

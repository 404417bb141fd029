"""The list of kernels, and what each is checked and tuned on.

A module ``<op>`` beside this file has the function

    cases(shapes, tokens, dtype, device)   the `Case`s for linears of some shapes (out, in) and numbers of tokens
"""

from importlib import import_module
from pkgutil import iter_modules

KERNELS = tuple(import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))

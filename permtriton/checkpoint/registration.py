"""Registers our quantizer with transformers without importing transformers, which takes seconds.

The registered classes are stand-ins, which import the real classes when they are used. While a module of transformers
is executed, the import system holds a lock. Nothing of permtriton may be imported then, because another thread may be
importing permtriton and waiting for that lock.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

METHOD = "permtriton"  # ``quant_method`` in config.json
QUANTIZERS = "transformers.quantizers.auto"
MAPPINGS = ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING")


class _Finder(MetaPathFinder):
    """Finds the module `QUANTIZERS` by means of the other finders, and registers permtriton once it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != QUANTIZERS:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)
            # A new list, because another thread may be iterating over this one and would skip a finder.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_with_transformers() -> None:
    """Registers permtriton now if transformers' quantizers are imported already, else as soon as they are."""
    if QUANTIZERS in sys.modules:
        with suppress(ImportError):  # an error of transformers, which its importer gets, too
            _register(import_module(QUANTIZERS))  # waits for a thread that is executing it
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(module: ModuleType) -> None:
    """Adds permtriton to the mappings of `QUANTIZERS`, unless they have it. Imports nothing."""
    for name, stand_in in zip(MAPPINGS, _stand_ins(module), strict=True):
        getattr(module, name).setdefault(METHOD, stand_in)


def _stand_ins(module: Any) -> tuple[type, type]:
    """Returns stand-ins for the quantizer and its config; a call of one makes an object of permtriton's class."""

    class QuantizerStandIn(module.HfQuantizer):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return _real("quantizer").PermTritonQuantizer(*args, **kwargs)

    class ConfigStandIn(module.QuantizationConfigMixin):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return _real("quantization_config").PermTritonQuantizationConfig(*args, **kwargs)

        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            return _real("quantization_config").PermTritonQuantizationConfig.from_dict(*args, **kwargs)

    return QuantizerStandIn, ConfigStandIn


def _real(module: str) -> ModuleType:
    return import_module(f"permtriton.checkpoint.{module}")

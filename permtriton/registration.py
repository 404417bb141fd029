"""Makes transformers know permtriton's checkpoints, without importing it: it costs seconds, and many never load one.

What is registered are stand-ins, which import the classes that they stand for when they are used. While a module of
transformers is executed, under the lock that the import system holds for it, nothing of permtriton is imported: another
thread may be importing it, and wait for that very module.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

METHOD = "permtriton"  # as `permtriton.schema` has it, which imports transformers
QUANTIZERS = "transformers.quantizers.auto"
MAPPINGS = ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING")


class _Finder(MetaPathFinder):
    """Finds exactly `QUANTIZERS`, as the finders after it do, and registers permtriton once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != QUANTIZERS:
            _register()  # where another thread had looked it up, but not yet begun to execute it, when this one came
            return None
        finders = list(sys.meta_path)
        others = finders[finders.index(self) + 1 :] if self in finders else finders
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_with_transformers() -> None:
    """Registers now where transformers' quantizers are imported already, else as soon as they are.

    Threads may import permtriton and transformers at once, in any order. What is registered already stays as it is.
    """
    if not _registered() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if QUANTIZERS in sys.modules:
        with suppress(ImportError):  # theirs, and told to whom imports it
            import_module(QUANTIZERS)  # returns when the thread that executes it is done
        _register()


def _registered() -> bool:
    module = sys.modules.get(QUANTIZERS)
    return all(METHOD in getattr(module, name, ()) for name in MAPPINGS)


def _register() -> None:
    """Registers, and takes the finder away, where `QUANTIZERS` has its mappings. Imports nothing."""
    module = sys.modules.get(QUANTIZERS)
    if not all(hasattr(module, name) for name in MAPPINGS):
        return
    for name, stand_in in zip(MAPPINGS, _stand_ins(module), strict=True):
        getattr(module, name).setdefault(METHOD, stand_in)  # in one step, so that threads need no lock
    # A new list: the import system of another thread may be half through this one, and would pass over a finder.
    sys.meta_path = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


def _stand_ins(module: Any) -> tuple[type, type]:
    """Classes that, called, make an object of the class of permtriton that they are named after."""

    class PermTritonQuantizer(module.HfQuantizer):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return import_module("permtriton.quantizer").PermTritonQuantizer(*args, **kwargs)

    class PermTritonQuantizationConfig(module.QuantizationConfigMixin):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return import_module("permtriton.schema").PermTritonQuantizationConfig(*args, **kwargs)

        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            return import_module("permtriton.schema").PermTritonQuantizationConfig.from_dict(*args, **kwargs)

    return PermTritonQuantizer, PermTritonQuantizationConfig

"""Makes transformers know permtriton's checkpoints, without importing it: it costs seconds, and many never load one."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

QUANTIZERS = "transformers.quantizers.auto"


class _Finder(MetaPathFinder):
    """Finds exactly `QUANTIZERS`, as the other finders do, and registers permtriton once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != QUANTIZERS:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
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

    The import system runs a module once, under its own lock, so that threads need no lock here; what is registered
    twice stays as it is.
    """
    if QUANTIZERS in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    import_module("permtriton.quantizer").register()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]

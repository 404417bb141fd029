"""How long work tells that it goes on. The library only reports; the CLI draws."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Advance(Protocol):
    """Reports that ``steps`` more of a stage are done, with a few words on how it goes."""

    def __call__(self, steps: int = 1, note: str = "") -> None: ...


class Progress(Protocol):
    """Where stages are reported."""

    def stage(self, name: str, total: int) -> AbstractContextManager[Advance]:
        """Opens a stage of ``total`` steps."""
        ...

    def say(self, text: str) -> None:
        """Tells something between stages."""
        ...


class NoProgress:
    """Reports nothing."""

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        yield lambda steps=1, note="": None

    def say(self, text: str) -> None:
        pass

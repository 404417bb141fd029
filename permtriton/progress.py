"""Progress of long work. The library only reports it; the CLI draws the bars."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Advance(Protocol):
    """Reports that ``steps`` more steps of a stage are done, with a short note on the present state."""

    def __call__(self, steps: int = 1, note: str = "") -> None: ...


class Progress(Protocol):
    """Progress reporter."""

    def stage(self, name: str, total: int) -> AbstractContextManager[Advance]:
        """Opens a stage of ``total`` steps; the context gives the function that reports each step."""
        ...

    def say(self, text: str) -> None:
        """Reports a line of text between stages."""
        ...


class NoProgress:
    """Progress reporter that ignores everything."""

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        yield lambda steps=1, note="": None

    def say(self, text: str) -> None:
        pass

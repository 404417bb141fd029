"""Progress of long work. The library only reports it; `permtriton.util.bars` draws it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock


class Advance(Protocol):
    """Reports that ``steps`` more steps of a stage are done, with a short note on the present state."""

    def __call__(self, steps: int = 1, note: str = "") -> None: ...


class Progress(Protocol):
    def stage(self, name: str, total: int) -> AbstractContextManager[Advance]:
        """Opens a stage of ``total`` steps; the context yields the function that reports steps.

        A stage of 0 steps has no count, and may contain other stages.
        """
        ...

    def say(self, text: str) -> None:
        """Reports a line of text between stages."""
        ...


class NoProgress:
    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        yield lambda steps=1, note="": None

    def say(self, text: str) -> None:
        pass


@contextmanager
def without_other_bars() -> Iterator[None]:
    """Hides the tqdm bars of other libraries: no option of the libraries turns off all of them."""
    from tqdm import tqdm

    start = tqdm.__init__

    def hidden(bar: tqdm, *arguments: Any, **named: Any) -> None:
        start(bar, *arguments, **{**named, "disable": True})

    with mock.patch.object(tqdm, "__init__", hidden):
        yield


@dataclass(frozen=True)
class Event:
    """The argument of the function that a user passes as ``progress=``.

    Attributes:
        stage: name of the stage, such as ``calibrate``; empty for a line of text between stages.
        done: steps of the stage that are done; 0 when it opens.
        total: steps of the stage; 0 where they are not counted, as in a stage that contains others.
        text: a short note on the present state, or the line of text.
    """

    stage: str = ""
    done: int = 0
    total: int = 0
    text: str = ""


@dataclass(frozen=True)
class EventProgress:
    """Progress reporter that passes each event to a function, whose errors are not caught."""

    handle: Callable[[Event], object]

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        done = 0

        def advance(steps: int = 1, note: str = "") -> None:
            nonlocal done
            done += steps
            self.handle(Event(name, done, total, note))

        advance(0)
        yield advance

    def say(self, text: str) -> None:
        self.handle(Event(text=text))

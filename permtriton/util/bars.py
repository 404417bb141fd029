"""Draws progress on standard error: one bar per stage, or lines if standard error is not a terminal."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from permtriton.errors import ConfigError, shown
from permtriton.util.progress import Advance, Event, EventProgress, NoProgress, Progress

SELDOM = 10.0  # least number of seconds between two lines of a stage

Shown = bool | Callable[[Event], object] | Progress | None  # what ``progress=`` takes


class PlainConsole(Console):
    """Prints text without markup; control characters but line breaks are escaped, such as ``\\x1b`` in a file name."""

    def on_broken_pipe(self) -> None:
        """Discards further output: a reader that stops after some lines, such as ``head``, is no error."""
        discard(self.file)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def printable(text: str) -> str:
    """Returns text with all control characters but line breaks escaped."""
    return "\n".join("".join(map(visible, line)) for line in text.split("\n"))


def visible(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def discard(stream: IO[str]) -> None:
    """Discards the buffered and all later output of a stream, so that no later write fails."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


class _Err(PlainConsole):
    """Prints on standard error; if that fails, as on a full disk, the work continues without messages."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            discard(sys.stderr)


err = _Err(stderr=True, markup=False, emoji=False)


class BarProgress:
    """Progress reporter that draws one bar per stage on standard error, or prints lines if that is not a terminal."""

    def stage(self, name: str, total: int) -> AbstractContextManager[Advance]:
        return self._bar(name, total) if total and err.is_terminal else self._lines(name, total)

    @contextmanager
    def _bar(self, name: str, total: int) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        with RichProgress(*columns, console=err) as bars:
            task = bars.add_task(name, total=total, note="")

            def advance(steps: int = 1, note: str = "") -> None:
                bars.advance(task, steps)
                if note:
                    bars.update(task, note=note)

            yield advance

    @contextmanager
    def _lines(self, name: str, total: int) -> Iterator[Advance]:
        """Prints a line at the end, and at a new tenth if at least `SELDOM` seconds have passed since the last line."""
        started = told = time.perf_counter()
        done, last_note = 0, ""

        def advance(steps: int = 1, note: str = "") -> None:
            nonlocal told, done, last_note
            before, done, last_note, now = done, done + steps, note or last_note, time.perf_counter()
            is_new_tenth = 10 * done // max(total, 1) > 10 * before // max(total, 1)
            if before < total <= done or (is_new_tenth and now - told >= SELDOM):
                told = now
                count = f" {done}/{total}" if total else ""
                self.say(f"{name}{count}, {now - started:.0f} s {last_note}".rstrip())

        yield advance

    def say(self, text: str) -> None:
        err.print(text, highlight=False, soft_wrap=True)


def reporter(progress: Shown) -> Progress:
    """Returns the progress reporter for the argument ``progress`` of a public function.

    Args:
        progress: True for the bars of the command line, a function that is called with each `Event`, or a reporter;
            False and None report nothing.
    """
    if isinstance(progress, bool) or progress is None:
        return BarProgress() if progress else NoProgress()
    if hasattr(progress, "stage") and hasattr(progress, "say"):
        return progress
    if callable(progress):
        return EventProgress(progress)
    raise ConfigError(f"progress is {shown(progress)}: expected True, False, or a function that takes an Event")

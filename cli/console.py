"""What the commands share on a terminal: progress bars, tables, errors."""

import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from permtriton.errors import PermTritonError
from permtriton.progress import Advance
from permtriton.report import to_json

out = Console()
err = Console(stderr=True)


class BarProgress:
    """A bar with elapsed and remaining time for each stage, on standard error; lines where that is no terminal."""

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        if not err.is_terminal:
            yield self._lines(name, total)
            return
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

    def _lines(self, name: str, total: int) -> Advance:
        started, done = time.perf_counter(), 0

        def advance(steps: int = 1, note: str = "") -> None:
            nonlocal done
            tenths = 10 * done // max(total, 1)
            done += steps
            if 10 * done // max(total, 1) > tenths:
                self.say(f"{name} {done}/{total}, {time.perf_counter() - started:.0f} s {note}".rstrip())

        return advance

    def say(self, text: str) -> None:
        err.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turns errors that the user can mend into one line and exit code 2; an interruption into exit code 130."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|transformers")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        yield
    except PermTritonError as error:
        fail(str(error), 2)
    except torch.OutOfMemoryError as error:
        fail(f"out of GPU memory: lower --micro-batch-size or --sequence-length ({str(error).splitlines()[0]})", 2)
    except KeyboardInterrupt:
        fail(
            "interrupted: no half-written output is left; a compilation continues learning when it is started again",
            130,
        )


def table(title: str, *columns: str, show_header: bool = True) -> Table:
    """Returns an empty table whose long names wrap instead of being cut."""
    made = Table(title=title, title_justify="left", show_header=show_header)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def grouped(rows: Sequence[tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[int]]]:
    """Joins rows that differ only in numbers between dots (layers, experts).

    Returns:
        Each such row once, its numbers replaced by ``*`` and its first cell followed by how many it stands for; and
        which rows those are.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(tuple(re.sub(r"(?<=\.)\d+(?=\.)", "*", cell) for cell in row), []).append(number)
    return [
        ((f"{key[0]}  ({len(same)}x)", *key[1:]) if len(same) > 1 else rows[same[0]], same)
        for key, same in groups.items()
    ]


def fail(message: str, code: int) -> None:
    """Prints one line on standard error and exits."""
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """Prints JSON, and nothing else, on standard output."""
    typer.echo(to_json(value))

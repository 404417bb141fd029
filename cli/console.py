"""What all commands print with: progress bars, tables, error messages, JSON."""

import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from permtriton.errors import PermTritonError
from permtriton.progress import Advance

out = Console()
err = Console(stderr=True)


class BarProgress:
    """Progress reporter that draws one bar per stage on standard error, or prints lines if that is not a terminal."""

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
    """Turns errors that the user can fix into one line and exit code 2, and an interruption into exit code 130.

    Also turns off the warnings and progress bars of torch and transformers.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|transformers")
    try:
        yield
    except PermTritonError as error:
        fail(str(error), 2)
    except RuntimeError as error:
        torch = sys.modules.get("torch")  # not imported here, which would take seconds
        if torch is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        fail(f"out of GPU memory: lower --micro-batch-size or --sequence-length ({str(error).splitlines()[0]})", 2)
    except KeyboardInterrupt:
        fail(
            "interrupted: no half-written output is left; a compilation continues learning when it is started again",
            130,
        )


def table(title: str, *columns: str, show_header: bool = True) -> Table:
    """Returns an empty table that wraps long cells instead of cutting them."""
    empty = Table(title=title, title_justify="left", show_header=show_header)
    for column in columns:
        empty.add_column(column, overflow="fold")
    return empty


def grouped(rows: Sequence[tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[int]]]:
    """Joins rows that differ only in numbers between dots, such as layers and experts.

    Args:
        rows: cells of each row.

    Returns:
        For each group of such rows, one row and the positions of the rows that it stands for. If there are several,
        its numbers are replaced by ``*`` and its first cell ends with their count.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        pattern = tuple(re.sub(r"(?<=\.)\d+(?=\.)", "*", cell) for cell in row)
        groups.setdefault(pattern, []).append(number)
    joined = []
    for pattern, numbers in groups.items():
        several = (f"{pattern[0]}  ({len(numbers)}x)", *pattern[1:])
        joined.append((several if len(numbers) > 1 else rows[numbers[0]], numbers))
    return joined


def fail(message: str, code: int) -> None:
    """Prints an error message on standard error and exits with ``code``."""
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """Prints JSON, and nothing else, on standard output."""
    from permtriton.checkpoint.report import to_json

    typer.echo(to_json(value))

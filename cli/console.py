"""What all commands print with: tables, error messages, JSON. Progress is drawn by `permtriton.util.bars`."""

import errno
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from permtriton.errors import PermTritonError, as_flags
from permtriton.util.bars import PlainConsole, discard, err, printable, visible
from permtriton.util.output_files import to_json
from permtriton.util.progress import without_other_bars

AGAIN = (
    "the same command, started again, continues after the last round, epoch, layer or row that was finished (without "
    "--restart; compare with --output and without --overwrite)"
)
UsageError: type[Exception] = typer.BadParameter.__base__  # type: ignore[assignment]

out = PlainConsole(markup=False, emoji=False)


@contextmanager
def _ending_as_interrupted() -> Iterator[None]:
    """Inside the ``with`` block, SIGTERM and SIGHUP do what Ctrl-C does, unless they are ignored or already handled.

    A batch system sends SIGTERM before it kills a job, and a terminal sends SIGHUP when it closes.
    """
    known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    handled = [number for number in known if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _frame: object) -> None:
        for other in handled:
            signal.signal(other, signal.SIG_IGN)  # a second signal would interrupt the cleanup
        raise KeyboardInterrupt(number)

    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def clear_errors(continues: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turns errors that the user can fix, and interruptions, into one line on standard error and an exit code.

    The code is 2 for errors, and 128 plus the number of the signal for interruptions. Also turns off the warnings of
    torch and transformers and other libraries' progress bars, and writes characters that the encoding of standard
    output lacks as ``\\u6f22`` and the like, as Python does on standard error.

    Args:
        continues: Returns whether the command keeps what it has finished; the message on an interruption then says so.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # the hub prints a line per retry
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|transformers")
    try:
        with _ending_as_interrupted(), without_other_bars():
            yield
    except PermTritonError as error:
        fail(str(error), 2)
    except UsageError as error:  # an unknown command or flag, or a value of another type
        fail(error.format_message(), 2)  # type: ignore[attr-defined]
    except (OSError, RuntimeError, MemoryError, ImportError) as error:
        if not (line := _what_failed(error)):
            raise
        fail(line, 2)
    except KeyboardInterrupt as error:
        line = "interrupted: no half-written output is left" + (f"; {AGAIN}" if continues() else "")
        number = next(iter(error.args), None)  # Python's own interruption has no arguments
        fail(line, 128 + (number if isinstance(number, int) else signal.SIGINT))


def _what_failed(error: Exception) -> str:
    """Returns which file failed, that output cannot be written, or that memory ran out; empty for other errors."""
    if isinstance(error, OSError) and error.filename is not None:  # a name that is too long, no permission
        return f"{os.fsdecode(error.filename)}: {error.strerror or error}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO, errno.EBADF):
        if sys.__stdout__ and sys.__stdout__ is sys.stdout:
            discard(sys.__stdout__)  # its buffer, whose writing would fail again at exit
        return f"standard output, or a temporary file, cannot be written: {error.strerror}"
    if "torch" not in sys.modules:  # importing torch takes seconds
        return ""
    from permtriton.util.micro_batch import is_out_of_memory, out_of_memory

    return out_of_memory(error) if is_out_of_memory(error) else ""


# Where a cell may be wrapped: after a space or a part of a path, such as ``model.``, not inside a word.
BREAK = re.compile(r"(?<=\s)(?=\S)|(?<=[./+])(?=[^\W\d]|\*)")


def _wrapped(text: str, width: int) -> str:
    lines = []
    for line in text.split("\n"):
        lines.append("")
        for part in BREAK.split(line):
            if lines[-1] and cell_len((lines[-1] + part).rstrip()) > width:
                lines.append("")
            lines[-1] += part
    return "\n".join(map(str.rstrip, lines))


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """Returns column widths: each fits its longest word; the rest of ``width`` goes to the narrowest that need more."""
    lines = [[line for text in column for line in text.split("\n")] for column in columns]
    needed = [max(map(cell_len, column)) for column in lines]
    widths = [max(cell_len(part.rstrip()) for line in column for part in BREAK.split(line)) for column in lines]
    for _ in range(width - sum(widths)):
        if short := [number for number, current in enumerate(widths) if current < needed[number]]:
            widths[min(short, key=widths.__getitem__)] += 1
    return widths


def show(title: str, rows: Iterable[Iterable[str]], *columns: str) -> None:
    """Prints a table that wraps long cells instead of cutting them; without columns, rows are a name and a value."""
    table = Table(title=title, title_justify="left", show_header=bool(columns))
    cells = [[printable(text) for text in row] for row in rows]
    heads = columns or ("", "")
    widths = _widths(list(zip(heads, *cells, strict=True)), out.width - 3 * len(heads) - 1)
    for head, width in zip(heads, widths, strict=True):
        table.add_column(head, width=width)
    for row in cells:
        table.add_row(*map(_wrapped, row, widths))
    table.width = sum(widths) + 3 * len(widths) + 1  # may be more than the width of the terminal
    out.print(table, crop=False)


def say(line: str) -> None:
    """Prints a line on standard output, however long."""
    out.print(line, highlight=False, soft_wrap=True)


def quality(measure: str, dense: float, pruned: float) -> str:
    """Returns how good a pruned model is beside the dense one, such as ``perplexity 12.00 -> 12.72 (+6.0%)``."""
    if measure == "perplexity":
        return f"perplexity {dense:.2f} -> {pruned:.2f} ({pruned / dense - 1:+.1%})"
    return f"cosine with the dense model {pruned:.4f}"


def fail(message: str, code: int) -> NoReturn:
    """Prints an error message on standard error, with flags for the options that it names, and exits with ``code``."""
    line = "".join(map(visible, as_flags(message)))  # one line, even if a file name has a line break
    err.print(Text.assemble(("error:", "bold red"), f" {line}"), soft_wrap=True, highlight=False)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    echo(to_json(value))


def echo(text: str) -> None:
    """Prints lines on standard output as they are, however long; continues if the reader of a pipe has ended."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        discard(sys.stdout)

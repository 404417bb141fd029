"""The command ``permtriton compare``: compares methods, or the settings of an ablation, and prints the table."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from permtriton.checkpoint.output import locked
from permtriton.cli.console import fail, out, print_json, saved, table
from permtriton.cli.options import Flags
from permtriton.cli.tables import Result, check_table, write_table
from permtriton.comparison.methods import Row, ablation_rows, check_effect, method_rows
from permtriton.comparison.results import ResultFile, RowResult
from permtriton.comparison.run import Yardstick, compare
from permtriton.comparison.summary import Rows, cell, columns, report_of
from permtriton.config import CalibrationConfig
from permtriton.data.held_out import held_out_windows
from permtriton.data.media import is_media
from permtriton.data.samples import Samples
from permtriton.data.text import fitted
from permtriton.errors import ConfigError, OutputError
from permtriton.evaluation.task_request import TaskRequest
from permtriton.model import load
from permtriton.model.seq2seq import with_decoder_ids
from permtriton.model.source import Source
from permtriton.recipe import resolved
from permtriton.util.bars import BarProgress, err
from permtriton.util.output_files import problem_of, real_path
from permtriton.util.progress import Progress
from permtriton.util.sparsity import NMPattern

RESULT = Result(("method", "cosine", "seconds", "peak MiB"), ("measure", "patterns", "rows", "versions"))


@dataclass(frozen=True)
class Request:
    """What to compare, as the user wrote it; lists are separated by commas."""

    model: str
    options: Flags
    flags: Flags
    seeds: str
    methods: str | None
    patterns: str | None
    ablate: str | None
    values: str | None

    def rows(self, layers: int) -> list[Row]:
        """Returns the rows to run on a model with this many layers.

        Raises:
            ConfigError: a name or a value is unknown, or a flag has no effect.
        """
        if self.values is not None and not self.ablate:
            raise ConfigError("--values has no effect without --ablate: drop it, or name an ablation")
        if self.patterns and "sparsity" in self.flags:
            raise ConfigError("--sparsity has no effect with --patterns: drop one of them")
        if self.patterns and "pattern" in self.flags:
            raise ConfigError("--pattern decides some linears, and --patterns the rows: drop one of them")
        methods = _parts("--methods", self.methods)
        patterns = [NMPattern.parse(part) for part in _parts("--patterns", self.patterns)]
        if self.ablate:
            rows = ablation_rows(
                self.options, self.ablate, _parts("--values", self.values), methods, patterns, layers, self.model
            )
        else:
            rows = method_rows(self.options, methods, patterns, self.model)
        check_effect(self.flags, rows, self.ablate)
        return rows

    def numbers(self) -> list[int]:
        """Returns the seeds.

        Raises:
            ConfigError: they are not non-negative integers.
        """
        try:
            numbers = [int(part) for part in self.seeds.split(",")]
            if min(numbers) >= 0:
                return list(dict.fromkeys(numbers))
            raise ValueError
        except ValueError:
            raise ConfigError(
                f"seeds {self.seeds!r}: expected non-negative integers separated by commas, such as 0,1,2"
            ) from None


def _parts(flag: str, text: str | None) -> list[str]:
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    if "" in parts:
        raise ConfigError(f"{flag} {text!r} has an empty name: separate names by commas, or leave {flag} out")
    return parts


def run(
    source: Source,
    request: Request,
    tasks: TaskRequest,
    eval_data: str | None,
    outputs: Sequence[Path],
    *,
    overwrite: bool,
    json: bool,
) -> None:
    """Compares the rows and prints one line per row.

    Raises:
        PermTritonError: as `permtriton.comparison.run.compare`, a request that makes no sense, or an output that cannot
            be written.
    """
    request.numbers()
    request.rows(layers=1)  # a wrong name is found before the model is loaded
    reads = list(filter(None, (source.name, eval_data, request.options.get("calibration"), tasks.folder)))
    for output in outputs:
        check_table(output, overwrite=overwrite, like=RESULT, reads=reads)
    progress = BarProgress()
    with _claimed(source, outputs, progress) as place:
        loaded = tasks.load(progress)
        progress.say(f"loading {source.described}")
        model, tokenizer = load.load_original(source)
        windows, text = held_out_windows(source.name, eval_data, tokenizer, model)
        if windows is None:
            fail(f"nothing to compare on: {text}", 2)
        length = resolved(request.options, request.model)["sequence_length"]
        fit = fitted(CalibrationConfig(sequence_length=length), request.options, model, progress).sequence_length
        if fit != length:
            request = replace(request, options={**request.options, "sequence_length": fit})
        yardstick = Yardstick(model, tokenizer, with_decoder_ids(model, Samples.of(windows)), loaded)
        kept = ResultFile(
            place, yardstick.identity(resolved(request.options, request.model), request.ablate, tasks.identity())
        )
        if not overwrite:
            kept.read()
        report = _compare(source, request, yardstick, text, kept, tasks.versions(), progress)
        headers, rows = columns(report)
        for output in outputs:
            write_table(output, headers, rows, report)
        with saved(*(outputs or [place])):
            if json:
                print_json(report)
            else:
                _print(report, headers, rows, media=is_media(model, text))
        if not outputs:
            kept.delete()


@contextmanager
def _claimed(source: Source, outputs: Sequence[Path], progress: Progress) -> Iterator[Path]:
    """Keeps other comparisons from the same outputs inside the ``with`` block.

    Yields:
        The file that keeps finished results: beside the first output, else in the present folder.

    Raises:
        OutputError: another process writes one of them, or the folder cannot be written.
    """
    stem = f"compare-{real_path(Path(source.name)).name}"
    place = outputs[0].with_name(f".{outputs[0].name}.rows.json") if outputs else Path(f".{stem}.rows.json")
    if problem := problem_of(real_path(place).parent):
        raise OutputError(
            f"the folder {real_path(place).parent}, where finished results are kept, cannot be written: {problem}; run "
            "in another folder, or give --output a file in another one"
        )
    with ExitStack() as stack:
        for output in outputs or [Path(stem)]:
            stack.enter_context(locked(real_path(output), progress.say))
        yield place


def _compare(
    source: Source,
    request: Request,
    yardstick: Yardstick,
    text: str,
    kept: ResultFile,
    versions: dict[str, str],
    progress: Progress,
) -> dict[str, Any]:
    """Runs the rows that are missing, and returns the report."""
    seeds = request.numbers()
    layers = yardstick.dense.config.get_text_config().num_hidden_layers
    results = compare(yardstick, request.rows(layers), seeds=seeds, kept=kept, progress=progress, finished=_say)
    return report_of(
        results,
        yardstick,
        resolved(request.options, request.model),
        model=source.name,
        text=text,
        seeds=seeds,
        ablation=request.ablate,
        versions=versions,
    )


def _say(result: RowResult) -> None:
    err.print(f"{result.name}: {result.mean:.3f} ({result.seconds:.0f} s)", highlight=False)


def _print(report: dict[str, Any], headers: Sequence[str], rows: Rows, *, media: bool) -> None:
    seeds = f"{len(report['seeds'])} seeds" if len(report["seeds"]) > 1 else "one seed"
    tokens, window = report["tokens"], report["window"]
    measured = (
        f"{tokens // window} samples of {window} positions" if media else f"{tokens:,} tokens in windows of {window}"
    )
    shown = table(
        f"{report['model']} at {', '.join(report['patterns'])}, on {report['text']} ({measured}), {seeds}",
        *headers,
    )
    cells = [[cell(value) for value in row] for row in rows]
    for column, texts in zip(shown.columns, zip(headers, *cells, strict=True), strict=True):
        column.min_width = max(len(word) for text in texts for word in text.split() or [""])  # no number is broken
    for row_cells in cells:
        shown.add_row(*row_cells)
    out.print(shown, width=max(out.width, shown.__rich_measure__(out, out.options).minimum), crop=False)
    if any(row["peak_bytes"] is None for row in report["rows"][1:]):
        out.print("no peak memory: this system cannot start its count anew for each row")

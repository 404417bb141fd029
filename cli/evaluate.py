"""The command ``permtriton evaluate``: measures a model, prints the results and writes them."""

import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from permtriton import evaluate as library
from permtriton import machine
from permtriton.checkpoint.forms import read_record
from permtriton.checkpoint.plan_entries import hidden_order_of
from permtriton.cli.console import BarProgress, out, print_json, saved, table
from permtriton.cli.held_out import held_out_windows
from permtriton.cli.tables import Result, check_table, write_table
from permtriton.cli.tasks import TaskRequest
from permtriton.comparison.summary import Cell, cell
from permtriton.data.media import is_media
from permtriton.errors import CalibrationError, ModelError
from permtriton.model import load
from permtriton.model.core import takes_decoder_ids
from permtriton.model.headers import REPORT_FILE

HEADERS = ("measure", "value", "standard error", "dense")
RESULT = Result(HEADERS, ("model", "against", "protocol", "tokens_per_second"))


def run(
    source: load.Source,
    against: load.Source | None,
    perplexity: str | None,
    tasks: TaskRequest,
    batch: int | None,
    output: Path | None,
    *,
    overwrite: bool,
    json: bool,
) -> None:
    """Measures a model, prints the results and writes them.

    Raises:
        PermTritonError: as `permtriton.evaluate.evaluate` and `permtriton.evaluation.tasks.Tasks`, a model or text that
            cannot be read, or an output that cannot be written.
    """
    if output is not None:
        check_table(output, overwrite=overwrite, like=RESULT)
    progress = BarProgress()
    chosen = tasks.load(progress)
    progress.say(f"loading {source.described}")
    model = load.load_model(source)
    tokenizer = load.load_processor(source, model)
    dense = order = None
    if against is not None:
        progress.say(f"loading {against.described}")
        dense, dense_tokenizer = load.load_original(against)
        _check_tokenizers(tokenizer, dense_tokenizer)
        order = _hidden_order(source, getattr(model.config.get_text_config(), "hidden_size", 0))
    names = (source.name, against.name if against else None)
    windows, text = held_out_windows(source, perplexity or ("demo" if "demo" in names else None), tokenizer, model)
    if windows is None and perplexity is None:
        if chosen is None:
            raise CalibrationError(text)
        progress.say(f"no perplexity, tasks only: {text}")
    measured = library.evaluate(
        model, tokenizer, windows=windows, dense=dense, hidden_order=order, tasks=chosen, batch=batch, progress=progress
    )
    report = {"model": names[0], "against": names[1], **_report(measured, model, text, tasks)}
    rows = list(_rows(measured))
    if output is not None:
        write_table(output, HEADERS, rows, report)
    with saved(*filter(None, [output])):
        if json:
            print_json(report)
        else:
            _print(report, rows)


def _report(measured: library.Evaluated, model: Any, text: str, tasks: TaskRequest) -> dict[str, Any]:
    return {
        "text": text if measured.windows else None,
        "protocol": _protocol(measured, model, text) if measured.windows else None,
        **asdict(measured),
        "tokens": measured.tokens,
        "limit": tasks.limit,
        "dtype": str(model.dtype).removeprefix("torch."),
        "command": shlex.join(["permtriton", *sys.argv[1:]]),
        "versions": tasks.versions(),
        "device": machine.device_name(model.device),
        "system": platform.platform(),
    }


def _protocol(measured: library.Evaluated, model: Any, text: str) -> str:
    """Returns in words what was measured on which samples."""
    if is_media(model, text):
        return f"{measured.windows} samples of {measured.window} positions"
    windows = f"{measured.windows} windows of {measured.window} tokens that do not overlap"
    if measured.perplexity is None:
        return windows
    if takes_decoder_ids(model):
        return f"{windows}; the encoder reads the first half of each, and the decoder predicts the second"
    return f"{windows}; the first token of each is not predicted"


def _hidden_order(source: load.Source, channels: int) -> Any:
    """Returns the order of the hidden states of a model that permtriton wrote; None if it is the dense model's."""
    if source.gguf is not None:  # not what lies beside the file
        return None
    path: Any = Path(source.location, REPORT_FILE)
    if not path.parent.is_dir():  # a name on the hub
        path = cached_file(source.location, REPORT_FILE, _raise_exceptions_for_missing_entries=False)
    return hidden_order_of(read_record(Path(path).parent), channels) if path and Path(path).is_file() else None


def _check_tokenizers(tokenizer: Any, dense: Any) -> None:
    vocabularies = [each.get_vocab() for each in (tokenizer, dense) if hasattr(each, "get_vocab")]
    if len(vocabularies) == 2 and vocabularies[0] != vocabularies[1]:
        raise ModelError(
            "the tokenizers of both models have different vocabularies, so the same text is not the same for them: "
            "give the dense model that the model was compiled from"
        )


def _rows(measured: library.Evaluated) -> Iterator[tuple[Cell, ...]]:
    """Yields the cells under `HEADERS` of each measure."""
    if measured.perplexity is not None:
        yield "perplexity", measured.perplexity, None, measured.dense_perplexity
    if measured.kl is not None:
        yield "KL to dense, nats per token", measured.kl, None, 0.0
    if measured.cosine is not None:
        yield "cosine to dense, hidden states", measured.cosine, None, 1.0
    for task in measured.tasks:
        for metric, score in task.scores.items():
            yield f"{task.name}, {metric} ({task.samples} samples)", score.value, score.stderr, None


def _print(report: dict[str, Any], rows: list[tuple[Cell, ...]]) -> None:
    title = report["model"] + (f", on {report['text']}: {report['protocol']}" if report["text"] else "")
    shown = [number for number in range(len(HEADERS)) if any(row[number] is not None for row in rows)]
    printed = table(title, *(HEADERS[number] for number in shown))
    for row in rows:
        printed.add_row(*(cell(row[number]) for number in shown))
    out.print(printed)
    speed = f"; {report['tokens_per_second']:,.0f} tokens per second" if report["text"] else ""
    out.print(f"{report['seconds']:.1f} s{speed} on {report['device']}", highlight=False)

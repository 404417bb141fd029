"""The command ``permtriton compile``: compiles a model, saves it and prints the report."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from permtriton import compiler
from permtriton.checkpoint.output import claimed
from permtriton.checkpoint.report import grouped
from permtriton.cli.console import BarProgress, out, print_json, table
from permtriton.cli.held_out import held_out_windows
from permtriton.cli.inspect import destination
from permtriton.command import compile_command
from permtriton.config import CompileConfig
from permtriton.machine import format_bytes
from permtriton.model import load
from permtriton.stages import state_paths


def run(
    source: load.Source,
    config: CompileConfig,
    eval_text: str | None,
    output: Path | None,
    *,
    overwrite: bool,
    restart: bool,
    json: bool,
) -> None:
    """Compiles a model, saves it and prints the report.

    Args:
        source: model to prune.
        config: every option of the compilation.
        eval_text: held-out text, as `permtriton.cli.held_out.held_out_windows` takes it.
        output: folder to write; None for ``MODEL-NofM`` in the present folder.
        overwrite: whether an earlier output may be replaced.
        restart: whether to delete the states of an interrupted run first, instead of continuing it.
        json: whether to print JSON.

    Raises:
        PermTritonError: as `permtriton.compile` and `permtriton.CompiledModel.save`.
    """
    target = output or default_output(source, config)
    progress = BarProgress()
    with claimed(target, overwrite=overwrite, say=progress.say) as folder:
        if restart:
            for path in filter(Path.is_file, state_paths(folder.resume_path)):
                path.unlink()
                progress.say(f"deleted {path.name}, the state of an interrupted run")
        with load.unchanged_weights(source):
            model, tokenizer, windows, text = loaded(source, eval_text, progress)
            compiled = compiler.compile(
                model,
                tokenizer,
                config,
                evaluation_windows=windows,
                progress=progress,
                resume_path=folder.resume_path,
                say_needs=True,
            )
        compiled.report["evaluation"]["text"] = text
        compiled.report["command"] = compile_command(
            source.name,
            config,
            eval_text=eval_text and Path(eval_text).name,
            dtype=None if source.dtype == "auto" else source.dtype,
            trust_remote_code=source.trust_remote_code,
        )
        progress.say(f"saving and verifying {target}")
        compiled.save(target, overwrite=overwrite)
    if json:
        print_json(compiled.report)
    else:
        print_report(compiled.report, target)


def default_output(source: load.Source, config: CompileConfig) -> Path:
    """Returns ``MODEL-NofM`` in the present folder."""
    return Path(f"{Path(source.name).resolve().name}-{config.sparsity.kept}of{config.sparsity.group}")


def loaded(source: load.Source, eval_text: str | None, progress: BarProgress) -> tuple[Any, Any, Tensor | None, str]:
    """Returns the model, its tokenizer, and the held-out windows with the name of their text, or why there are none.

    Args:
        source: model to prune.
        eval_text: held-out text, as `permtriton.cli.held_out.held_out_windows` takes it.
        progress: progress reporter.

    Raises:
        PermTritonError: as `permtriton.model.load.load_original` and `held_out_windows`.
    """
    progress.say(f"loading {source.name}")
    model, tokenizer = load.load_original(source, saved=True)
    windows, text = held_out_windows(source, eval_text, tokenizer, model)
    if windows is None:
        progress.say(f"no held-out evaluation: {text}")
    return model, tokenizer, windows, text


def print_report(report: dict[str, Any], target: Path) -> None:
    """Prints the tables of a compilation's report.

    Args:
        report: content of ``permtriton.json``.
        target: folder that was written.
    """
    out.print(_permutations(report))
    result = table("Result", "", "", show_header=False)
    for name, value in _results(report):
        result.add_row(name, value)
    result.add_row("written to", str(target))
    out.print(result)


def _permutations(report: dict[str, Any]) -> Table:
    shown = table("Permutations", "permutation", "channels", "where it went", "moved")
    rows = [(entry["name"], str(entry["channels"]), destination(entry)) for entry in report["permutations"]]
    for row, members in grouped(rows):
        moved = [report["permutations"][number]["moved"] for number in members]
        shown.add_row(*row, _range(moved, "{}"))
    return shown


def _results(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the name and the value of each row of the result table."""
    evaluation = report["evaluation"]
    if "dense" in evaluation:
        name = "perplexity" if evaluation["measure"] == "perplexity" else "cosine with dense"
        yield f"held-out {name}, dense", f"{evaluation['dense']:.3f}"
        yield f"held-out {name}, compiled", f"{evaluation['compiled']:.3f}"
    yield "zeros in pruned weights", _range(report["sparsity_by_layer"].values(), "{:.2%}")
    pruned, total = report["pruned_parameters"], report["parameters"]
    yield "share of parameters pruned", f"{pruned / total:.1%} ({pruned:,} of {total:,})"
    epochs, kept = report["learning"]["epochs"], report["learning"]["kept_epoch"]
    if epochs:
        yield "learning loss, base order", f"{epochs[0]['loss']:.4f}"
        yield f"learning loss, epoch {kept} of {len(epochs) - 1}", f"{epochs[kept]['loss']:.4f}"
    rounds = report["search"]["rounds"]
    if rounds:
        yield "search loss, base order", f"{rounds[0]['loss']:.4f}"
        yield f"search loss, after {len(rounds) - 1} rounds", f"{rounds[-1]['loss']:.4f}"
    yield from _updates(report["weight_update"])
    yield "seconds", ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report["seconds"].items())
    yield "peak memory", f"{format_bytes(report['memory']['peak'])} on {report['device']}"
    yield "linears left dense", "; ".join(f"{name}: {why}" for name, why in report["skipped"].items()) or "none"
    verified = report["verification"]
    yield "verified", f"{verified['pruned_weights']} pruned weights; reloaded: {verified['reloaded']}"


def _updates(updates: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "reconstruct" in updates:
        for part in updates["reconstruct"]["layers"]:
            yield f"reconstruction of {part['layer']}, held out", f"{part['start']:.4f} to {part['end']:.4f}"
    if "distill" in updates:
        epochs, kept = updates["distill"]["epochs"], updates["distill"]["kept"]
        yield "distillation, held out, before", f"{epochs[0]['held_out']:.4f}"
        yield f"distillation, held out, epoch {kept} of {len(epochs) - 1}", f"{epochs[kept]['held_out']:.4f}"


def _range(numbers: Collection[float], form: str) -> str:
    """Returns the smallest and the largest number as ``form`` writes them; only one if both read the same."""
    return " to ".join(dict.fromkeys(form.format(number) for number in (min(numbers), max(numbers))))

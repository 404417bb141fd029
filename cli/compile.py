"""The command ``permtriton compile``: compiles a model, saves it and prints the report."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from permtriton import compiler
from permtriton.checkpoint.output import check_apart, claimed, resume_path
from permtriton.checkpoint.plan_entries import grouped
from permtriton.checkpoint.save import CompiledModel
from permtriton.cli import torchrun
from permtriton.cli.console import BarProgress, out, print_json, saved, table
from permtriton.cli.held_out import held_out_windows
from permtriton.cli.inspect import destination
from permtriton.config import CompileConfig
from permtriton.machine import format_bytes
from permtriton.methods import steps
from permtriton.model import load
from permtriton.model.gguf_file import SUFFIX
from permtriton.offload import Offload, check_offload
from permtriton.progress import NoProgress, Progress
from permtriton.recipes import compile_command
from permtriton.run import states_beside
from permtriton.step import Outcome


@dataclass(frozen=True)
class Job:
    """What the user asked for."""

    source: load.Source
    config: CompileConfig
    eval_text: str | None
    output: Path | None
    overwrite: bool
    restart: bool
    json: bool
    shard: bool | None
    offload: Path | None = None

    @property
    def target(self) -> Path:
        """Folder to write."""
        pattern = self.config.sparsity
        name = Path(self.source.name).resolve().name.removesuffix(SUFFIX)
        return self.output or Path(f"{name}-{pattern.kept}of{pattern.group}")

    def check_apart(self) -> None:
        """Refuses an output in the folder of the model, where the default is if that is the present folder.

        A GGUF file is a model by itself, whatever else is in its folder.

        Raises:
            OutputError: the output is such a one.
        """
        if self.source.folder is not None and self.source.gguf is None:
            check_apart(self.target, self.source.folder)

    def files(self) -> Offload | None:
        """Returns the offload folder, if there is one.

        Raises:
            ConfigError: it cannot be used, or the config asks for a method that needs all weights in memory.
        """
        if self.offload is None:
            return None
        check_offload(self.config)
        return Offload(self.offload)


def run(job: Job) -> None:
    """Compiles a model, saves it and prints the report. Under ``torchrun``, only the first rank prints and saves.

    Raises:
        PermTritonError: as `permtriton.compile` and `permtriton.CompiledModel.save`.
    """
    first, source, target = torchrun.is_first(), job.source, job.target
    progress = BarProgress() if first else NoProgress()
    with ExitStack() as stack:
        with torchrun.joined(source.device):
            if first:
                job.check_apart()
                stack.enter_context(claimed(target, overwrite=job.overwrite, say=progress.say))
                if job.restart:
                    _delete_states(target, progress)
            compiled = _compiled(job, progress)
        if not first:
            return
        progress.say(f"saving and verifying {target}")
        compiled.save(target, overwrite=job.overwrite)
    with saved(target):
        if job.json:
            print_json(compiled.report)
        else:
            print_report(compiled.report, target)


def _compiled(job: Job, progress: Progress) -> CompiledModel:
    source, device = job.source, None
    if torchrun.launched():  # only then is it known whether one GPU can hold the model
        device, source = load.resolve_device(source.device), replace(source, device="cpu")
    files = job.files()
    with load.unchanged_weights(source):
        model, tokenizer, windows, text = loaded(source, job.eval_text, progress, files)
        compiled = compiler.compile(
            model,
            tokenizer,
            job.config,
            evaluation_windows=windows,
            progress=progress,
            resume_path=resume_path(job.target),
            say_needs=True,
            device=device,
            spread=job.shard,
            offload=files,
        )
    compiled.report["evaluation"]["text"] = text
    if source.gguf is not None:
        compiled.report["gguf"] = {"file": source.gguf.path.name, "tensors": source.gguf.types}
    compiled.report["command"] = compile_command(
        source.name,
        job.config,
        eval_text=job.eval_text and Path(job.eval_text).name,
        dtype=None if source.dtype == "auto" else source.dtype,
        gguf_file=source.gguf_file,
        trust_remote_code=source.trust_remote_code,
    )
    return compiled


def _delete_states(target: Path, progress: Progress) -> None:
    for path in states_beside(resume_path(target)):
        path.unlink()
        progress.say(f"deleted {path.name}, the state of an interrupted run")


def loaded(
    source: load.Source, eval_text: str | None, progress: Progress, offload: Offload | None = None
) -> tuple[Any, Any, Any, str]:
    """Returns the model, its tokenizer, and the held-out windows with the name of their text, or why there are none.

    Args:
        eval_text: held-out text, as `permtriton.cli.held_out.held_out_windows` takes it.

    Raises:
        PermTritonError: as `permtriton.model.load.load_original` and `held_out_windows`.
    """
    progress.say(f"loading {source.described}")
    model, tokenizer = load.load_original(source, offload=offload, saved=True)
    windows, text = held_out_windows(source, eval_text, tokenizer, model)
    if windows is None:
        progress.say(f"no held-out evaluation: {text}")
    return model, tokenizer, windows, text


def print_report(report: dict[str, Any], target: Path) -> None:
    """Prints the tables of a compilation's report.

    Args:
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
    known = {kind.name: kind for kind in steps.STEPS}
    for entry in report["steps"]:
        outcome = Outcome(**{name: value for name, value in entry.items() if name != "name"})
        yield from known[entry["name"]]().words(outcome)
    yield "seconds", ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report["seconds"].items())
    yield "peak memory", f"{format_bytes(report['memory']['peak'])} on {report['device']}"
    yield "linears left dense", "; ".join(f"{name}: {why}" for name, why in report["skipped"].items()) or "none"
    verified = report["verification"]
    yield "verified", f"{verified['pruned_weights']} pruned weights; reloaded: {verified['reloaded']}"


def _range(numbers: Collection[float], form: str) -> str:
    """Returns the smallest and the largest number as ``form`` writes them; only one if both read the same."""
    return " to ".join(dict.fromkeys(form.format(number) for number in (min(numbers), max(numbers))))

"""The command ``permtriton compile``: compiles a model, saves it and prints the report."""

import shlex
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from permtriton.arguments import CompileArgs
from permtriton.checkpoint.card import facts
from permtriton.checkpoint.plan_entries import destination, grouped
from permtriton.cli import dry_run as dry
from permtriton.cli import torchrun
from permtriton.cli.console import print_json, quality, say, show
from permtriton.cli.options import Flags, HelpAll, Json, Model, running_flag, takes
from permtriton.cli.processor import suit_processor
from permtriton.driver.job import Job
from permtriton.errors import ConfigError, reasons_of
from permtriton.methods import steps
from permtriton.methods.step import Outcome
from permtriton.model.gguf_file import SUFFIX
from permtriton.model.source import Source
from permtriton.recipe import resolve
from permtriton.util.bars import reporter
from permtriton.util.machine import format_bytes, keep_freed_memory
from permtriton.util.output_files import real_path

DryRun: Any = running_flag(
    "Show the plan and an estimate of time, memory and disk, then stop; nothing is written.", "--dry-run", kind=bool
)
Devices: Any = running_flag(
    "With --dry-run: plan for this many GPUs with this many GiB each, such as 8x80. Needs no text and no weights.",
    metavar="COUNTxGIB",
)


@takes()
def compile(
    model: Model,
    args: CompileArgs,
    flags: Flags,  # the options that the user set, by name: those of `permtriton.config` and of the steps
    dry_run: DryRun = False,
    devices: Devices = None,
    json: Json = False,
    help_all: HelpAll = False,
) -> None:
    keep_freed_memory()
    config, overrides = resolve(model, flags, args.recipe, args.config, args.protocol, args.save_format)
    if devices is not None and not dry_run:
        raise ConfigError("--devices needs --dry-run: add it, or leave --devices out to run on the devices at hand")
    if args.shard and devices is None and not torchrun.launched():
        raise ConfigError("--shard spreads weights over several processes: start permtriton with torchrun")
    source, output = Source(model, **args.loading), args.output
    if output is None:
        pattern, name = config.sparsity, real_path(Path(model)).name.removesuffix(SUFFIX)
        output = Path(f"{name}-{pattern.kept}of{pattern.group}{'-mixed' * bool(config.pattern)}")
    job = Job(source, config, overrides, replace(args.with_protocol(model), output=output))
    if dry_run:
        dry.run(job, devices, json=json)
    else:
        run(job, json=json)


def run(job: Job, *, json: bool) -> None:
    """Compiles a model on all ranks; the first one saves it and prints the report."""
    assert isinstance(job.model, Source)
    progress = reporter(torchrun.is_first())
    suit_processor(job.model, progress)
    with ExitStack() as stack:
        with torchrun.joined(job.args.device):
            stack.enter_context(job.claimed(progress))
            compiled = job.run(progress)
        if not torchrun.is_first():
            return
        job.save(compiled, progress)
    if json:
        print_json(compiled.report)
    else:
        _print(compiled.report, str(job.output))


def _print(report: Any, target: str) -> None:
    say(f"written to {target}")
    spaces = report["permutations"]
    if any(entry["moved"] for entry in spaces):
        rows = [(entry["name"], str(entry["channels"]), destination(entry)) for entry in spaces]
        moved = ((*row, _range([spaces[n]["moved"] for n in members], "{}")) for row, members in grouped(rows))
        show("Permutations", moved, "permutation", "units", "where it went", "moved")
    show("Result", _results(report))
    say(verdict(report, target))


def verdict(report: Any, folder: str) -> str:
    """Returns a line that says how good a compiled model is, and what to do next."""
    evaluation, place = report["evaluation"], shlex.quote(folder)
    measured = f"not measured yet (permtriton evaluate {place} --against {shlex.quote(report['model'])})"
    if "dense" in evaluation:
        measured = quality(evaluation["measure"], evaluation["dense"], evaluation["compiled"])
    loads = f"it loads with {report['export']['loads_with']}" if "export" in report else ""
    return f"{folder}: {measured}; {loads or f'packed: permtriton export {place}'}"


def _results(report: Any) -> Iterator[tuple[str, str]]:
    yield from facts(report)
    yield "zeros in pruned weights", _range(report["sparsity_by_layer"].values(), "{:.2%}")
    known = {kind.name: kind for kind in steps.STEPS}
    for entry in report["steps"]:
        outcome = Outcome(**{field.name: entry[field.name] for field in fields(Outcome)})
        yield from known[entry["name"]]().words(outcome)
    yield "seconds", ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report["seconds"].items())
    yield "peak memory", format_bytes(report["memory"]["peak"])
    yield "linears left dense", "; ".join(reasons_of(report["skipped"])) or "none"
    verified = report["verification"]
    yield "verified", f"{verified['pruned_weights']} pruned weights; reloaded: {verified['reloaded']}"


def _range(numbers: Collection[float], form: str) -> str:
    """Returns the smallest and the largest number, formatted by ``form``; only one if both texts are equal."""
    return " to ".join(dict.fromkeys(form.format(number) for number in (min(numbers), max(numbers))))

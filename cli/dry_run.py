"""The command ``permtriton compile --dry-run``: shows what a compilation would do and need."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel

from permtriton import compiler
from permtriton.checkpoint.output import OutputFolder, check_output
from permtriton.checkpoint.report import grouped, plan_report
from permtriton.cli.compile import default_output, loaded
from permtriton.cli.console import BarProgress, out, print_json, table
from permtriton.cli.inspect import destination
from permtriton.config import CompileConfig
from permtriton.forecast import Forecast, duration
from permtriton.machine import available_memory, format_bytes
from permtriton.memory import describe_masks
from permtriton.model import load
from permtriton.model.plan import Plan, linear_module


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
    """Loads a model and prints the plan and the estimate; writes nothing.

    Args:
        source: model to prune.
        config: every option of the compilation.
        eval_text: held-out text, as `permtriton.cli.held_out.held_out_windows` takes it.
        output: folder that would be written; None for ``MODEL-NofM`` in the present folder.
        overwrite: whether an earlier output might be replaced.
        restart: whether the states of an interrupted run would be deleted first.
        json: whether to print JSON.

    Raises:
        PermTritonError: as `permtriton.compile` up to its plan, or the output could not be written.
    """
    target = output or default_output(source, config)
    check_output(target, overwrite=overwrite)
    model, tokenizer, windows, _ = loaded(source, eval_text, BarProgress())
    folder = OutputFolder.at(target)
    resume_path = None if restart else folder.resume_path
    plan, forecast = compiler.dry_run(
        model, tokenizer, config, evaluation_windows=windows, resume_path=resume_path
    )  # fmt: skip
    print_dry_run(model, plan, forecast, folder.home, config, json=json)


def print_dry_run(
    model: PreTrainedModel, plan: Plan, forecast: Forecast, folder: Path, config: CompileConfig, *, json: bool
) -> None:
    """Prints what a compilation would do and need.

    Args:
        model: dense model.
        plan: plan of the model.
        forecast: what the compilation needs.
        folder: folder whose disk it would write to.
        config: every option.
        json: whether to print JSON.
    """
    device = model.device
    report = plan_report(plan, config.learn.block_size)
    if json:
        print_json({**report, **forecast.report()})
        return
    shown = table("Plan", "permutation", "channels", "where it would go")
    rows = [(entry["name"], str(entry["channels"]), destination(entry)) for entry in report["permutations"]]
    for row, _ in grouped(rows):
        shown.add_row(*row)
    out.print(shown)
    least, most = forecast.time_range
    pruned = sum(linear_module(model, name).get_parameter("weight").numel() for _, name in plan.linears())
    total = sum(p.numel() for p in model.parameters())
    result = table("Estimate", "", "", show_header=False)
    result.add_row("share of parameters to prune", f"{pruned / total:.1%} ({pruned:,} of {total:,})")
    result.add_row("linears left dense", "; ".join(f"{name}: {why}" for name, why in plan.skipped.items()) or "none")
    free = available_memory(device)
    result.add_row("memory", f"{format_bytes(forecast.needs.peak)} on {device.type} at the peak{_free(free)}")
    if masks := describe_masks(forecast.needs):
        result.add_row("masks while learning", masks)
    if forecast.refused:
        result.add_row("time", f"not measured: {forecast.refused}")
    else:
        stages = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in forecast.seconds.items())
        result.add_row("time", f"roughly {duration(least)} to {duration(most)} ({stages})")
    disk = shutil.disk_usage(folder).free
    result.add_row("disk", f"{format_bytes(sum(forecast.disk.values()))} in {folder}{_free(disk)}")
    out.print(result)
    out.print("dry run: nothing was written")


def _free(count: int | None) -> str:
    return "" if count is None else f"; {format_bytes(count)} free"

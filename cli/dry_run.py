"""The command ``permtriton compile --dry-run``: shows what a compilation would do and need."""

import re
import shutil
from pathlib import Path

from permtriton.checkpoint.plan_entries import grouped
from permtriton.cli.console import out, print_json, table
from permtriton.cli.inspect import destination
from permtriton.cli.processor import suit_processor
from permtriton.driver.forecast import duration
from permtriton.driver.job import DryRun, Job
from permtriton.driver.memory import Devices, describe_low_memory, describe_weights
from permtriton.errors import ConfigError, as_flags, reasons_of
from permtriton.model.source import Source
from permtriton.running.placement import Way
from permtriton.util.bars import reporter
from permtriton.util.machine import format_bytes
from permtriton.util.output_files import real_path

GIB = 1 << 30


def run(job: Job, devices: str | None, *, json: bool) -> None:
    """Loads a model and prints the plan and the estimate; writes nothing.

    Args:
        job: job with an output.

    Raises:
        PermTritonError: as `permtriton.dry_run`.
    """
    assert job.output is not None
    wanted = None if devices is None else _devices(devices, job.ways)
    progress = reporter(True)
    assert isinstance(job.model, Source)
    suit_processor(job.model, progress)
    planned = job.dry_run(progress, wanted)
    if json:
        print_json(planned.report)
    else:
        print_dry_run(planned, real_path(job.output).parent)


def _devices(text: str, ways: tuple[Way, ...]) -> Devices:
    match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if not match:
        raise ConfigError(f"--devices {text}: expected the number of GPUs and the GiB of memory of each, such as 8x80")
    return Devices("cuda", int(match[1]), int(match[2]) * GIB, ways)


def print_dry_run(planned: DryRun, folder: Path) -> None:
    """Prints what a compilation would do and need.

    Args:
        folder: folder whose disk it would write to.
    """
    report, plan, forecast = planned.report, planned.plan, planned.forecast
    shown = table("Plan", "permutation", "units", "where it would go")
    rows = [(entry["name"], str(entry["channels"]), destination(entry)) for entry in report["permutations"]]
    for row, _ in grouped(rows):
        shown.add_row(*row)
    out.print(shown)
    share, total = planned.config.dense_share, planned.parameters
    pruned = round(planned.pruned_parameters * (1 - share))
    result = table("Estimate", "", "", show_header=False)
    result.add_row("pattern", plan.sparsity(planned.config.sparsity))
    result.add_row("share of parameters to prune", f"{pruned / total:.1%} ({pruned:,} of {total:,})")
    dense = [*reasons_of(plan.skipped), *([f"a share of {share:.0%}, chosen by a backward pass"] if share else [])]
    result.add_row("linears left dense", "; ".join(dense) or "none")
    devices = forecast.devices
    each = f"each of {devices.count} x {devices.kind}" if devices.count > 1 else devices.kind
    result.add_row(
        "memory", f"{format_bytes(forecast.needs.peak)} on {each} at the peak; {format_bytes(devices.free)} free"
    )
    if devices.count > 1 or forecast.needs.way:
        result.add_row("weights", describe_weights(forecast.needs))
    if devices.count > 1:
        result.add_row("started by", f"torchrun --nproc-per-node {devices.count} -m permtriton compile ...")
    if saved := describe_low_memory(forecast.needs, planned.config):
        result.add_row("to save memory", saved)
    if not forecast.seconds:
        missing = "these devices" if planned.fetched else "the weights yet"
        result.add_row("time", f"not measured: {as_flags(forecast.refused) or f'this machine does not have {missing}'}")
    else:
        stages = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in forecast.seconds.items())
        result.add_row("time", f"{forecast.time} ({stages})")
    free = format_bytes(shutil.disk_usage(folder).free)
    result.add_row("disk", f"{format_bytes(sum(forecast.disk.values()))} in {folder}; {free} free")
    if forecast.needs.offloaded:
        parts = ", ".join(f"{format_bytes(size)} for {name}" for name, size in forecast.needs.offloaded.items())
        result.add_row(forecast.needs.beside, parts)
    out.print(result)
    out.print("dry run: nothing was written")

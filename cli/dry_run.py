"""The command ``permtriton compile --dry-run``: shows what a compilation would do and need."""

import re
from collections.abc import Iterator
from pathlib import Path

from permtriton.checkpoint.plan_entries import destination, grouped
from permtriton.cli.console import out, print_json, show
from permtriton.cli.processor import suit_processor
from permtriton.driver.job import DryRun, Job
from permtriton.driver.memory_forecast import Devices
from permtriton.errors import ConfigError, as_flags, reasons_of
from permtriton.model.source import Source
from permtriton.running.placement import DevicePlacement
from permtriton.util.bars import reporter
from permtriton.util.output_files import real_path

GIB = 1 << 30


def run(job: Job, devices: str | None, *, json: bool) -> None:
    assert job.output is not None
    if devices is not None and job.args.device == "cpu":
        raise ConfigError("--devices plans for GPUs, --device cpu for a CPU: leave out one or the other")
    planned_for = None if devices is None else _devices(devices, job.placements)
    progress = reporter(True)
    assert isinstance(job.model, Source)
    suit_processor(job.model, progress)
    planned = job.dry_run(progress, planned_for)
    if json:
        print_json(planned.report)
        return
    rows = [(entry["name"], str(entry["channels"]), destination(entry)) for entry in planned.report["permutations"]]
    show("Plan", (row for row, _ in grouped(rows)), "permutation", "units", "where it would go")
    show("Estimate", _estimate(planned, real_path(job.output).parent))
    out.print("dry run: nothing was written")


def _devices(text: str, placements: tuple[DevicePlacement, ...]) -> Devices:
    match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if not match:
        raise ConfigError(f"--devices {text}: expected the number of GPUs and the GiB of memory of each, such as 8x80")
    return Devices("cuda", int(match[1]), int(match[2]) * GIB, placements)


def _estimate(planned: DryRun, folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the value of each row of the estimate; ``folder`` is on the disk of the output."""
    plan, forecast = planned.plan, planned.forecast
    share, total = planned.config.dense_share, planned.parameters
    pruned = round(planned.pruned_parameters * (1 - share))
    yield "pattern", plan.sparsity(planned.config.sparsity)
    yield "share of parameters to prune", f"{pruned / total:.1%} ({pruned:,} of {total:,})"
    dense = [*reasons_of(plan.skipped), *([f"a share of {share:.0%}, chosen by a backward pass"] if share else [])]
    yield "linears left dense", "; ".join(dense) or "none"
    yield from forecast.rows(folder)
    if not forecast.seconds:
        missing = "these devices" if planned.fetched else "the weights yet"
        yield "time", f"not measured: {as_flags(forecast.refused) or f'this machine does not have {missing}'}"
    if forecast.devices.count > 1:
        yield "started by", f"torchrun --nproc-per-node {forecast.devices.count} -m permtriton compile ..."

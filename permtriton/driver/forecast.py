"""How long a compilation will take and how much memory and disk it needs, before the work starts.

Memory and disk follow from the sizes of model and text. The time is measured on the model: that of one short forward
pass, of the masks of one weight and of one assignment of channels, times how often each stage does them.
What depends on the text or on chance (when a search ends, a busy machine) makes it a rough range.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from permtriton.checkpoint.format import Format
from permtriton.data.generated import texts_at_once, written
from permtriton.driver.identity import states_beside
from permtriton.driver.memory import Devices, Needs, describe_weights, refusal
from permtriton.driver.options import CompileConfig
from permtriton.driver.planning import Planned
from permtriton.driver.step import FLOAT32, Facts, Speed, Stage
from permtriton.errors import OutputError
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.kernels.packing import position_bits
from permtriton.methods.measure.importance import reads_activations
from permtriton.methods.order.heuristic_order import MAX_ROWS, reassigned
from permtriton.methods.prune.dense_share import DENSE_SHARE
from permtriton.model.expert_linears import UnstackedExperts
from permtriton.model.experts import share_sent
from permtriton.model.forward import last_hidden_state
from permtriton.passes.plan import ChannelSpace, Plan, linear_module, weight_in_out
from permtriton.running import ranks
from permtriton.running.mixed_precision import mixed_precision
from permtriton.running.placement import Way
from permtriton.util.machine import format_bytes

PROBE_TOKENS = 512  # of the passes that are timed, at most
PROBES, PROBE_SECONDS = 5, 1.0  # most runs of what is timed, and the time after which no more are made
PROBE_CHANNELS = 256  # of the assignment that is timed; its time grows with their square
BOTH = 3  # forward passes that a forward and a backward pass take as long as; one more where activations are recomputed
SWEEPS = 5  # of assignments, typically
PROOF_MASKS = 10  # times that all masks are computed to prove the passes and check the result
FASTER, SLOWER = 0.6, 2.0  # ends of the range
# What is assumed of a GPU that is not here: products in float32 without tensor cores, two thirds of what an H100 can;
# copies from host memory, work that stays there, and reads of its own memory.
PRODUCTS, LINK, HOST, MEMORY = 40e12, 20e9, 10e9, 2e12  # operations per second; the others are bytes per second
ASSUMED = "if a GPU does 40 TFLOP/s and reads 20 GB/s from host memory: assumed, not measured"
SMALL_FILES = 1 << 24  # bytes of tokenizer, configs and report


@dataclass(frozen=True)
class Forecast:
    """What a compilation needs.

    Attributes:
        needs: memory.
        disk: what is written -> bytes.
        seconds: stage -> expected time in seconds; empty where it was not measured.
        refused: why the memory is too small; empty if it is not.
        devices: what the compilation runs on.
        assumed: what the seconds rest on where they were not measured; empty where they were.
    """

    needs: Needs
    disk: Mapping[str, int]
    seconds: Mapping[str, float]
    refused: str
    devices: Devices
    assumed: str = ""

    @property
    def time_range(self) -> tuple[float, float]:
        """The rough range of the time of all stages, in seconds; 0 where it was not measured."""
        total = sum(self.seconds.values())
        return FASTER * total, SLOWER * total

    def rows(self, folder: Path | None) -> Iterator[tuple[str, str]]:
        """Yields the name and value of each need; ``folder`` is where the output goes, None if that is not known."""
        needs, devices = self.needs, self.devices
        each = f"each of {devices.count} x {devices.kind}" if devices.count > 1 else devices.kind
        yield "memory", f"{format_bytes(needs.peak)} on {each} at the peak; {format_bytes(devices.free)} free"
        if devices.count > 1 or needs.way:
            yield "weights", describe_weights(needs)
        if self.seconds:
            least, most = map(duration, self.time_range)
            stages = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in self.seconds.items())
            assumed = f", {self.assumed}" if self.assumed else ""
            yield "time", f"roughly {least} to {most}{assumed} ({stages})"
        free = f" in {folder}; {format_bytes(shutil.disk_usage(folder).free)} free" if folder is not None else ""
        yield "disk", f"{format_bytes(sum(self.disk.values()))}{free}"
        if needs.on_host:
            yield "host memory", ", ".join(f"{format_bytes(size)} for {name}" for name, size in needs.on_host.items())

    def describe(self, folder: Path | None) -> str:
        """Returns `rows` as one line."""
        return "; ".join(f"{name}: {value}" for name, value in self.rows(folder))

    def report(self) -> dict[str, Any]:
        """Returns everything, as JSON can hold it; ``seconds`` is None where it was not measured."""
        least, most = self.time_range
        return {
            "memory": self.needs.report(),
            "seconds": {"least": least, "most": most, "stages": dict(self.seconds)} if self.seconds else None,
            "assumed": self.assumed,
            "disk": dict(self.disk),
            "refused": self.refused,
            "on_host": dict(self.needs.on_host),
        }


def make_forecast(
    start: Planned,
    needs: Needs,
    resume_path: Path | None,
    devices: Devices,
    *,
    timed: bool,
    save_format: str | None = None,
) -> Forecast:
    """Returns what a compilation needs; the model is unchanged afterwards.

    Args:
        needs: what `permtriton.driver.memory.estimate` returns.
        resume_path: path of the states that continue an interrupted run; None for one that starts from scratch.
        timed: whether to run the model on a short sequence and to estimate the time, where the memory is enough and the
            model is whole on such a device.
        save_format: format of the output; None for dense.
    """
    facts, seconds, assumed = start.facts, {}, ""
    refused = refusal(needs, devices, start.config.steps, facts.element)
    if timed and not refused:
        speed = measure(start) if needs.way is Way.WHOLE and start.model.device.type == devices.kind else None
        if speed is None and devices.kind == "cuda":
            speed, assumed = assumed_speed(start, needs, devices), ASSUMED
        if speed is not None:
            held_out = 0 if start.held_out is None else start.held_out.positions
            ranked = replace(facts, low_memory=needs.low_memory, ranks=devices.count)
            seconds = stage_seconds(start.config, ranked, speed, held_out)
    disk = disk_needs(start.config, facts, resume_path, save_format)
    return Forecast(needs, disk, seconds, refused, devices, assumed)


def check_disk(disk: Mapping[str, int], folder: Path) -> None:
    """Refuses a compilation whose files do not fit on the disk.

    Args:
        disk: what is written -> bytes.

    Raises:
        OutputError: the free space is too small.
    """
    needed, free = sum(disk.values()), shutil.disk_usage(folder).free
    if needed > free:
        parts = ", ".join(f"{format_bytes(size)} for {name}" for name, size in disk.items())
        raise OutputError(
            f"the disk of {folder} has {format_bytes(free)} free, but this compilation writes up to "
            f"{format_bytes(needed)} ({parts}): free some space, or choose an `output=` on another disk"
        )


def disk_needs(
    config: CompileConfig, facts: Facts, resume_path: Path | None = None, save_format: str | None = None
) -> dict[str, int]:
    """Returns what a compilation writes -> bytes, in addition to the states that are on the disk already.

    A folder with fewer bytes per weight is made from a dense one, and for a moment both are there.

    Args:
        resume_path, save_format: as `make_forecast` takes them.
    """
    states = sum(step.state_bytes(facts) for step in config.steps)
    dense = facts.model + SMALL_FILES
    sizes = {"the output": dense}
    if (stored := _bytes_per_weight(config, facts, save_format)) != facts.element:
        rewritten = dense - int(facts.pruned * (facts.element - stored))
        sizes = {"the output": rewritten, "the dense folder that it is made from": dense}
    there = sum(path.stat().st_size for path in states_beside(resume_path, config.steps)) if resume_path else 0
    return sizes | ({"states of interrupted runs": max(states - there, 0)} if states else {})


def _bytes_per_weight(config: CompileConfig, facts: Facts, save_format: str | None) -> float:
    """Returns what a format stores of a weight that may be pruned; a scale per row of 8 bits counts nothing."""
    if save_format == Format.PACKED:
        packed = facts.kept * (facts.element + position_bits(config.sparsity.group) / 8)
        return packed + config.dense_share * (facts.element - packed)
    return 1 if save_format == Format.FP8 else facts.element


def stage_seconds(config: CompileConfig, facts: Facts, speed: Speed, held_out: int) -> dict[str, float]:
    """Returns step or stage -> expected time, where the ranks share sequences, channel spaces and linears evenly.

    Args:
        held_out: number of held-out tokens.
    """
    calibrates = config.dense_share or (config.uses_importance and reads_activations(config.importance))
    times = {"calibrate": speed.forward if calibrates else 0, "prove": PROOF_MASKS * speed.masks}
    if held_out:
        times["evaluate"] = 2 * held_out * speed.forward / facts.positions
    if config.generated:
        times["generate"] = facts.longest * speed.token
    if config.dense_share:
        times[DENSE_SHARE] = speed.both
    for step in config.steps:
        read = facts.read_by(step)
        if seconds := step.seconds(read, speed.times(read.sequences / facts.sequences)):
            times[step.name] = seconds
    return times


def measure(start: Planned) -> Speed:
    """Measures the model on a short sequence."""
    model, plan, config, samples = start.model, start.plan, start.config, start.samples
    rows = samples.start(max(PROBE_TOKENS // samples.longest, 1), PROBE_TOKENS)
    with torch.no_grad():
        forward = _seconds(model.device, lambda: last_hidden_state(model, rows))
        masks, assignments = _mask_seconds(model, plan), _assignment_seconds(model, plan, config)
    both = forward * (BOTH + start.facts.checkpointing) if config.gradients else 0.0
    share = samples.positions / rows.positions / ranks.count()
    token = _token_seconds(start) if config.generated else 0.0
    return Speed(forward * share, both * share, masks, assignments / ranks.count(), token)


def assumed_speed(start: Planned, needs: Needs, devices: Devices) -> Speed:
    """Returns the speed of a model on GPUs that are not here; arguments as in `make_forecast`."""
    facts = start.facts
    weights = facts.model / facts.element
    if not start.config.calibration.calibrate_all_experts:
        experts = (module for module in start.model.modules() if isinstance(module, UnstackedExperts))
        weights -= sum(sum(p.numel() for p in e.parameters()) * (1 - share_sent(start.model, e)) for e in experts)
    forward = 2 * weights * facts.positions / devices.count / PRODUCTS
    copy = facts.model / LINK if needs.way is Way.ONLOADED else 0.0
    forward += copy
    both = (BOTH + facts.checkpointing) * forward if start.config.gradients else 0.0
    masks = facts.pruned * FLOAT32 / HOST
    token = _batches(start, devices.count) * facts.model / MEMORY if start.config.generated else 0.0
    distances = 0.0
    for space in (space for space in start.plan.spaces if not space.frozen):
        pairs = sum(size**2 for size in space.segments) / start.plan.pattern_of(space).group
        distances += 3 * SWEEPS * pairs * _rows(start.model, start.plan, space)
    return Speed(forward, both, masks, distances / PRODUCTS / devices.count, token, copy)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Returns the shortest time of at least two runs; the first one warms up."""
    times: list[float] = []
    while len(times) < 2 or (len(times) < PROBES and sum(times) < PROBE_SECONDS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


@torch.no_grad()
def _token_seconds(start: Planned) -> float:
    """Returns the time of one token of each text, without what was written before it."""
    model, samples = start.model, start.samples
    texts = texts_at_once(model, samples.longest, written(start.config.generated))
    ids = samples.start(1, 1).to(model.device).inputs["input_ids"].expand(texts, 1)
    with mixed_precision(model, start.config.mixed_precision, fixed=True):
        seconds = _seconds(model.device, lambda: model(input_ids=ids, use_cache=False))
    return _batches(start, ranks.count()) * seconds


def _batches(start: Planned, ranks: int) -> int:
    """Returns how many times each rank writes as many texts together as it can."""
    texts = ceil(written(start.config.generated) / ranks)
    return ceil(texts / texts_at_once(start.model, start.samples.longest, texts))


def _mask_seconds(model: PreTrainedModel, plan: Plan) -> float:
    weights = {name: weight_in_out(linear_module(model, name)).detach() for _, name in plan.linears()}
    first, weight = next(iter(weights.items()))
    ones = ImportanceFactors(1, torch.ones(weight.shape[0], device=weight.device))
    seconds = _seconds(weight.device, lambda: top_n_mask(ones.scores(weight), plan.patterns[first]))
    return seconds * sum(each.numel() for each in weights.values()) / weight.numel()


def _assignment_seconds(model: PreTrainedModel, plan: Plan, config: CompileConfig) -> float:
    spaces = [space for space in plan.spaces if not space.frozen]
    segments = [size for space in spaces for size in space.segments]
    if not segments or all(step.stage is not Stage.ORDER for step in config.steps):
        return 0.0
    pattern = plan.pattern_of(max(spaces, key=lambda space: max(space.segments)))
    group = pattern.group
    channels = min(PROBE_CHANNELS, max(segments)) // group * group
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(channels, MAX_ROWS, generator=generator).to(model.device)
    index = torch.arange(channels, device=model.device)
    seconds = _seconds(model.device, lambda: reassigned(scores, index, 0, pattern, generator))
    # In parts, sweeps are shorter by the factor by which there are more of them.
    shares = {space.name: _rows(model, plan, space) / MAX_ROWS for space in spaces}
    sizes = sum(shares[space.name] * (size / channels) ** 2 for space in spaces for size in space.segments)
    return seconds * SWEEPS * group * sizes


def _rows(model: PreTrainedModel, plan: Plan, space: ChannelSpace) -> int:
    """Returns how many rows of scores decide the order of a space."""
    rows = sum(
        site.copies * weight_in_out(linear_module(model, name)).shape[1]
        for site in plan.sites_of(space)
        for name in site.linears
    )
    return min(rows, MAX_ROWS)


def duration(seconds: float) -> str:
    """Returns a time in readable form, such as ``40 s``, ``3 min`` or ``2.5 h``."""
    if seconds < 100:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

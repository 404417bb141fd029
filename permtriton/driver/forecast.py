"""How long a compilation will take and how much memory and disk it needs, before the work starts.

Memory and disk follow from the sizes of model and text. The time of a step is that of one forward pass over the
samples, which is extrapolated from a short one, times the number of passes that take as long as the step
(`permtriton.methods.step.Step.passes`): precise enough to tell minutes from hours.
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from permtriton.checkpoint.formats import IN_8_BITS, PACKED
from permtriton.data.generated import written
from permtriton.driver.memory_forecast import Devices, refusal
from permtriton.errors import OutputError
from permtriton.kernels.packing import position_bits
from permtriton.methods.measure.importance import reads_activations
from permtriton.methods.planning import Planned
from permtriton.methods.recipe_config import CompileConfig
from permtriton.methods.sizes import MemoryEstimate, ModelSizes
from permtriton.methods.steps import all_steps
from permtriton.model.experts import UnstackedExperts, share_sent
from permtriton.model.forward import last_hidden_state
from permtriton.running.placement import DevicePlacement
from permtriton.util import ranks
from permtriton.util.machine import format_bytes

PROBE_TOKENS = 512  # most tokens of the pass that is timed
WRITING = 4  # time to write a text, in forward passes over a sample; measured on SmolLM2
# Assumed speed of a GPU on which no pass is timed, about an H100's: bytes of a weight -> operations per second (float32
# without tensor cores), and bytes per second from host memory.
PRODUCTS, LINK = {2: 400e12, 4: 40e12, 8: 40e12}, 20e9
ASSUMED = "if a GPU does 400 TFLOP/s in 16 bits or 40 in 32, and reads 20 GB/s from the host: assumed, not measured"
SMALL_FILES = 1 << 24  # bytes of tokenizer, configs and report


@dataclass(frozen=True)
class Forecast:
    """What a compilation needs."""

    memory: MemoryEstimate  # on each device
    disk: Mapping[str, int]  # what is written -> bytes
    seconds: Mapping[str, float]  # stage -> expected time in seconds; empty where no time was estimated
    refused: str  # why the memory is too small; empty if it is not
    devices: Devices  # what the compilation runs on
    assumed: str = ""  # the assumptions behind ``seconds``; empty if a pass was timed

    def rows(self, folder: Path | None) -> Iterator[tuple[str, str]]:
        """Yields the name and the value of each need; ``folder`` is the output's, or None without an output."""
        memory, devices = self.memory, self.devices
        device = f"each of {devices.count} x {devices.kind}" if devices.count > 1 else devices.kind
        yield "memory", f"{format_bytes(memory.peak)} on {device} at the peak; {format_bytes(devices.free)} free"
        if devices.count > 1 or memory.placement:
            yield "weights", memory.placement.weights
        if self.seconds:
            stages = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in self.seconds.items())
            assumed = f", {self.assumed}" if self.assumed else ""
            yield "time", f"roughly {duration(sum(self.seconds.values()))}{assumed} ({stages})"
        free = f" in {folder}; {format_bytes(shutil.disk_usage(folder).free)} free" if folder is not None else ""
        yield "disk", f"{format_bytes(sum(self.disk.values()))}{free}"
        if memory.host:
            yield "host memory", format_bytes(memory.host)
        if memory.savings:
            yield "to save memory", memory.savings


def make_forecast(
    start: Planned, memory: MemoryEstimate, devices: Devices, save_format: str | None, *, timed: bool
) -> Forecast:
    """Returns what a compilation needs; does not change the model.

    Args:
        timed: whether to estimate the time, if the memory is enough: from a pass over a short sequence if the model is
            whole on a device of this kind, else, for a GPU, from assumed speeds.
    """
    refused = refusal(memory, devices, start.sizes)
    forward, assumed = None, ""
    if timed and not refused:
        if memory.placement is DevicePlacement.WHOLE and start.model.device.type == devices.kind:
            forward = measured_pass(start)
        elif devices.kind == "cuda":
            forward, assumed = assumed_pass(start, memory, devices), ASSUMED
    seconds = {} if forward is None else {stage: passes * forward for stage, passes in stage_passes(start).items()}
    return Forecast(memory, disk_needs(start, save_format), seconds, refused, devices, assumed)


def check_disk(disk: Mapping[str, int], folder: Path) -> None:
    """Refuses a compilation whose files do not fit on the disk."""
    needed, free = sum(disk.values()), shutil.disk_usage(folder).free
    if needed > free:
        parts = ", ".join(f"{format_bytes(size)} for {name}" for name, size in disk.items())
        raise OutputError(
            f"the disk of {folder} has {format_bytes(free)} free, but this compilation writes up to "
            f"{format_bytes(needed)} ({parts}): free some space, or choose an `output=` on another disk"
        )


def disk_needs(start: Planned, save_format: str | None = None) -> dict[str, int]:
    """Returns what a compilation writes -> bytes, in addition to the states that are on the disk already.

    A folder with fewer bytes per weight is made from a dense one, and for a moment both exist.
    """
    config, sizes = start.config, start.sizes
    states = sum(step.state_bytes(sizes) for step in config.steps)
    dense = sizes.model + SMALL_FILES
    files = {"the output": dense}
    if (stored := _bytes_per_weight(config, sizes, save_format)) != sizes.element:
        rewritten = dense - int(sizes.pruned * (sizes.element - stored))
        files = {"the output": rewritten, "the dense folder that it is made from": dense}
    there = sum(path.stat().st_size for paths in start.workspace.states.values() for path in paths)
    return files | ({"states of interrupted runs": max(states - there, 0)} if states else {})


def _bytes_per_weight(config: CompileConfig, sizes: ModelSizes, save_format: str | None) -> float:
    """Returns the bytes that a format stores per weight of a prunable linear, without the row scales of 8 bits."""
    element = 1 if save_format in IN_8_BITS else sizes.element
    if save_format in PACKED:
        packed = sizes.kept * (element + position_bits(config.sparsity.group) / 8)
        return packed + config.dense_share * (sizes.element - packed)
    return element


def stage_passes(start: Planned) -> dict[str, float]:
    """Returns step or stage -> its time as a number of forward passes over the calibration samples."""
    config, sizes, passes = start.config, start.sizes, dict[str, float]()
    if config.uses_importance and reads_activations(config.importance):
        passes["calibrate"] = 1
    if start.held_out is not None:
        passes["evaluate"] = 2 * start.held_out.positions / sizes.positions
    if config.generated:
        passes["generate"] = WRITING * written(config.generated) / sizes.sequences
    for step in all_steps(config):
        read = step.sizes(sizes)
        passes[step.name] = step.passes(read) * read.sequences / sizes.sequences
    return passes


@torch.no_grad()
def measured_pass(start: Planned) -> float:
    """Returns the seconds of a forward pass over the calibration samples, which the ranks share."""
    model, samples = start.model, start.samples
    rows = samples.start(max(PROBE_TOKENS // samples.longest, 1), PROBE_TOKENS)
    times = []
    for _ in range(2):  # the first one warms up
        started = time.perf_counter()
        last_hidden_state(model, rows)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        times.append(time.perf_counter() - started)
    return min(times) * samples.positions / rows.positions / ranks.count()


def assumed_pass(start: Planned, memory: MemoryEstimate, devices: Devices) -> float:
    """Returns the seconds of a forward pass over the calibration samples on GPUs, at `PRODUCTS` and `LINK`."""
    sizes = start.sizes
    weights = sizes.model / sizes.element
    if not start.config.calibration.calibrate_all_experts:
        experts = (module for module in start.model.modules() if isinstance(module, UnstackedExperts))
        weights -= sum(sum(p.numel() for p in e.parameters()) * (1 - share_sent(start.model, e)) for e in experts)
    copy = sizes.model / LINK if memory.placement is DevicePlacement.ONLOADED else 0.0
    return 2 * weights * sizes.positions / devices.count / PRODUCTS[sizes.element] + copy


def duration(seconds: float) -> str:
    """Returns a time in readable form, such as ``40 s``, ``3 min`` or ``2.5 h``."""
    if seconds < 100:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

"""Chooses the model's placement by memory, and refuses what that rules out.

`permtriton.model.source.resolve_device` reads the option ``device``.
"""

from dataclasses import replace

import torch
from torch import nn

from permtriton.driver.memory_forecast import GENERATION, Devices, estimate, estimate_together
from permtriton.errors import ConfigError
from permtriton.methods.measure.importance import inverts_hessians
from permtriton.methods.planning import Planned, plan_model
from permtriton.methods.recipe_config import CompileConfig
from permtriton.methods.sizes import MemoryEstimate
from permtriton.recipe import suggested
from permtriton.running.onload import onloading_refusal
from permtriton.running.placement import DevicePlacement
from permtriton.util import ranks
from permtriton.util.machine import available_memory, format_bytes
from permtriton.util.progress import Progress

META = torch.device("meta")  # where a model is whose weights were not fetched


def place(start: Planned, device: torch.device, devices: Devices) -> tuple[Planned, MemoryEstimate, Devices]:
    """Decides how the model is placed on ``devices``, and whether activations are recomputed.

    A model whose weights are here moves to ``device`` if that holds it whole. No text is generated if no GPU does.
    """
    memory = estimate_together(start, devices)
    onloads = memory.placement is DevicePlacement.ONLOADED
    if start.config.generated and any(ranks.gather(onloads and not memory.fits(devices.free, GENERATION))):
        reason = f"the dense model writes text only where a GPU holds all of it, {format_bytes(start.sizes.model)}"
        start = replace(start, config=without_text(start.config, reason, start.workspace.progress))
        memory = estimate_together(start, devices)
    placement = max(ranks.gather(memory.placement))  # if one rank cannot hold the whole model, none holds it
    check_placement(placement, start, devices)
    devices, here = replace(devices, placements=(placement,)), start.model.device
    if placement is DevicePlacement.WHOLE and here not in (device, META) and memory.fits(devices.free):
        nn.Module.to(start.model, device)
        devices = replace(devices, free=available_memory(device))
        plan, graph = plan_model(start.model, start.config, start.samples)  # a graph runs only where it was traced
        start = replace(start, plan=plan, graph=graph)
    return start, estimate(start, devices, recomputes=memory.recomputes), devices


def without_text(config: CompileConfig, reason: str, progress: Progress) -> CompileConfig:
    """Returns a config without generated text, which the model cannot write; refuses if the user asked for text."""
    if config.generated != suggested(config).get("generated", 0):
        raise ConfigError(f"`generated={config.generated}`: {reason}. Leave it out, or give `generated=0`")
    progress.say(f"no text is generated: {reason}")
    return replace(config, calibration=replace(config.calibration, generated=0))


def check_placement(placement: DevicePlacement, start: Planned, devices: Devices) -> None:
    """Checks, before any work, that a compilation can run with this placement of the model."""
    config = start.config
    if placement is DevicePlacement.SPREAD:
        if config.generated:
            raise ConfigError(
                f"the dense model does not write text while {placement.words}: give `generated=0`, or use GPUs that "
                "hold the whole model"
            )
        check_spread(config, len(start.samples), devices.count)
    if placement is not DevicePlacement.ONLOADED:
        return
    if devices.kind == "cpu":
        raise ConfigError("`onload=True` is for a GPU, but the device is cpu: leave it out")
    if reason := onloading_refusal(start.model, start.plan):
        raise ConfigError(
            f"the layers of this {type(start.model).__name__} cannot come to the GPU one by one: {reason}"
        )
    if refused := [step.name for step in config.steps if not step.onloads]:
        raise ConfigError(
            f"the step {refused[0]} needs all weights at once, which is not done while {placement.words}: leave "
            f"{refused[0]} out of `recipe=`, or use GPUs that hold the whole model (`onload=False`)"
        )


def check_spread(config: CompileConfig, samples: int, count: int) -> None:
    """Checks, before any work, that a compilation can run a model whose layers are spread over ``count`` ranks."""
    if count == 1:
        raise ConfigError("`shard=True` spreads weights over several processes: start permtriton with torchrun")
    if refused := [step.name for step in config.steps if not step.shards]:
        raise ConfigError(
            f"the step {refused[0]} changes weights while the model runs, which is not done with layers that are "
            "spread over GPUs: leave it out of `recipe=` (and prune with mask), or use GPUs that hold the whole model "
            "(`shard=False`)"
        )
    # While Hessians are measured, layers that cannot take several samples run on one at a time.
    ranks.check_in_step(samples, 1 if inverts_hessians(config.importance) else config.micro_batch_size, count)
    for rows in {rows for step in config.steps for rows in step.batches(samples)}:
        ranks.check_in_step(rows, config.micro_batch_size, count)

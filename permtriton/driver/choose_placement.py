"""Chooses the model's placement by memory, and refuses options that the placement rules out.

`permtriton.model.source.resolve_device` reads the option ``device``.
"""

from dataclasses import replace

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from permtriton.driver.memory_forecast import Devices, estimate, keeps_more
from permtriton.errors import ConfigError
from permtriton.methods.measure.importance import inverts_hessians
from permtriton.methods.planning import Planned, plan_model
from permtriton.methods.recipe_config import CompileConfig
from permtriton.methods.sizes import MemoryEstimate
from permtriton.recipe import suggested
from permtriton.running.onload import onloading_refusal
from permtriton.running.placement import DevicePlacement
from permtriton.util import ranks
from permtriton.util.machine import available_memory
from permtriton.util.progress import Progress

META = torch.device("meta")  # device of a model whose weights were not fetched
PREFERENCE = (DevicePlacement.WHOLE, DevicePlacement.SPREAD, DevicePlacement.ONLOADED)


def place(start: Planned, device: torch.device, devices: Devices) -> tuple[Planned, MemoryEstimate, Devices]:
    """Decides how the model is placed on ``devices``, and whether activations are recomputed.

    A model whose weights are on this machine moves to ``device`` if the device holds it whole. No text is generated if
    the model's layers come to the device one by one.
    """
    memory = choose(start, devices)
    if start.config.generated and any(ranks.gather(memory.placement is DevicePlacement.ONLOADED)):
        reason = "the dense model writes no text while its layers come to the GPU one by one"
        start = replace(start, config=without_text(start.config, reason, start.workspace.progress))
        memory = choose(start, devices)
    placement = max(ranks.gather(memory.placement))  # if one rank cannot hold the whole model, none holds it
    if reason := placement_refusal(placement, start, devices):
        raise ConfigError(reason)
    if placement is DevicePlacement.SPREAD:
        check_in_step(start.config, len(start.samples), devices.count)
    if placement is DevicePlacement.WHOLE and start.model.device not in (device, META) and memory.fits(devices.free):
        nn.Module.to(start.model, device)
        devices = replace(devices, free=available_memory(device))
        plan, graph = plan_model(start.model, start.config, start.samples)  # a graph runs only where it was traced
        start = replace(start, plan=plan, graph=graph)
    return start, estimate(start, devices, placement, recomputes=memory.recomputes), devices


def choose(start: Planned, devices: Devices) -> MemoryEstimate:
    """Returns the estimate of `first_fitting`, with activations recomputed unless all fits in half of the free memory.

    The other half is for what the estimate leaves out. All ranks recompute if one of them has to.
    """
    needs = first_fitting(start, devices)
    roomy = needs.placement is DevicePlacement.WHOLE and needs.fits(devices.free // 2) and not keeps_more(start)
    if all(ranks.gather(roomy)) or not start.config.gradients or start.config.activation_checkpointing:
        return needs
    return first_fitting(start, devices, recomputes=True)


def first_fitting(start: Planned, devices: Devices, *, recomputes: bool = False) -> MemoryEstimate:
    """Returns the estimate for the first allowed and possible placement whose memory is enough.

    If none fits, returns the estimate for the first placement other than whole, or for whole if there is no other.
    """
    allowed = devices.placements
    if len(allowed) > 1:
        spreads = devices.kind != "cpu" and bool(start.layer_bytes)  # on a CPU, ranks share the memory
        possible = [p for p in PREFERENCE if p in allowed and not placement_refusal(p, start, devices)]
        allowed = tuple(p for p in possible if spreads or p is not DevicePlacement.SPREAD) or allowed[:1]
    estimates = [estimate(start, devices, placement, recomputes=recomputes) for placement in allowed]
    last = next((one for one in estimates if one.placement is not DevicePlacement.WHOLE), estimates[0])
    return next((one for one in estimates if one.fits(devices.free)), last)


def placement_refusal(placement: DevicePlacement, start: Planned, devices: Devices) -> str:
    """Returns why a compilation cannot run with this placement of the model, and what to do; empty if it can."""
    config = start.config
    if placement is DevicePlacement.SPREAD:
        if any(isinstance(module, Conv1D) for module in start.model.modules()):
            return (
                f"weights of {type(start.model).__name__} are stored transposed, so its layers cannot be spread over "
                "GPUs: let them come to the GPU one by one (`onload=True`), or use GPUs that hold the whole model"
            )
        if config.generated:
            return (
                "the dense model does not write text while its layers are spread over GPUs: give `generated=0`, or use "
                "GPUs that hold the whole model"
            )
        if devices.count == 1:
            return "`shard=True` spreads weights over several processes: start permtriton with torchrun"
        if refused := [step.name for step in config.steps if not step.shards]:
            return (
                f"the step {refused[0]} changes weights while the model runs, which is not done with layers that are "
                "spread over GPUs: leave it out of `recipe=` (and prune with mask), or use GPUs that hold the whole "
                "model (`shard=False`)"
            )
    if placement is DevicePlacement.ONLOADED:
        if devices.kind == "cpu":
            return "`onload=True` is for a GPU, but the device is cpu: leave it out"
        if reason := onloading_refusal(start.model, start.plan):
            return f"the layers of this {type(start.model).__name__} cannot come to the GPU one by one: {reason}"
        if refused := [step.name for step in config.steps if not step.onloads]:
            return (
                f"the step {refused[0]} needs all weights at once, which is not done while layers come to the GPU one "
                f"by one: leave {refused[0]} out of `recipe=`, or use GPUs that hold the whole model (`onload=False`)"
            )
    return ""


def check_in_step(config: CompileConfig, samples: int, count: int) -> None:
    """Refuses samples that ``count`` ranks, over which layers are spread, cannot run equally often."""
    # While Hessians are measured, layers that cannot take several samples run on one at a time.
    ranks.check_in_step(samples, 1 if inverts_hessians(config.importance) else config.micro_batch_size, count)
    for batch in {min(step.backward_batch, samples) for step in config.steps if step.backward_batch}:
        for rows in (batch, samples % batch or batch):  # the last batch of an epoch may be smaller
            ranks.check_in_step(rows, config.micro_batch_size, count)


def without_text(config: CompileConfig, reason: str, progress: Progress) -> CompileConfig:
    """Returns a config without generated text, which the model cannot write; refuses if the user set the option."""
    if config.generated != suggested(config).get("generated", 0):
        raise ConfigError(f"`generated={config.generated}`: {reason}. Leave it out, or give `generated=0`")
    progress.say(f"no text is generated: {reason}")
    return replace(config, calibration=replace(config.calibration, generated=0))

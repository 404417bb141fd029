"""Estimates the memory that a compilation needs at its peak, so that one that does not fit is refused at the start.

On a CPU the estimate is of the whole process, as ``top`` shows it (resident memory): Python and its libraries, the
model, and what the largest stage needs beside it. Pages of a mapped safetensors file count while they are in memory,
though the kernel can reclaim them: weights are mapped, and become the process's own memory as soon as they change. On a
GPU the estimate is of the tensors there.
"""

from dataclasses import dataclass, replace

import torch

from permtriton.data.generated import kept_of_text, texts_at_once, written
from permtriton.methods.measure.importance import inverts_hessians
from permtriton.methods.planning import Planned
from permtriton.methods.sizes import FLOAT32, Memory, MemoryEstimate, ModelSizes
from permtriton.methods.step import Stage
from permtriton.methods.steps import all_steps
from permtriton.model.experts import stacked_name
from permtriton.model.forward import windows_at_once
from permtriton.running.placement import DevicePlacement
from permtriton.util import ranks
from permtriton.util.machine import available_memory, format_bytes, resident_memory


@dataclass(frozen=True)
class Devices:
    """What a compilation runs on."""

    kind: str  # ``cpu`` or ``cuda``
    count: int  # number of processes, one per GPU; on a CPU, processes share the memory
    free: int  # bytes that are free for each process
    # how the model may be placed; memory decides between several placements
    placements: tuple[DevicePlacement, ...] = tuple(DevicePlacement)
    # bytes of host memory that are free for each process beside its GPU; None if that is not known
    host: int | None = None

    @classmethod
    def of(cls, device: torch.device, placements: tuple[DevicePlacement, ...] = tuple(DevicePlacement)) -> "Devices":
        """Returns the devices of all ranks, assuming that each has as much free memory as this one's."""
        free, host = available_memory(device), available_memory(torch.device("cpu")) // ranks.count_here()
        return cls(device.type, ranks.count(), host if device.type == "cpu" else free, placements, host)


def estimate(
    start: Planned, devices: Devices, placement: DevicePlacement, *, recomputes: bool = False
) -> MemoryEstimate:
    """Estimates the memory of a compilation; ``recomputes``: whether backward passes recompute activations."""
    sizes = replace(start.sizes, checkpointing=start.sizes.checkpointing or recomputes)
    program, held, model, layers = 0, 0, sizes.model, start.layer_bytes
    two_layers = model + 2 * max(layers, default=0) - sum(layers)  # in place of all: one, and the next or a copy
    if placement is DevicePlacement.ONLOADED:
        needs = _needs(start, replace(sizes, checkpointing=True))  # layers run again in backward passes
        stages = {name: need.device for name, need in needs.items()}
        host = model + max(need.movable for need in needs.values())
        return MemoryEstimate(placement, 0, two_layers, 0, stages, host, recomputes=recomputes)
    if placement is DevicePlacement.SPREAD:
        stages = _stages(start, replace(sizes, shares=devices.count, low_memory=True))
        share = -(-sum(layers) // devices.count)
        return MemoryEstimate(placement, 0, two_layers + share, 0, stages, recomputes=recomputes)
    if devices.kind == "cpu":
        resident, mapped = resident_memory()
        program, held = max(resident - model, 0), resident - min(mapped, model)
    elif start.model.device.type == devices.kind:
        held = model
    whole = MemoryEstimate(placement, program, model, held, _stages(start, sizes), recomputes=recomputes)
    if whole.fits(devices.free):
        return whole
    stages = _stages(start, replace(sizes, low_memory=True))
    return replace(whole, stages=stages, low_memory=stages != whole.stages)


def keeps_more(start: Planned) -> bool:
    """Whether a pass may keep several times the activations of the estimate, which is based on a LLaMA's."""
    model, plan = start.model, start.plan
    text = model.config.get_text_config()
    return (
        # A token is sent to several experts.
        any(site.is_routed or stacked_name(model, name) for site, name in plan.linears())
        or any(site.num_calls > 1 for site in plan.sites)
        or len(plan.layers()) < (getattr(text, "num_hidden_layers", None) or 0)  # layers not in the plan keep some, too
        or getattr(text, "_attn_implementation", None) == "eager"  # which keeps the attention scores
    )


def _stages(start: Planned, sizes: ModelSizes) -> dict[str, int]:
    return {name: need.total for name, need in _needs(start, sizes).items()}


def _needs(start: Planned, sizes: ModelSizes) -> dict[str, Memory]:
    """Returns stage or step -> its memory."""
    model, config = start.model, start.config
    proof = 2 * max(p.numel() for p in model.parameters()) * (sizes.element + FLOAT32)  # two permuted weights, widened
    needs = {"calibration": Memory(sizes.forward), "masks": Memory(0, sizes.mask + proof)}
    if config.uses_importance and inverts_hessians(config.importance):
        needs["hessians"] = sizes.layer_by_layer
    if (held_out := start.held_out) is not None:
        at_once = min(windows_at_once(held_out.longest), len(held_out)) * held_out.tokens
        logits = at_once * sizes.vocabulary * 3 * FLOAT32  # logits, their float32 copy, the softmax
        needs["evaluation"] = Memory(logits + sizes.forward)
    if config.generated:
        texts = texts_at_once(model, sizes.longest, written(config.generated))
        rounded = sizes.model // 2 if config.mixed_precision and sizes.element == FLOAT32 else 0
        needs["generation"] = Memory(sizes.forward + texts * kept_of_text(model, sizes.longest) + rounded)
    steps = all_steps(config)
    for number, step in enumerate(steps):
        need, held = step.memory(step.sizes(sizes)), 0
        if step.stage is not Stage.ORDER:  # from pruning on, dense weights and targets of later steps are held
            held += any(later.dense_weights for later in steps[number:]) * sizes.pruned * sizes.element
            held += sum(later.sizes(sizes).targets for later in steps[number + 1 :] if later.objective)
        needs[step.name] = Memory(need.device, need.movable + held)
    return needs


def refusal(needs: MemoryEstimate, devices: Devices, sizes: ModelSizes) -> str:
    """Returns why the memory is too small for a compilation; empty if it is not.

    Memory that the process holds already is not needed again.
    """
    # Pages of the model that are mapped from its files become the process's own as soon as they change.
    host = needs.host - max(sizes.model - resident_memory()[1], 0)
    if needs.host and devices.host is not None and host > devices.host:
        place, added, free = "the host, where the model stays,", host, devices.host
    elif not needs.fits(devices.free):
        device = f"each {devices.kind} device" if devices.count > 1 else devices.kind
        place = f"{device} for {needs.largest}"
        added, free = needs.added, devices.free
    else:
        return ""
    return (
        f"this compilation needs about {format_bytes(added)} more on {place} than it holds now, but only "
        f"{format_bytes(free)} are free: lower `sequence_length=` or `samples=` (`micro_batch_size=` first, where "
        "gradients are computed; for evaluation `eval_data=none`), choose `dtype=bfloat16`, or use a larger machine"
    )

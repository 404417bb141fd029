"""Estimates the memory that a compilation needs at its peak, so that one that does not fit is refused at the start.

On a CPU the estimate is of the whole process, as ``top`` shows it (resident memory): Python and its libraries, the
model, and what the largest stage needs beside it. Pages of a safetensors file that is mapped count while they are in
memory, though the kernel can give them up: weights are read that way, and become the process's own memory as soon as
they change. On a GPU the estimate is of the tensors there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from permtriton.data.generated import kept_of_text, texts_at_once, written
from permtriton.driver.planning import Planned
from permtriton.methods.compile_config import CompileConfig
from permtriton.methods.measure.importance import inverts_hessians
from permtriton.methods.needs import RELOADING, Needs
from permtriton.methods.prune.dense_share import DENSE_SHARE
from permtriton.methods.step import FLOAT32, ModelSizes, Stage, Step
from permtriton.model.experts import stacked_name
from permtriton.model.forward import windows_at_once
from permtriton.running import ranks
from permtriton.running.onload import why_not_onloaded
from permtriton.running.placement import Way
from permtriton.util.machine import available_memory, format_bytes, resident_memory

RUNS_THE_MODEL = "activations"  # a use of every stage that runs the model
ON_DEVICE = {RUNS_THE_MODEL, "scores"}  # a stage without such a use works on the host
SPREAD = ("dense weights", "gradients")  # uses that each device holds its share of, where weights are spread
GENERATION = "generation"  # the stage in which the dense model writes text, for which all of it is on the device
IN_PLACE = "the model"
# What stands in host memory, where layers come to a GPU one by one.
ON_HOST = (
    "inputs of layers", "inputs of sites", "targets", "targets of later steps", "dense weights", "finished weights",
    "weights before", "moments", "collected gradients", "a second model", "output gradients",
)  # fmt: skip


@dataclass(frozen=True)
class Devices:
    """What a compilation runs on.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        count: number of processes, each with a device of its own; on one CPU they share its memory.
        free: bytes that are free for each.
        ways: how the model may be placed; of several, memory decides.
        host: bytes of host memory that are free for each process beside its GPU; None where that is not known.
    """

    kind: str
    count: int
    free: int
    ways: tuple[Way, ...] = tuple(Way)
    host: int | None = None

    @classmethod
    def of(
        cls,
        device: torch.device,
        count: int = 1,
        ways: tuple[Way, ...] = tuple(Way),
    ) -> "Devices":
        """Returns the devices of this process and of the others like it."""
        free, host = available_memory(device), available_memory(torch.device("cpu")) // ranks.count_here()
        return cls(device.type, count, host if device.type == "cpu" else free, ways, host)


def estimate(start: Planned, devices: Devices) -> Needs:
    """Estimates the memory of a compilation on each device.

    It also decides how the model is placed on the devices, and whether steps save memory.
    """
    size, sizes = start.sizes.model, start.sizes
    stages = _stages(start, sizes)
    program, held = 0, size if start.model.device.type == devices.kind else 0
    if devices.kind == "cpu":
        resident, mapped = resident_memory()
        program, held = max(resident - size, 0), resident - min(mapped, size)
    needs = Needs(program, size, held, stages, recomputes=start.recomputes)
    if not fits(needs, devices):
        stages = _stages(start, replace(sizes, low_memory=True))
        if stages != needs.stages:
            needs = replace(needs, stages=stages, low_memory=True)
    return _placed(needs, start, devices)


def spared(start: Planned, devices: Devices) -> tuple[Planned, Needs]:
    """Returns the start and its needs, with activations recomputed unless everything fits in half of the free memory.

    The other half is for what the estimate leaves out. All ranks do what the one with the least memory has to.
    """
    needs = estimate(start, devices)
    fits_twice = fits(needs, replace(devices, free=devices.free // 2))
    roomy = needs.way is Way.WHOLE and fits_twice and not _keeps_more(start)
    if all(ranks.gather(roomy)) or not start.config.gradients or start.config.activation_checkpointing:
        return start, needs
    start = replace(start, recomputes=True)
    return start, estimate(start, devices)


def _keeps_more(start: Planned) -> bool:
    """Whether a pass may keep several times the activations of the estimate, which knows those of a LLaMA."""
    model, plan = start.model, start.plan
    text = model.config.get_text_config()
    return (
        # A token is sent to several experts.
        any(site.routed or stacked_name(model, name) for site, name in plan.linears())
        or any(site.calls > 1 for site in plan.sites)
        or len(plan.layers()) < (getattr(text, "num_hidden_layers", None) or 0)  # the others keep theirs, too
        or getattr(text, "_attn_implementation", None) == "eager"  # which keeps its scores
    )


def _placed(whole: Needs, start: Planned, devices: Devices) -> Needs:
    """Returns the needs of a model where it is placed: the first way that is allowed and fits, else one that can be."""
    needs = {
        Way.WHOLE: lambda: whole,
        Way.SPREAD: lambda: _spread(whole, start, devices.count),
        Way.ONLOADED: lambda: _onloaded(whole, start),
    }
    if len(devices.ways) == 1:
        return needs[devices.ways[0]]()
    if devices.kind == "cpu" or (Way.WHOLE in devices.ways and fits(whole, devices)):
        return whole
    steps = start.config.steps
    possible = {
        Way.SPREAD: devices.count > 1
        and not start.config.generated
        and all(step.shards for step in steps)
        and start.layers,
        Way.ONLOADED: all(step.onloads for step in steps) and not why_not_onloaded(start.model, start.plan),
    }
    choices = [needs[way]() for way, can_be in possible.items() if can_be and way in devices.ways]
    return next((each for each in choices if fits(each, devices)), choices[0] if choices else needs[devices.ways[0]]())


def fits(needs: Needs, devices: Devices, stage: str | None = None) -> bool:
    """Whether a stage fits on each device; by default the largest one, but for the check that may be left out."""
    return needs.added(stage or needs.largest_needed) <= devices.free


def _spread(whole: Needs, start: Planned, count: int) -> Needs:
    """Returns the needs where each device holds a share of the layers, and two layers at a time as a whole."""
    layers = sum(start.layers)
    resident = whole.model - layers + -(-layers // count) + 2 * max(start.layers)
    stages = {
        stage: {use: -(-size // count) if use in SPREAD else size for use, size in uses.items()}
        for stage, uses in whole.stages.items()
        if not ON_DEVICE.isdisjoint(uses)
    }
    return replace(whole, model=resident, held=0, stages=stages, way=Way.SPREAD)


def _onloaded(whole: Needs, start: Planned) -> Needs:
    """Returns the needs where each device holds one layer at a time, with the values of two models where there are."""
    resident = whole.model - sum(start.layers) + 2 * max(start.layers)
    beside, stages = 0, {}
    for stage, uses in _stages(start, replace(start.sizes, one_layer=True)).items():
        if stage != RELOADING:  # which is left out where a second model does not fit
            beside = max(beside, sum(size for use, size in uses.items() if use in ON_HOST))
        if not ON_DEVICE.isdisjoint(uses):
            stages[stage] = {use: size for use, size in uses.items() if use not in ON_HOST}
        if stage == GENERATION:
            stages[stage]["the other layers"] = whole.model - resident
    host = {IN_PLACE: start.sizes.model, "copies of weights and inputs of layers": beside}
    onloaded = replace(whole, model=resident, held=0, stages=stages, low_memory=False)
    return replace(onloaded, way=Way.ONLOADED, on_host=host)


def _stages(start: Planned, sizes: ModelSizes) -> dict[str, dict[str, int]]:
    """Returns what a compilation is doing -> use -> bytes."""
    model, config = start.model, start.config
    largest = max(p.numel() for p in model.parameters())
    proof = 2 * largest * (sizes.element + FLOAT32)  # of a permuted weight, widened
    activations = {RUNS_THE_MODEL: sizes.forward}
    stages = {"calibration": activations, "masks": {"one layer": sum(sizes.mask().values()) + proof}}
    if config.uses_importance and inverts_hessians(config.importance):
        stages["hessians"] = sizes.layer_by_layer()
    if (held_out := start.held_out) is not None:
        at_once = min(windows_at_once(held_out.longest), len(held_out)) * held_out.tokens
        logits = at_once * sizes.vocabulary * 3 * FLOAT32  # logits, their float32 copy, the softmax
        stages["evaluation"] = {"logits": logits, **activations}
    if config.generated:
        texts = texts_at_once(model, sizes.longest, written(config.generated))
        kept = {name: texts * size for name, size in kept_of_text(model, sizes.longest).items()}
        if config.mixed_precision and sizes.element == FLOAT32 and not sizes.one_layer:
            kept["rounded weights"] = sizes.model // 2
        stages[GENERATION] = {**activations, **kept}
    if config.dense_share:
        stages[DENSE_SHARE] = sizes.gradients()
    for number, step in enumerate(config.steps):
        # From pruning on, the dense weights are kept as long as a step needs them.
        keeps = step.stage is not Stage.ORDER and any(later.dense_weights for later in config.steps[number:])
        held = {"dense weights": sizes.pruned * sizes.element} if keeps else {}
        minimising = [later for later in config.steps[number + 1 :] if later.objective]
        if minimising and step.stage is not Stage.ORDER:
            held["targets of later steps"] = sum(sizes.samples_for(each).targets()["targets"] for each in minimising)
        stages |= {stage: {**held, **uses} for stage, uses in step.needs(sizes.samples_for(step)).items()}
    return stages | {RELOADING: {"a second model": sizes.model}}


def refusal(needs: Needs, devices: Devices, steps: Sequence[Step] = (), element: int = FLOAT32) -> str:
    """Returns why a compilation cannot run: it needs more memory, in addition to what it holds already, than is free.

    The text names the largest use and the options to change; it is empty if the memory is enough.

    Args:
        element: bytes of a weight.
    """
    stage = needs.largest_needed
    if needs.way is Way.ONLOADED and devices.host is not None:
        # Pages of the model that are mapped from its files become the process's own as soon as they change.
        mapped = min(resident_memory()[1], needs.on_host[IN_PLACE])
        host = mapped + sum(size for name, size in needs.on_host.items() if name != IN_PLACE)
        if host > devices.host:
            choices = [f"`{step.saves_memory}`" for step in steps if step.saves_memory]
            return (
                f"this compilation needs about {format_bytes(host)} more host memory, because the model stays there "
                f"while its layers come to the GPU one by one, but only {format_bytes(devices.host)} are free: use a "
                f"machine with more memory, fewer processes, {''.join(f'{choice}, ' for choice in choices)}or lower "
                "`samples=`"
            )
    if fits(needs, devices):
        return ""
    uses = needs.stages[stage]
    largest = max(uses, key=lambda use: uses[use])
    each = f"each {devices.kind} device" if devices.count > 1 else devices.kind
    lower = "`sequence_length=` or `samples=` (`micro_batch_size=` first, where gradients are computed)"
    if (stage, largest) == ("evaluation", "logits"):
        lower = "what is measured (`eval_data=` with a shorter text, or `eval_data=none`)"
    narrow = ["`dtype=bfloat16`"] if element == FLOAT32 else []
    choices = [*narrow, *(f"`{step.saves_memory}`" for step in steps if step.saves_memory and step.name == stage)]
    advice = f"lower {lower}" + (f", or choose {', '.join(choices)}" if choices else "")
    # The rest of such a stage grows with the text.
    model = needs.program + needs.model - needs.held
    least = model + sum(uses.get(use, 0) for use in ("hessians", "one layer"))
    if "hessians" in uses and model < devices.free < least:
        other = " or ".join([*narrow, "`recipe=heuristic,mask` without `importance=obs`"])
        advice = f"that is too little for Hessians of any text: choose {other}"
    return (
        f"this compilation needs about {format_bytes(needs.added(stage))} more on {each} than it holds now, "
        f"including {format_bytes(uses[largest])} for {largest} ({stage}), but only {format_bytes(devices.free)} are "
        f"free: {advice}, or use a larger machine"
    )


def describe_low_memory(needs: Needs, config: CompileConfig) -> str:
    """Returns what steps do because memory is short; empty if it is not."""
    steps = [step.low_memory_words for step in config.steps if needs.low_memory and step.low_memory_words]
    return "; ".join([*(["backward passes recompute activations"] if needs.recomputes else []), *steps])


def describe_weights(needs: Needs) -> str:
    """Returns where the weights are while the model runs on several devices."""
    if needs.way is Way.ONLOADED:
        return "in host memory, from which each layer comes to the device when it runs"
    if needs.way is Way.SPREAD:
        return "spread over the devices layer by layer (FSDP2), and whole in host memory"
    return "whole on each device"

"""Estimates the memory that a compilation needs at its peak, so that one that does not fit is refused at the start.

On a CPU the estimate is of the whole process, as ``top`` shows it (resident memory): Python and its libraries, the
model, and what the largest stage needs beside it. Pages of a safetensors file that is mapped count while they are in
memory, though the kernel can give them up: weights are read that way, and become the process's own memory as soon as
they change. On a GPU the estimate is of the tensors there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from permtriton.config import CompileConfig
from permtriton.data.samples import Inputs, Samples
from permtriton.evaluation.perplexity import windows_at_once
from permtriton.machine import available_memory, format_bytes, resident_memory
from permtriton.methods.heuristic_order import MAX_ROWS
from permtriton.methods.swap_search import GAINS_AT_ONCE
from permtriton.model.core import has_head
from permtriton.model.forward import TOKENS_WITHOUT_LOGITS
from permtriton.model.plan import Plan, layer_modules, linear_module

FLOAT32 = 4
MASK_TEMPORARIES = 6  # float32 copies of a weight that are alive at once in the mask's forward and backward passes
LEARNING = "learning"
RUN_THE_MODEL = ("calibration", "hessians", "evaluation", "row weights", LEARNING, "search")  # others run on the host
SPREAD = ("dense weights", "gradients")  # uses that each device holds its share of, where weights are spread
RELOADING = "reloading"  # the stage that is left out where a second model does not fit
IN_PLACE = "the model"
# What stands in files of an offload folder, where there is one.
IN_FILES = ("inputs of layers", "targets", "dense weights", "finished weights", "a second model")


@dataclass(frozen=True)
class Devices:
    """What a compilation runs on.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        count: number of processes, each with a device of its own; on one CPU they share its memory.
        free: bytes that are free for each; None if the system does not report it.
        spread: whether the weights of layers are spread over the devices while the model runs, see
            `permtriton.running.sharding`; None where memory decides.
        offloaded: whether the model and the largest tensors beside it are in files, of which few pages are in memory.
    """

    kind: str
    count: int = 1
    free: int | None = None
    spread: bool | None = None
    offloaded: bool = False

    @classmethod
    def of(
        cls, device: torch.device, count: int = 1, spread: bool | None = None, *, offloaded: bool = False
    ) -> "Devices":
        """Returns the devices of this process and of the others like it."""
        free = available_memory(device)
        return cls(device.type, count, free // count if free and device.type == "cpu" else free, spread, offloaded)


@dataclass(frozen=True)
class Needs:
    """The memory of one compilation, in bytes.

    Attributes:
        program: what the process holds beside the model before the work begins; 0 on a GPU.
        model: parameters; with an offload folder, those of one layer and of what stands outside of layers.
        held: what is in memory already and is not given up: the program, and a model that is not mapped from its files.
        stages: stage -> use -> bytes beside program and model.
        keep_masked: whether learning keeps masked weights and their gradients through a step, because both fit.
        spread: whether the weights of layers are spread over the devices, because they do not fit one.
        offloaded: what stands in files of the offload folder -> bytes; empty without one.
    """

    program: int
    model: int
    held: int
    stages: Mapping[str, Mapping[str, int]]
    keep_masked: bool = False
    spread: bool = False
    offloaded: Mapping[str, int] = field(default_factory=dict)

    @property
    def largest(self) -> str:
        """The stage that needs the most."""
        return max(self.stages, key=self.extra)

    def extra(self, stage: str) -> int:
        """Returns what a stage needs beside program and model."""
        return sum(self.stages[stage].values())

    def added(self, stage: str) -> int:
        """Returns what a stage needs beyond what is held."""
        return self.program + self.model + self.extra(stage) - self.held

    @property
    def largest_needed(self) -> str:
        """The stage that needs the most of those that no compilation leaves out."""
        return max((stage for stage in self.stages if stage != RELOADING), key=self.extra)

    @property
    def peak(self) -> int:
        """The most that is in use at once."""
        return self.program + self.model + self.extra(self.largest)

    def report(self) -> dict[str, object]:
        """Returns everything, for the report."""
        return {
            "peak": self.peak,
            "program": self.program,
            "model": self.model,
            "stages": {stage: dict(uses) for stage, uses in self.stages.items()},
            "keep_masked": self.keep_masked,
            "spread": self.spread,
        }


def estimate(
    model: PreTrainedModel,
    plan: Plan,
    config: CompileConfig,
    samples: Samples,
    windows: Inputs | None,
    devices: Devices,
) -> Needs:
    """Estimates the memory of a compilation on each device.

    It also decides whether weights are spread over the devices, and whether learning keeps masked weights.

    Args:
        model: loaded model.
        plan: plan of the model.
        config: options of the compilation.
        samples: calibration samples.
        windows: held-out samples, or None.
        devices: what it runs on.
    """
    if devices.offloaded:
        return _offloaded(_Estimate(model, plan, config, samples, False), windows)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    program, held = 0, size if model.device.type == devices.kind else 0
    if devices.kind == "cpu":
        resident, mapped = resident_memory()
        program, held = max(resident - size, 0), resident - min(mapped, size)

    def needs(keep_masked: bool) -> Needs:
        stages = _Estimate(model, plan, config, samples, keep_masked).stages(windows)
        return Needs(program, size, held, stages, keep_masked)

    found = needs(config.permutation == "learned")
    if found.keep_masked and not fits(found, devices, LEARNING):
        found = needs(False)
    may_spread = devices.count > 1 and devices.kind == "cuda" and devices.spread is None
    if devices.spread or (may_spread and not fits(found, devices)):
        return _spread(found, model, plan, devices.count)
    return found


def fits(needs: Needs, devices: Devices, stage: str | None = None) -> bool:
    """Whether a stage fits on each device; by default the largest one, but for the check that may be left out."""
    return devices.free is None or needs.added(stage or needs.largest_needed) <= devices.free


def _spread(whole: Needs, model: PreTrainedModel, plan: Plan, count: int) -> Needs:
    """Returns the needs where each device holds a share of the layers, and two layers at a time as a whole."""
    element = next(model.parameters()).element_size()
    layers = [sum(p.numel() for p in layer.parameters()) * element for layer in layer_modules(model, plan)]
    resident = whole.model - sum(layers) + -(-sum(layers) // count) + 2 * max(layers)
    stages = {
        stage: {use: -(-size // count) if use in SPREAD else size for use, size in whole.stages[stage].items()}
        for stage in RUN_THE_MODEL
        if stage in whole.stages
    }
    return Needs(whole.program, resident, 0, stages, spread=True)


def _offloaded(sizes: "_Estimate", windows: Inputs | None) -> Needs:
    stages = sizes.stages(windows)
    filed = {stage: sum(uses.pop(name, 0) for name in IN_FILES) for stage, uses in stages.items()}
    for stage in {"row weights", "reconstruct"} & stages.keys():  # gradients of one layer at a time
        stages[stage] |= sizes.gradients(layers=1)
    filed[RELOADING] = sizes.model
    program = resident_memory()[0]
    offloaded = {IN_PLACE: sizes.model, "copies of weights and inputs of layers": max(filed.values())}
    return Needs(program, sizes.one_layer, program, stages, offloaded=offloaded)


class _Estimate:
    """The sizes that the needs of all stages follow from."""

    def __init__(
        self, model: PreTrainedModel, plan: Plan, config: CompileConfig, samples: Samples, keep_masked: bool
    ) -> None:
        text = model.config.get_text_config()
        self._plan, self._config, self._samples, self._keep_masked = plan, config, samples, keep_masked
        self._element = next(model.parameters()).element_size()
        self._size = sum(p.numel() * p.element_size() for p in model.parameters())
        self._largest_parameter = max(p.numel() for p in model.parameters())
        self._weights = {name: linear_module(model, name).get_parameter("weight").numel() for _, name in plan.linears()}
        self._pruned = sum(self._weights.values())
        self._layer = max(
            sum(self._weights[name] for site in layer for name in site.linears) for layer in plan.layers()
        )
        widest = max(site.channels for site in plan.sites)
        self._hidden = int(getattr(text, "hidden_size", None) or widest)
        self._vocabulary = int(getattr(text, "vocab_size", 0)) if has_head(model) else 0  # of the logits
        self._width = max(widest, self._hidden)

    def stages(self, windows: Inputs | None) -> dict[str, dict[str, int]]:
        config, updates = self._config, self._config.updates
        mask = max(self._weights.values()) * MASK_TEMPORARIES * FLOAT32
        proof = 2 * self._largest_parameter * (self._element + FLOAT32)  # of a permuted weight, widened
        stages = {"calibration": self._activations(1), "masks": {"one layer": mask + proof}}
        if config.importance == "obs" or "sparsegpt" in updates:
            # Of one layer, and the next one's, which are joined from parts.
            between = 3 * self._positions * self._hidden * self._element
            stages["hessians"] = {
                **self._activations(1), "hessians": self._hessians(), "one layer": mask, "inputs of layers": between,
            }  # fmt: skip
        if windows is not None:
            held_out = Samples.of(windows)
            at_once = windows_at_once(held_out.longest) * held_out.tokens
            logits = at_once * self._vocabulary * 3 * FLOAT32  # logits, their float32 copy, the softmax
            stages["evaluation"] = {"logits": logits, **self._activations(1)}
        if config.permutation != "none":
            rows = min(MAX_ROWS, self._pruned // self._width)
            units = max((space.units for space in self._plan.spaces if not space.frozen), default=0)
            stages["heuristic"] = {"scores": 4 * units * rows * FLOAT32, "one layer": mask}
            if config.row_weights == "fisher" or config.permutation == "searched":
                stages["row weights"] = self.gradients()
        if config.permutation == "learned":
            stages[LEARNING] = self._learning() | {"one layer": mask}
        if config.permutation == "searched":
            stages["search"] = self._search()
        stages |= self._updates(mask)
        return stages | {RELOADING: {"a second model": self._size}}

    @property
    def model(self) -> int:
        """Size of all parameters."""
        return self._size

    @property
    def _positions(self) -> int:
        """Positions that a layer reads of all samples, in the longer half of an encoder-decoder."""
        return len(self._samples) * self._samples.longest

    @property
    def one_layer(self) -> int:
        """Size of the parameters of the largest layer, and of what stands outside of layers."""
        return self._size - (self._pruned - self._layer) * self._element

    def _activations(self, sequences: int, layers: int = 1) -> dict[str, int]:
        tokens = max(sequences * self._samples.longest, min(TOKENS_WITHOUT_LOGITS, self._positions))
        return {"activations": tokens * (layers * self._hidden + 8 * self._width) * FLOAT32}

    def gradients(self, layers: int | None = None) -> dict[str, int]:
        """Returns what forward and backward passes keep: of all layers, or of so many at a time."""
        sequences, tokens = self._config.micro_batch_size, self._samples.tokens
        layers = layers or len(self._plan.layers())
        kept = layers if self._config.activation_checkpointing else 12 * layers
        return {
            "activations": sequences * self._samples.longest * (kept * self._hidden + 16 * self._width) * FLOAT32,
            "logits": sequences * tokens * self._vocabulary * 4 * FLOAT32,
        }

    def _targets(self) -> dict[str, int]:
        return {"targets": self._samples.positions * self._hidden * self._element}

    def _hessians(self) -> int:
        return max(sum(site.channels**2 for site in layer) for layer in self._plan.layers()) * 4 * FLOAT32

    def _learning(self) -> dict[str, int]:
        block = self._config.learn.block_size
        one_layer = self._config.activation_checkpointing and not self._keep_masked
        alive = self._layer if one_layer else self._pruned
        return {
            **self.gradients(),
            **self._targets(),
            "masked weights": alive * 2 * self._element,  # and their gradients
            "permutations": sum(
                min(block, space.units) * space.units * FLOAT32 * 6 for space in self._plan.spaces if not space.frozen
            ),
        }

    def _search(self) -> dict[str, int]:
        return {
            **self.gradients(),
            **self._targets(),
            "dense weights": self._pruned * self._element,
            "gradients": self._pruned * max(FLOAT32, self._element),
            "gains": (4 * max(self._weights.values()) + 3 * GAINS_AT_ONCE) * FLOAT32,
        }

    def _updates(self, mask: int) -> dict[str, dict[str, int]]:
        config, stages = self._config, {}
        kept = config.sparsity.kept / config.sparsity.group
        if "reconstruct" in config.updates:
            stages["reconstruct"] = {
                **self.gradients(),
                "targets": 2 * self._positions * self._hidden * self._element,
                "dense weights": self._pruned * self._element,
                "finished weights": int(self._pruned * kept) * self._element,
                "optimizer": int(self._layer * kept) * 6 * FLOAT32,
                "one layer": mask,
            }
        if "distill" in config.updates:
            stages["distill"] = {
                **self.gradients(),
                **self._targets(),
                "optimizer": int(self._pruned * kept) * 6 * FLOAT32 + self._pruned,  # and one byte per mask
                "one layer": mask,
            }
        return stages


def refusal(needs: Needs, devices: Devices) -> str:
    """Returns why a compilation cannot run: it needs more memory, in addition to what it holds already, than is free.

    The text names the largest use and the options to lower; it is empty if the memory is enough.
    """
    stage = needs.largest_needed
    if devices.free is None or fits(needs, devices):
        return ""
    uses = needs.stages[stage]
    largest = max(uses, key=lambda use: uses[use])
    each = f"each {devices.kind} device" if devices.count > 1 else devices.kind
    return (
        f"this compilation needs about {format_bytes(needs.added(stage))} more on {each} than it holds now, "
        f"including {format_bytes(uses[largest])} for {largest} ({stage}), but only {format_bytes(devices.free)} are "
        "free: lower --sequence-length, --samples or --micro-batch-size, choose --dtype bfloat16, or use a larger "
        "machine"
    )


def describe_masks(needs: Needs) -> str:
    """Returns how often learning computes masks; empty without learning."""
    if LEARNING not in needs.stages:
        return ""
    if needs.keep_masked:
        return "computed once per step"
    return "computed for each micro-batch, which takes longer: masked weights and their gradients do not fit in memory"


def describe(needs: Needs, devices: Devices) -> str:
    """Returns the estimate as one line."""
    masks = describe_masks(needs)
    left = "" if devices.free is None else f"; {format_bytes(devices.free)} free"
    program = f", program {format_bytes(needs.program)}" if needs.program else ""
    each = f"{devices.count} x {devices.kind}, on each" if devices.count > 1 else devices.kind
    return (
        f"memory on {each}: about {format_bytes(needs.peak)} at the peak (model {format_bytes(needs.model)}"
        f"{program}, {needs.largest} {format_bytes(needs.extra(needs.largest))}){left}"
        + (f"; masks: {masks}" if masks else "")
        + (f"; weights: {describe_weights(needs)}" if devices.count > 1 else "")
    )


def describe_weights(needs: Needs) -> str:
    """Returns where the weights are while the model runs on several devices."""
    if needs.spread:
        return "spread over the devices layer by layer (FSDP2), and whole in host memory"
    return "whole on each device"

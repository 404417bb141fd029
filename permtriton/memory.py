"""Estimates the memory that a compilation needs at its peak, so that one that does not fit is refused at the start.

On a CPU the estimate is of the whole process, as ``top`` shows it (resident memory): Python and its libraries, the
model, and what the largest stage needs beside it. Pages of a safetensors file that is mapped count while they are in
memory, though the kernel can give them up: weights are read that way, and become the process's own memory as soon as
they change. On a GPU the estimate is of the tensors there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.config import CompileConfig
from permtriton.evaluation.perplexity import windows_at_once
from permtriton.machine import available_memory, format_bytes, resident_memory
from permtriton.model.forward import TOKENS_WITHOUT_LOGITS
from permtriton.model.plan import Plan, linear_module
from permtriton.prune.heuristic import MAX_ROWS
from permtriton.prune.search import GAINS_AT_ONCE

FLOAT32 = 4
MASK_TEMPORARIES = 6  # float32 copies of a weight that are alive at once in the mask's forward and backward passes
LEARNING = "learning"
RELOADING = "reloading"  # the stage that is left out where a second model does not fit


@dataclass(frozen=True)
class Needs:
    """The memory of one compilation, in bytes.

    Attributes:
        program: what the process holds beside the model before the work begins; 0 on a GPU.
        model: parameters.
        held: what is in memory already and is not given up: the program, and a model that is not mapped from its files.
        stages: stage -> use -> bytes beside program and model.
        keep_masked: whether learning keeps masked weights and their gradients through a step, because both fit.
    """

    program: int
    model: int
    held: int
    stages: Mapping[str, Mapping[str, int]]
    keep_masked: bool = False

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
        }


def estimate(model: PreTrainedModel, plan: Plan, config: CompileConfig, ids: Tensor, windows: Tensor | None) -> Needs:
    """Estimates the memory of a compilation, and decides whether learning keeps masked weights.

    Args:
        model: loaded model.
        plan: plan of the model.
        config: options of the compilation.
        ids: calibration sequences, int64 ``[samples, tokens]``.
        windows: held-out sequences, int64 ``[windows, tokens]``, or None.
    """
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    program, held = 0, size
    if model.device.type == "cpu":
        resident, mapped = resident_memory()
        program, held = max(resident - size, 0), resident - min(mapped, size)

    def needs(keep_masked: bool) -> Needs:
        stages = _Estimate(model, plan, config, ids, keep_masked).stages(windows)
        return Needs(program, size, held, stages, keep_masked)

    if config.permutation == "learned":
        keeping, free = needs(True), available_memory(model.device)
        if free is None or keeping.added(LEARNING) <= free:
            return keeping
    return needs(False)


class _Estimate:
    """The sizes that the needs of all stages follow from."""

    def __init__(
        self, model: PreTrainedModel, plan: Plan, config: CompileConfig, ids: Tensor, keep_masked: bool
    ) -> None:
        text = model.config.get_text_config()
        self._plan, self._config, self._ids, self._keep_masked = plan, config, ids, keep_masked
        self._element = next(model.parameters()).element_size()
        self._size = sum(p.numel() * p.element_size() for p in model.parameters())
        self._largest_parameter = max(p.numel() for p in model.parameters())
        self._weights = {name: linear_module(model, name).get_parameter("weight").numel() for _, name in plan.linears()}
        self._pruned = sum(self._weights.values())
        self._layer = max(
            sum(self._weights[name] for site in layer for name in site.linears) for layer in plan.layers()
        )
        self._hidden, self._vocabulary = int(text.hidden_size), int(text.vocab_size)
        self._width = max(max(site.channels for site in plan.sites), self._hidden)

    def stages(self, windows: Tensor | None) -> dict[str, dict[str, int]]:
        config, updates = self._config, self._config.updates
        mask = max(self._weights.values()) * MASK_TEMPORARIES * FLOAT32
        proof = 2 * self._largest_parameter * (self._element + FLOAT32)  # of a permuted weight, widened
        stages = {"calibration": self._activations(1), "masks": {"one layer": mask + proof}}
        if config.importance == "obs" or "sparsegpt" in updates:
            # Of one layer, and the next one's, which are joined from parts.
            between = 3 * self._ids.numel() * self._hidden * self._element
            stages["hessians"] = {
                **self._activations(1), "hessians": self._hessians(), "one layer": mask, "inputs of layers": between,
            }  # fmt: skip
        if windows is not None:
            at_once = windows_at_once(windows.shape[1]) * windows.shape[1]
            logits = at_once * self._vocabulary * 3 * FLOAT32  # logits, their float32 copy, the softmax
            stages["evaluation"] = {"logits": logits, **self._activations(1)}
        if config.permutation != "none":
            rows = min(MAX_ROWS, self._pruned // self._width)
            units = max((space.units for space in self._plan.spaces if not space.frozen), default=0)
            stages["heuristic"] = {"scores": 4 * units * rows * FLOAT32, "one layer": mask}
            if config.row_weights == "fisher" or config.permutation == "searched":
                stages["row weights"] = self._gradients()
        if config.permutation == "learned":
            stages[LEARNING] = self._learning() | {"one layer": mask}
        if config.permutation == "searched":
            stages["search"] = self._search()
        stages |= self._updates(mask)
        return stages | {RELOADING: {"a second model": self._size}}

    def _activations(self, sequences: int, layers: int = 1) -> dict[str, int]:
        tokens = max(sequences * self._ids.shape[1], min(TOKENS_WITHOUT_LOGITS, self._ids.numel()))
        return {"activations": tokens * (layers * self._hidden + 8 * self._width) * FLOAT32}

    def _gradients(self) -> dict[str, int]:
        sequences, tokens, layers = self._config.micro_batch_size, self._ids.shape[1], len(self._plan.layers())
        kept = layers if self._config.activation_checkpointing else 12 * layers
        return {
            "activations": sequences * tokens * (kept * self._hidden + 16 * self._width) * FLOAT32,
            "logits": sequences * tokens * self._vocabulary * 4 * FLOAT32,
        }

    def _targets(self) -> dict[str, int]:
        return {"targets": self._ids.numel() * self._hidden * self._element}

    def _hessians(self) -> int:
        return max(sum(site.channels**2 for site in layer) for layer in self._plan.layers()) * 4 * FLOAT32

    def _learning(self) -> dict[str, int]:
        block = self._config.learn.block_size
        one_layer = self._config.activation_checkpointing and not self._keep_masked
        alive = self._layer if one_layer else self._pruned
        return {
            **self._gradients(),
            **self._targets(),
            "masked weights": alive * 2 * self._element,  # and their gradients
            "permutations": sum(
                min(block, space.units) * space.units * FLOAT32 * 6 for space in self._plan.spaces if not space.frozen
            ),
        }

    def _search(self) -> dict[str, int]:
        return {
            **self._gradients(),
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
                **self._gradients(),
                "targets": 2 * self._ids.numel() * self._hidden * self._element,
                "dense weights": self._pruned * self._element,
                "finished weights": int(self._pruned * kept) * self._element,
                "optimizer": int(self._layer * kept) * 6 * FLOAT32,
                "one layer": mask,
            }
        if "distill" in config.updates:
            stages["distill"] = {
                **self._gradients(),
                **self._targets(),
                "optimizer": int(self._pruned * kept) * 6 * FLOAT32 + self._pruned,  # and one byte per mask
                "one layer": mask,
            }
        return stages


def refusal(needs: Needs, device: torch.device) -> str:
    """Returns why a compilation cannot run: it needs more memory, in addition to what it holds already, than is free.

    The text names the largest use and the options to lower; it is empty if the memory is enough.
    """
    free = available_memory(device)
    stage = max((stage for stage in needs.stages if stage != RELOADING), key=needs.extra)
    needed = needs.added(stage)
    if free is None or needed <= free:
        return ""
    uses = needs.stages[stage]
    largest = max(uses, key=lambda use: uses[use])
    return (
        f"this compilation needs about {format_bytes(needed)} more on {device.type} than it holds now, including "
        f"{format_bytes(uses[largest])} for {largest} ({stage}), but only {format_bytes(free)} are free: lower "
        "--sequence-length, --samples or --micro-batch-size, choose --dtype bfloat16, or use a larger machine"
    )


def describe_masks(needs: Needs) -> str:
    """Returns how often learning computes masks; empty without learning."""
    if LEARNING not in needs.stages:
        return ""
    if needs.keep_masked:
        return "computed once per step"
    return "computed for each micro-batch, which takes longer: masked weights and their gradients do not fit in memory"


def describe(needs: Needs, device: torch.device) -> str:
    """Returns the estimate as one line."""
    masks = describe_masks(needs)
    free = available_memory(device)
    left = "" if free is None else f"; {format_bytes(free)} free"
    program = f", program {format_bytes(needs.program)}" if needs.program else ""
    return (
        f"memory on {device.type}: about {format_bytes(needs.peak)} at the peak (model {format_bytes(needs.model)}"
        f"{program}, {needs.largest} {format_bytes(needs.extra(needs.largest))}){left}"
        + (f"; masks: {masks}" if masks else "")
    )

"""Estimates the memory that a compilation needs, so that one that does not fit is refused at the start."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.config import CompileConfig
from permtriton.errors import ConfigError
from permtriton.machine import available_memory, format_bytes
from permtriton.model.plan import Plan, linear_module
from permtriton.prune.evaluate import windows_at_once
from permtriton.prune.search import GAINS_AT_ONCE

FLOAT32 = 4
MASK_TEMPORARIES = 6  # float32 copies of a weight that are alive at once in the mask's forward and backward passes


def estimate(
    model: PreTrainedModel, plan: Plan, config: CompileConfig, ids: Tensor, windows: Tensor | None
) -> dict[str, int]:
    """Returns the estimated bytes by use: ``model``, ``statistics``, ``one layer``, ``activations`` and others.

    Args:
        model: loaded model.
        plan: plan of the model.
        config: options of the compilation.
        ids: calibration sequences, int64 ``[samples, tokens]``.
        windows: held-out sequences, int64 ``[windows, tokens]``, or None.
    """
    text = model.config.get_text_config()
    element = next(model.parameters()).element_size()
    weights = {name: linear_module(model, name).get_parameter("weight").numel() for _, name in plan.linears()}
    largest_layer = max(sum(weights[name] for site in layer for name in site.linears) for layer in plan.layers())
    tokens = ids.shape[1]
    hidden = int(text.hidden_size)
    needs = {"model": sum(p.numel() * p.element_size() for p in model.parameters())}
    needs["statistics"] = sum(site.channels for site in plan.sites) * 3 * FLOAT32
    needs["one layer"] = max(weights.values()) * MASK_TEMPORARIES * FLOAT32
    alive = largest_layer if config.activation_checkpointing else sum(weights.values())
    if config.permutation == "learned":
        needs["one layer"] += alive * 2 * element  # masked weights and their gradients
        block = config.learn.block_size
        needs["permutations"] = sum(
            min(block, space.units) * space.units * FLOAT32 * 6 for space in plan.spaces if not space.frozen
        )
    if config.permutation == "searched":
        needs["dense weights"] = sum(weights.values()) * element
        needs["gradients"] = sum(weights.values()) * FLOAT32
        needs["gains"] = (4 * max(weights.values()) + 3 * GAINS_AT_ONCE) * FLOAT32
    if config.permutation in ("learned", "searched") or "distill" in config.updates:
        needs["targets"] = ids.numel() * hidden * element
    if "distill" in config.updates:
        needs["optimizer"] = sum(weights.values()) * config.sparsity.kept // config.sparsity.group * 5 * FLOAT32
    if "reconstruct" in config.updates:
        needs["dense weights"] = sum(weights.values()) * element
        needs["targets"] = 2 * ids.numel() * hidden * element
        needs["optimizer"] = max(needs.get("optimizer", 0), largest_layer * 5 * FLOAT32)
    if "sparsegpt" in config.updates or config.importance == "obs":
        needs["hessians"] = max(sum(site.channels**2 for site in layer) for layer in plan.layers()) * 4 * FLOAT32
    gradients = config.permutation != "none" or bool({"distill", "reconstruct"} & set(config.updates))
    sequences = config.micro_batch_size if gradients else 1
    if gradients:
        needs["logits"] = sequences * tokens * int(text.vocab_size) * 4 * FLOAT32
    width = max(max(site.channels for site in plan.sites), hidden)
    kept = len(plan.layers()) if config.activation_checkpointing else 12 * len(plan.layers())
    needs["activations"] = sequences * tokens * (kept * hidden + 16 * width) * FLOAT32
    if windows is not None:
        at_once = windows_at_once(windows.shape[1]) * windows.shape[1]
        needs["evaluation"] = at_once * int(text.vocab_size) * 3 * FLOAT32  # logits, their float32 copy, the softmax
    return needs


def check_fits(needs: Mapping[str, int], device: torch.device) -> None:
    """Refuses a compilation that needs more memory, in addition to the loaded model, than is free.

    Raises:
        ConfigError: the memory is too small; the message names the largest use and the options to lower.
    """
    free = available_memory(device)
    needed = sum(needs.values()) - needs["model"]
    if free is not None and needed > free:
        largest = max((name for name in needs if name != "model"), key=lambda name: needs[name])
        raise ConfigError(
            f"this compilation needs about {format_bytes(needed)} on {device.type} in addition to the model, including "
            f"{format_bytes(needs[largest])} for {largest}, but only {format_bytes(free)} are free: lower "
            "--sequence-length, --samples or --micro-batch-size, choose --dtype bfloat16, or use a larger machine"
        )


def describe(needs: Mapping[str, int], device: torch.device) -> str:
    """Returns the estimate as one line."""
    needed = sum(needs.values()) - needs["model"]
    free = available_memory(device)
    left = "" if free is None else f", {format_bytes(free)} free"
    return f"memory on {device.type}: model {format_bytes(needs['model'])}, about {format_bytes(needed)} more{left}"

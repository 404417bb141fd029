"""How much memory a compilation will need, told and checked before hours are spent."""

import os
import resource
import sys
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.config import CompileConfig
from permtriton.errors import ConfigError
from permtriton.evaluate import windows_at_once
from permtriton.plan import Plan, linear_module

FLOAT32 = 4
MASK_TEMPORARIES = 6  # float32 copies of the largest weight alive at once while its mask is made and differentiated


def estimate(
    model: PreTrainedModel, plan: Plan, config: CompileConfig, ids: Tensor, windows: Tensor | None
) -> dict[str, int]:
    """Returns bytes by use: the model, what its largest layer needs beside it, statistics, targets, activations.

    Args:
        model: loaded.
        plan: of the model.
        config: what will be done.
        ids: calibration sequences ``[samples, tokens]``.
        windows: held-out sequences ``[windows, tokens]``, or None.
    """
    text = model.config.get_text_config()
    element = next(model.parameters()).element_size()
    weights = {name: linear_module(model, name).get_parameter("weight").numel() for _, name in plan.linears()}
    largest_layer = max(sum(weights[n] for s in layer for n in s.linears) for layer in plan.layers())
    tokens = ids.shape[1]
    hidden = int(text.hidden_size)
    needs = {"model": sum(p.numel() * p.element_size() for p in model.parameters())}
    needs["statistics"] = sum(site.channels for site in plan.sites) * 3 * FLOAT32
    needs["one layer"] = max(weights.values()) * MASK_TEMPORARIES * FLOAT32
    if config.permutation == "learned":
        sequences = config.learn.micro_batch_size
        alive = largest_layer if config.learn.activation_checkpointing else sum(weights.values())
        needs["one layer"] += alive * 2 * element  # masked weights and their gradients
        needs["targets"] = ids.numel() * hidden * element
        block = config.learn.block_size
        needs["permutations"] = sum(
            min(block, space.units) * space.units * FLOAT32 * 6 for space in plan.spaces if not space.frozen
        )
    else:
        sequences = 1
    if config.weight_update == "sparsegpt" or config.importance == "obs":
        needs["hessians"] = max(sum(s.channels**2 for s in layer) for layer in plan.layers()) * 4 * FLOAT32
    width = max(max(site.channels for site in plan.sites), hidden)
    kept = len(plan.layers()) if config.learn.activation_checkpointing else 12 * len(plan.layers())
    needs["activations"] = sequences * tokens * (kept * hidden + 16 * width) * FLOAT32
    if windows is not None:
        at_once = windows_at_once(windows.shape[1]) * windows.shape[1]
        needs["evaluation"] = at_once * int(text.vocab_size) * 3 * FLOAT32  # logits, their float32 copy, its softmax
    return needs


def available(device: torch.device) -> int | None:
    """Returns the bytes that can still be had on ``device``, or None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return None


def check_fits(needs: Mapping[str, int], device: torch.device) -> None:
    """Refuses a compilation that needs more than the device has left beside the loaded model.

    Raises:
        ConfigError: with what takes most of it and what to do.
    """
    free = available(device)
    beside = sum(needs.values()) - needs["model"]
    if free is not None and beside > free:
        largest = max((name for name in needs if name != "model"), key=lambda name: needs[name])
        raise ConfigError(
            f"this needs about {format_bytes(beside)} beside the model on {device.type}, of which {largest} "
            f"{format_bytes(needs[largest])}, and {format_bytes(free)} are free: lower --sequence-length, --samples or "
            "--micro-batch-size, choose --dtype bfloat16, or use a larger machine"
        )


def told(needs: Mapping[str, int], device: torch.device) -> str:
    """Returns the estimate as one line."""
    beside = sum(needs.values()) - needs["model"]
    free = available(device)
    left = "" if free is None else f", {format_bytes(free)} free"
    return (
        f"memory on {device.type}: model {format_bytes(needs['model'])}, about {format_bytes(beside)} beside it{left}"
    )


def peak(device: torch.device) -> int:
    """Returns the most bytes that were in use at once: on the GPU, or by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def format_bytes(count: int) -> str:
    """Returns bytes as people read them: ``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"

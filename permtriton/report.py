"""What is told of a compilation, as JSON types."""

import json
import platform
import re
from importlib import metadata
from typing import Any

import torch
import transformers
from torch import Tensor

from permtriton.permutation import inverse, moved
from permtriton.plan import ChannelSpace, Plan, Site


def to_json(report: Any) -> str:
    """Returns ``report`` as indented JSON with each list of whole numbers on one line."""
    text = json.dumps(report, indent=1)
    return re.sub(r"\[\s+(-?\d+(?:,\s+-?\d+)*)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)


def versions() -> dict[str, str]:
    """Returns the versions that decide a result."""
    return {
        "permtriton": metadata.version("permtriton"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def device_name(device: torch.device) -> str:
    """Returns the GPU's name, or ``cpu`` with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads, {platform.machine()}"


def space_report(plan: Plan, space: ChannelSpace) -> dict[str, Any]:
    """Returns where one permutation goes: its producers, its readers, or why there is none."""
    return {
        "name": space.name,
        "channels": space.units,
        "segments": len(space.segments) if not space.frozen else 0,
        "tied": max(site.copies for site in plan.sites_of(space)),
        "frozen": space.frozen,
        "at_run_time": [at_run_time(site) for site in plan.sites_of(space) if site.cost != "none"],
        "producers": [f"{axis.parameter}[{axis.dim}]" for axis in space.producers],
        "readers": [f"{axis.parameter}[{axis.dim}]" for axis in space.axes if axis.reads],
    }


def site_report(site: Site, unit_index: Tensor) -> dict[str, Any]:
    """Returns a site's linears and the final order of its input channels."""
    index = site.expand(unit_index)
    return {
        "name": site.name,
        "linears": list(site.linears),
        "space": site.space.name,
        "moved": moved(index),
        "cost": site.cost,
        "index": index.tolist(),
    }


def hidden_states_report(order: Tensor | None) -> dict[str, Any]:
    """Returns in which order a caller sees hidden states (``output_hidden_states``, ``inputs_embeds``).

    Args:
        order: int64 ``[C]``, from the dense model's channels to the compiled one's; None where they stay.

    Returns:
        ``permuted``, and where it is true ``index``: ``compiled[..., j] = dense[..., index[j]]``, and its inverse
        ``undo``: ``dense = compiled[..., undo]``.
    """
    if order is None or moved(order) == 0:
        return {"permuted": False}
    return {"permuted": True, "index": order.tolist(), "undo": inverse(order).tolist()}


def at_run_time(site: Site, element: int = 2) -> dict[str, Any]:
    """Returns what a site's permutation costs when the model runs.

    Args:
        site: of a plan.
        element: bytes of an activation, bfloat16's by default.

    Returns:
        ``runs``: ``nothing``, ``in the norm`` with ``norm``, or ``gather`` in ``gathers`` linears; ``bytes_per_token``
        that the gathers read and write. A norm reads and writes what it does anyway.
    """
    if site.cost == "none":
        return {"runs": "nothing", "bytes_per_token": 0}
    if site.norm is not None:
        return {"runs": "in the norm", "norm": site.norm.module, "bytes_per_token": 0}
    gathers = len(site.linears)
    return {"runs": "gather", "gathers": gathers, "bytes_per_token": 2 * gathers * site.channels * element}

"""Plans and permutations as JSON entries of ``permtriton.json`` and ``permtriton inspect --json``, and in words."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton.checkpoint.read_record import Record, RowsEntry
from permtriton.passes.plan import ChannelSpace, Destination, Plan, Site, linear_module
from permtriton.passes.weight_folds import moves_of
from permtriton.util.permutation import inverse, moved


def rows_report(model: PreTrainedModel, plan: Plan, indices: Mapping[str, Tensor]) -> list[RowsEntry]:
    """Returns the orders of the rows of pruned linears, where they moved; linears with equal orders are one entry."""
    dims = {f"{name}.weight": int(isinstance(linear_module(model, name), Conv1D)) for _, name in plan.linears()}
    orders: dict[tuple[int, ...], list[str]] = {}
    for move in moves_of(plan, {space.name: indices[space.name] for space in plan.spaces if not space.frozen}):
        for fold in move.upstream:
            if dims.get(fold.parameter) == fold.dim and moved(fold.index):
                orders.setdefault(tuple(fold.index.tolist()), []).append(fold.parameter.removesuffix(".weight"))
    return [{"linears": linears, "index": list(index)} for index, linears in orders.items()]


def plan_report(plan: Plan) -> dict[str, Any]:
    """Returns ``sites``, ``patterns`` (by linear), ``permutations``, ``skipped`` and ``barriers`` of a plan."""
    return {
        "sites": [site_report(site) for site in plan.sites],
        "patterns": {name: str(pattern) for name, pattern in plan.patterns.items()},
        "permutations": [permutation_report(plan, space) for space in plan.spaces],
        "skipped": plan.skipped,
        "barriers": plan.barriers,
    }


def site_report(site: Site) -> dict[str, Any]:
    return {
        "name": site.name,
        "linears": list(site.linears),
        "channels": site.channels,
        "permutation": site.space.name,
        "placement": site.space.placement.value,
    }


def permutation_report(plan: Plan, space: ChannelSpace) -> dict[str, Any]:
    """Returns the entry of one permutation.

    ``placement`` is a value of `Destination`, and ``reason`` says why there is no permutation; it is empty if there is
    one. ``bytes_per_token`` is what the gathers read and write in bfloat16 when the model runs. A permuted norm adds
    nothing to it, because a norm reads and writes the same number of bytes in any order.
    """
    sites = plan.sites_of(space)
    gathers = sum(len(site.linears) for site in sites) if space.placement is Destination.GATHER else 0
    return {
        "name": space.name,
        "channels": space.units,
        "segments": 0 if space.frozen else len(space.segments),
        "tied": max(site.copies for site in sites),
        "placement": space.placement.value,
        "reason": space.reason,
        "norm": space.norm.module if space.norm else None,
        "gathers": gathers,
        "bytes_per_token": gathers * sites[0].channels * (2 + 2),
        "producers": [f"{axis.parameter}[{axis.dim}]" for axis in space.axes if not axis.is_input],
        "readers": [f"{axis.parameter}[{axis.dim}]" for axis in space.axes if axis.is_input],
    }


def at_run_time(permutation: Mapping[str, Any]) -> str:
    """Returns, in words, what an entry of ``permutations`` costs when the model runs."""
    if permutation["placement"] == Destination.IN_NORM:
        return f"in the norm {permutation['norm']}"
    if permutation["placement"] == Destination.GATHER:
        gathers = f"{permutation['gathers']} gathers" if permutation["gathers"] > 1 else "a gather"
        return f"{gathers}, {permutation['bytes_per_token']:,} bytes per token in bfloat16"
    return "nothing"


def destination(permutation: Mapping[str, Any]) -> str:
    """Returns, in words, where the permutation of an entry of ``permutations`` goes, or why there is none."""
    if permutation["placement"] == Destination.NONE:
        return f"stays: {permutation['reason']}"
    if permutation["placement"] != Destination.FOLDED:
        return at_run_time(permutation)
    writers, readers = len(permutation["producers"]), len(permutation["readers"])
    text = f"folded into {writers} producer{'s' * (writers != 1)}, {readers} reader{'s' * (readers != 1)}"
    if permutation["segments"] > 1:
        text += f"; within {permutation['segments']} heads"
    if permutation["tied"] > 1:
        text += f"; tied across {permutation['tied']} query heads"
    return text


def hidden_states_report(order: Tensor | None, unproved: str) -> dict[str, Any]:
    """Returns the entry about the order of the channels of hidden states and of ``inputs_embeds``.

    Args:
        order: index from the dense model's channels of the last hidden state to the compiled model's, int64 ``[C]``:
            ``compiled[..., j] = dense[..., index[j]]``, and ``dense = compiled[..., undo]``; None if they stay.
        unproved: why it is not known whether all hidden states have this order; then ``permuted`` is "unknown", and
            ``last`` holds what is known of the last hidden state. Empty if all have it.
    """
    entry: dict[str, Any] = {"permuted": False}
    if order is not None and moved(order):
        entry = {"permuted": True, "index": order.tolist(), "undo": inverse(order).tolist()}
    return {"permuted": "unknown", "why": unproved, "last": entry} if unproved else entry


def hidden_order_of(record: Record) -> Tensor | None:
    """Returns the order of the last hidden state's channels, int64 ``[C]``; None if they did not move."""
    entry = record["hidden_states"]
    index = entry.get("last", entry).get("index")
    return None if index is None else torch.tensor(index)


def grouped(rows: Sequence[tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[int]]]:
    """Joins rows of a table that differ only in numbers between dots, such as those of layers and experts.

    Returns:
        One row for each group of such rows, and the positions of the group's rows. If there are several, the numbers
        are replaced by ``*``, and the first cell ends with the count of the rows.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        pattern = tuple(re.sub(r"(?<=\.)\d+(?=\.)", "*", cell) for cell in row)
        groups.setdefault(pattern, []).append(number)
    joined = []
    for pattern, numbers in groups.items():
        several = (f"{pattern[0]}  ({len(numbers)}x)", *pattern[1:])
        joined.append((several if len(numbers) > 1 else rows[numbers[0]], numbers))
    return joined

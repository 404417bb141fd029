"""The sections of a report that are pictures: the search, importance, masks, permutations."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from permtriton.reporting import masks, plots
from permtriton.reporting.compiled import Compiled, kind_of, layer_of
from permtriton.reporting.pages import Part, Picture, Section

SPACES = 3  # permutations that are drawn per folder
LAYERS = 40  # lines of the picture by layer; of a deeper model, the first and the last


def search(folders: Sequence[Compiled]) -> Section:
    """What each step reports of its way: loss by round or epoch, channels that moved, parts before and after."""
    none = "Nothing was searched, learned or trained in steps: the order and the weights follow from one calculation."
    parts = []
    for folder in folders:
        pictures = [picture for step in folder.record["steps"] for picture in _pictures(step)]
        parts.append(Part(folder.label, "" if pictures else none, pictures))
    text = (
        "How the loss on the calibration text fell while the order was searched or learned, and while kept weights "
        "were trained. Step 0 is the state before. Losses of different kinds cannot be compared with each other."
    )
    return Section("search", "How it was found", text, parts)


def _pictures(step: Mapping[str, Any]) -> list[Picture]:
    """Returns the pictures of what a step reports, see `permtriton.step.Outcome`."""
    found = [_history(step)] if len(step["history"]) > 1 else []
    if found and all(isinstance(entry.get("agreement"), float) for entry in step["history"]):
        found.append(_soft_against_hard(step["history"]))
    if step["parts"]:
        names = [f"{number}. {part['name'].rpartition('.')[2]}" for number, part in enumerate(step["parts"])]
        start, end = [part["start"] for part in step["parts"]], [part["end"] for part in step["parts"]]
        svg = plots.dumbbells(names, start, end, (0, 1.05 * max([*start, *end])), unit="held-out loss")
        caption = f"Step {step['name']}: loss of each part before and after, in the order in which they were changed."
        found.append(Picture(svg, f"Step {step['name']}: {len(names)} parts before and after", caption))
    return found


def _history(step: Mapping[str, Any]) -> Picture:
    name, unit, entries, kept = step["name"], step["unit"], step["history"], step["kept"]
    measures = [key for key in ("held_out", "loss") if key in entries[0]]
    curves = [(key.replace("_", "-"), [entry[key] for entry in entries]) for key in measures]
    moved = [entry["moved"] for entry in entries] if "moved" in entries[0] else []
    svg = plots.history([entry[unit] for entry in entries], curves, moved, unit=unit, kept=kept)
    first = entries[0][measures[0]]
    last = next((e[measures[0]] for e in entries if e[unit] == kept), entries[-1][measures[0]])
    caption = f"Step {name}: {' (solid) and '.join(key for key, _ in curves)}{' (dashed)' * (len(curves) > 1)}."
    if moved:
        caption += f" Below: channels that are not where they were before; {moved[-1]:,} at the end."
    caption += " The ring is the epoch that was kept." if kept is not None else ""
    return Picture(svg, f"Step {name}: from {first:.4f} to {last:.4f} in {len(entries) - 1} {unit}s", caption)


def _soft_against_hard(epochs: Sequence[Mapping[str, Any]]) -> Picture:
    values = [epoch["agreement"] for epoch in epochs]
    svg = plots.history(
        [epoch["epoch"] for epoch in epochs], [("agreement", values)], unit="epoch", measure="soft on hard"
    )
    caption = (
        "Learning runs the model with hard permutations only. This is the mean entry of the soft ones where the hard "
        f"ones have a 1: from {values[0]:.3f} to {values[-1]:.3f}; at 1, soft and hard are the same."
    )
    return Picture(svg, f"Soft permutations against hard ones: {values[0]:.3f} to {values[-1]:.3f}", caption)


def importance(folders: Sequence[Compiled]) -> Section:
    """What masks retain before and after the permutation, by layer and by kind of linear."""
    tables = [_means(folder.record["retained_importance"]) for folder in folders]
    parts = []
    for folder, table in zip(folders, tables, strict=True):
        limits = _limits(
            [
                each
                for other, each in zip(folders, tables, strict=True)
                if other.record["config"]["importance"] == folder.record["config"]["importance"]
            ]
        )
        pictures = []
        for title, means in table.items():
            shown = [*means] if len(means) <= LAYERS else [*means][: LAYERS // 2] + [*means][-LAYERS // 2 :]
            before, after = zip(*(means[name] for name in shown), strict=True)
            svg = plots.dumbbells(shown, before, after, limits, unit="importance retained, %")
            alt = f"{folder.label}: importance retained by {title}, before and after; the table has the numbers"
            pictures.append(Picture(svg, alt, f"Means by {title}."))
        parts.append(Part(folder.label, pictures=pictures))
    groups = dict.fromkeys((title, name) for table in tables for title in table for name in table[title])
    rows = [(name, *(_change(table.get(title, {}).get(name)) for table in tables)) for title, name in groups]
    head = ("mean of", *(folder.label for folder in folders))
    parts.append(Part(caption="Importance retained in percent, before and after", head=head, rows=rows))
    text = (
        "A mask keeps the weights with the highest scores of each group, and the order decides who competes with whom. "
        "Shown is the share of all scores that a mask retains, in the dense model's order (open circle) and in the new "
        "one (filled). Folders with the same importance have the same axis; other scores do not compare."
    )
    return Section("importance", "Importance that masks retain", text, parts)


def _limits(tables: Sequence[Mapping[str, Mapping[str, tuple[float, float]]]]) -> tuple[float, float]:
    """Returns the ends of the axis that shows all values of `_means`."""
    values = [value for table in tables for means in table.values() for pair in means.values() for value in pair]
    low, high = min(values, default=0.0), max(values, default=100.0)
    margin = 0.08 * (high - low) + 0.2
    return low - margin, high + margin


def _means(shares: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Returns the mean shares in percent, before and after, by layer and by kind of linear."""
    groups: dict[str, dict[str, list[Mapping[str, float]]]] = {"layer": {}, "kind of linear": {}}
    for name, entry in shares.items():
        if layer_of(name) is not None:
            groups["layer"].setdefault(f"layer {layer_of(name)}", []).append(entry)
        groups["kind of linear"].setdefault(kind_of(name), []).append(entry)
    return {
        title: {
            name: (100 * fmean(each["before"] for each in entries), 100 * fmean(each["after"] for each in entries))
            for name, entries in members.items()
        }
        for title, members in groups.items()
        if members
    }


def _change(pair: tuple[float, float] | None) -> str:
    return "–" if pair is None else f"{pair[0]:.2f}\u00a0→\u00a0{pair[1]:.2f}"


def mask_pictures(folders: Sequence[Compiled]) -> Section:
    """The corners of a few weights, method beside method."""
    parts = []
    for linear in masks.pictured_linears(folders):
        corners = [masks.corner(folder, linear) for folder in folders]
        pictures = []
        for folder, kept in zip(folders, corners, strict=True):
            caption = f"{folder.label}: {kept.float().mean():.0%} kept"
            if folder is not folders[0] and kept.shape == corners[0].shape:
                same = (kept & corners[0]).sum() / corners[0].sum().clamp(min=1)
                caption += f"; {same:.0%} of what {folders[0].label} keeps"
            alt = f"Mask of {linear}, {folder.label}: {kept.shape[0]} rows, {kept.shape[1]} columns"
            pictures.append(Picture(plots.mask(kept), alt, f"{caption}."))
        parts.append(Part(linear, "", pictures))
    text = (
        f"The first {masks.CORNER} rows and columns of a few weights, in the dense model's order of channels: the same "
        "pixel is the same weight in every picture. Kept weights are coloured. Without a permutation every group of "
        "neighbours keeps its number; with one, whole columns may keep more or fewer, because groups are made of "
        "channels from elsewhere."
    )
    if not parts:
        parts = [Part(text="The folders have no weight in common that can be drawn.")]
    return Section("masks", "Masks", text, parts)


def permutations(folders: Sequence[Compiled]) -> Section:
    """Where the channels of a few permutations went."""
    parts = []
    for folder in folders:
        first: dict[str, Mapping[str, Any]] = {}  # of each kind of permutation
        for site in folder.record["sites"]:
            if site["moved"]:
                first.setdefault(kind_of(site["permutation"]), site)
        chosen = list(first.values())[:SPACES]
        pictures = [
            Picture(
                plots.permutation(site["index"]),
                f"Permutation {site['permutation']}: {site['moved']} of {site['channels']} channels moved",
                f"{site['permutation']}: {site['moved']:,} of {site['channels']:,} channels moved.",
            )
            for site in chosen
        ]
        text = "" if pictures else "All channels keep their order."
        parts.append(Part(folder.label, text, pictures))
    text = (
        "A dot for each channel: to the right its position in the new order, downwards its position in the dense "
        "model. A diagonal means that nothing moved; squares along it mean that channels stay within their head."
    )
    return Section("permutations", "Permutations", text, parts)

"""The sections of a report that are tables: what was done, the result, the cost, the sizes, the checks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from permtriton.checkpoint.plan_entries import grouped
from permtriton.comparison.methods import DENSE, FUSED
from permtriton.comparison.summary import cell, columns
from permtriton.machine import format_bytes
from permtriton.reporting import plots
from permtriton.reporting.compiled import Compiled
from permtriton.reporting.pages import Card, Part, Picture, Section

_PLACEMENTS = {
    "folded": "folded into neighbouring weights: free",
    "in_norm": "written by the norm before it: no extra bytes",
    "gather": "gathered before its linears",
    "none": "order kept",
}
Value = Callable[[Compiled], str]


def card(folder: Compiled) -> Card:
    """Returns the summary of one folder."""
    found = folder.record["evaluation"]
    if "dense" not in found:
        return Card(folder.label, "–", "No held-out text was evaluated.")
    name = "perplexity" if found["measure"] == "perplexity" else "cosine with the dense model"
    return Card(folder.label, f"{found['compiled']:.3f}", f"held-out {name}; dense {found['dense']:.3f}")


def done(folders: Sequence[Compiled]) -> Section:
    """What was done, on what."""
    rows: dict[str, Value] = {
        "folder": lambda each: each.path.resolve().name,
        "model": lambda each: each.model,
        "pattern": lambda each: str(each.pattern),
        "recipe": lambda each: each.record["config"]["recipe"].replace(",", ", "),
        "importance": lambda each: each.record["config"]["importance"],
        "layout": lambda each: each.record["config"]["layout"],
        "stored": lambda each: each.record["export"]["format"] if "export" in each.record else "dense, zeros included",
        "calibration": _calibration,
        "seed": lambda each: str(each.record["config"]["seed"]),
        "device": lambda each: each.record["device"],
        "dtype": lambda each: each.record["dtype"],
        "parameters pruned": _pruned,
    }
    text = "A column for each compiled folder. Options that are not named here are under Repeat it."
    return Section("done", "What was done", text, [_beside(folders, rows, "Model, method and text")])


def result(folders: Sequence[Compiled], comparison: Mapping[str, Any] | None) -> Section:
    """How good the dense and the compiled models are, and the table of ``permtriton compare``."""
    rows = []
    for each in folders:
        found = each.record["evaluation"]
        if "dense" in found:
            ratio = f"{found['compiled'] / found['dense']:.3f}" if found["dense"] else "–"
            text = Path(found.get("text", "not recorded")).name  # windows that were given from Python have no name
            row = (found["measure"], text, f"{found['dense']:.3f}", f"{found['compiled']:.3f}", ratio)
            rows.append((each.label, *row))
        else:
            rows.append((each.label, "not measured", *("–",) * 4))
    head = ("method", "measure", "text", "dense", "compiled", "compiled / dense")
    parts = [Part(caption="Held-out evaluation of each folder", head=head, rows=rows)]
    if comparison is not None:
        parts.append(_comparison(comparison))
    text = "Of perplexity, less is better; of the cosine with the dense model's last hidden state, more is better."
    return Section("result", "Result", text, parts)


def _comparison(found: Mapping[str, Any]) -> Part:
    measure, seeds = found["measure"], len(found["seeds"])
    lines = sorted(
        _ranked(found),
        key=lambda line: next(mean for mean in line[1:] if mean is not None),
        reverse=measure == "perplexity",
    )
    svg = plots.ranking(lines, DENSE, unit=f"{measure}, mean of {seeds} seeds" if seeds > 1 else measure)
    caption = (
        "A line for each method, the best at the bottom. Filled dots: layout portable; open dots: layout fused. The "
        "dot without colour is the dense model."
    )
    picture = Picture(svg, f"{measure} of {len(lines)} methods; the table below has the numbers", caption)
    headers, rows = columns(found)
    shown = [number for number in range(len(headers)) if any(row[number] is not None for row in rows)]
    facts = [
        f"text {Path(found['text']).name}",
        f"{found['tokens']:,} tokens",
        f"{seeds} seeds, ± is their sample standard deviation" if seeds > 1 else "",
        found["device"],
    ]
    return Part(
        title="All methods, by permtriton compare",
        pictures=[picture],
        caption=f"{Path(found['model']).name}: " + "; ".join(fact for fact in facts if fact),
        head=[headers[number] for number in shown],
        rows=[[cell(row[number]) for number in shown] for row in rows],
    )


def _ranked(found: Mapping[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """Returns the lines of the picture: the name of a row, and its mean in the layouts portable and fused."""
    means: dict[tuple[str, ...], dict[bool, float]] = {}
    for row in found["rows"]:
        method = row["method"].removesuffix(FUSED)
        parts = (method, row["pattern"] if len(found["patterns"]) > 1 else "", row["setting"])
        means.setdefault(parts, {})[method != row["method"]] = row["mean"]
    return [(", ".join(filter(None, parts)), layouts.get(False), layouts.get(True)) for parts, layouts in means.items()]


def cost(folders: Sequence[Compiled]) -> Section:
    """Where each permutation went, and what it costs at run time."""
    text = (
        "A folded permutation is part of the weights and costs nothing. One that a norm writes costs no extra bytes. A "
        "gather copies its input once per linear; bytes per token are counted in 16 bits, read and written."
    )
    return Section("cost", "Cost at run time", text, [_placements(folder) for folder in folders])


def _placements(folder: Compiled) -> Part:
    spaces = folder.record["permutations"]
    cells = [
        (space["name"], _PLACEMENTS.get(space["placement"], space["placement"]), _why(space), str(space["channels"]),
         str(space["gathers"]), f"{space['bytes_per_token']:,}")
        for space in spaces
    ]  # fmt: skip
    rows = []
    for row, members in grouped(cells):
        moved = [spaces[number]["moved"] for number in members]
        span = f"{min(moved):,}" + (f" to {max(moved):,}" if max(moved) > min(moved) else "")
        rows.append((*row[:3], f"{span} of {int(row[3]):,}", *row[4:]))
    gathers, bytes_ = (sum(space[key] for space in spaces) for key in ("gathers", "bytes_per_token"))
    head = ("permutation", "where it ends", "why", "channels moved", "gathers each", "bytes per token each")
    return Part(
        title=folder.label,
        text=f"In all: {_count(gathers, 'gather')}, {bytes_:,} bytes per token.",
        caption="Permutations; those that differ only in the number of the layer share a line, marked *",
        head=head,
        rows=rows,
    )


def _why(space: Mapping[str, Any]) -> str:
    """Returns why a permutation ends where it does."""
    writers, readers = len(space["producers"]), len(space["readers"])
    if space["reason"]:
        return space["reason"]
    if space["placement"] == "in_norm":
        return f"its channels come from {space['norm']}"
    if space["placement"] == "gather":
        return "no parameter or norm before it can write this order"
    tied = f"; tied across {space['tied']} query heads" if space["tied"] > 1 else ""
    return f"written by {_count(writers, 'parameter')}, read by {readers}{tied}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def dense(folders: Sequence[Compiled]) -> Section:
    """What was not pruned, and what limits permutations."""
    parts = []
    for folder in folders:
        rows = [*folder.record["skipped"].items(), *(("barrier", why) for why in folder.record["barriers"])]
        text = "" if rows else "Nothing."
        parts.append(Part(folder.label, text, caption="Left dense, or in its order", head=("what", "why"), rows=rows))
    text = "Modules and parameters that stay dense, and operators through which channels could not be followed."
    return Section("dense", "Left as it was", text, parts)


def sizes(folders: Sequence[Compiled]) -> Section:
    """Bytes, seconds, memory."""
    stages = list(dict.fromkeys(stage for each in folders for stage in each.record["seconds"]))
    space: dict[str, Value] = {
        "dense": lambda each: format_bytes(each.sizes["dense"]),
        "on disk": lambda each: format_bytes(each.stored_bytes),
        "packed": lambda each: format_bytes(each.sizes["packed"]) + ("" if each.is_packed else " (estimate)"),
        "peak memory": lambda each: format_bytes(each.record["memory"]["peak"]),
        "speed": lambda each: "not measured",
    }
    time = {stage: _seconds(stage) for stage in stages}
    time["all stages"] = lambda each: f"{sum(each.record['seconds'].values()):.1f}"
    text = "The packed size follows from the pattern: the kept values, and the position of each in its group."
    parts = [
        _beside(folders, space, "Weights and memory"),
        _beside(folders, time, "Seconds by stage of the compilation"),
    ]
    return Section("sizes", "Size, time and memory", text, parts)


def verified(folders: Sequence[Compiled]) -> Section:
    """What was compared with the dense model, and how."""
    rows: dict[str, Value] = {
        "permuted model against dense, before pruning": lambda each: (
            f"same outputs (largest difference {each.record['proof']['fold_difference']:.1e})"
        ),
        "pruned model against the graph": lambda each: each.record["proof"]["lowered_graph"],
        "inputs compared": lambda each: ", ".join(each.record["proof"]["verified_inputs"]),
        "inputs not compared": _unverified,
        "pruned weights checked on disk": lambda each: str(each.record["verification"]["pruned_weights"]),
        "reloaded": lambda each: each.record["verification"]["reloaded"],
        "hidden states": _hidden_states,
    }
    text = "Differences are relative to the largest output. A folder is only written if every check passes."
    return Section("verified", "What was verified", text, [_beside(folders, rows, "Checks of each compilation")])


def repeat(folders: Sequence[Compiled]) -> Section:
    """The commands and the versions."""
    parts = [Part(folder.label, code=[folder.record["command"]]) for folder in folders]
    names = list(dict.fromkeys(name for each in folders for name in each.record["versions"]))
    versions = {name: _version(name) for name in names}
    parts.append(_beside(folders, versions, "Versions"))
    text = (
        "The same command on the same machine gives the same result. Sums depend on the processor and the number of "
        "threads, and so, a little, do orders that are searched or learned."
    )
    return Section("repeat", "Repeat it", text, parts)


def _beside(folders: Sequence[Compiled], rows: Mapping[str, Value], caption: str) -> Part:
    """Returns a table with a row per value and a column per folder."""
    cells = [(name, *(value(each) for each in folders)) for name, value in rows.items()]
    return Part(caption=caption, head=("", *(each.label for each in folders)), rows=cells)


def _calibration(folder: Compiled) -> str:
    shape = " x ".join(map(str, folder.record["calibration"]["shape"]))
    return f"{Path(folder.record['config']['calibration']).name}, {shape} tokens"


def _pruned(folder: Compiled) -> str:
    pruned, total = folder.record["pruned_parameters"], folder.record["parameters"]
    return f"{pruned:,} of {total:,} ({pruned / total:.1%})"


def _seconds(stage: str) -> Value:
    return lambda each: f"{each.record['seconds'][stage]:.1f}" if stage in each.record["seconds"] else "–"


def _version(package: str) -> Value:
    return lambda each: each.record["versions"].get(package, "–")


def _unverified(folder: Compiled) -> str:
    found = folder.record["proof"]["unverified_inputs"]
    return "; ".join(f"{name}: {why}" for name, why in found.items()) or "none"


def _hidden_states(folder: Compiled) -> str:
    permuted = folder.record["hidden_states"]["permuted"]
    return "in a new order; permtriton.json has its inverse" if permuted else "in the dense model's order"

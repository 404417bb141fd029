"""Results as a table, for a terminal and in Markdown. Imports no torch: checking the Markdown pages uses it."""

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.goals import GOALS

OURS, COPY_BY_STREAM, COPY_BY_GRAPH = "permtriton", "copy_ of the same bytes, by stream", "copy_ of the same bytes"
COPIES = (COPY_BY_STREAM, COPY_BY_GRAPH)
HEADINGS = ("row", "case", "ours, us", "best peer, us", "floor, us", "figure", "goal", "met")


def lines(merged: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns one line per goal: row, case, our p50, the best peer's, floor, figure, bounds of the goal, verdict.

    Args:
        merged: from `benchmarks.gpu.merge.merge`.
    """
    found = []
    for row in merged["rows"]:
        ours, peer, floor = (_micro(row["times"].get(OURS)), _best_peer(row["times"]), row.get("floor_us"))
        for number, goal in enumerate(row["goals"]):
            first = (row["row"], row["case"], ours, peer, "-" if floor is None else f"{floor:.1f}")
            value = f"{goal['name']}: not measured" if goal["value"] is None else f"{goal['value']:.3g} {goal['name']}"
            bounds = _bounds(goal["least"], goal["most"])
            found.append((*(first if not number else ("",) * len(first)), value, bounds, _verdict(goal)))
    left_out = [(left["row"], f"left out: {' '.join(left['why'].split())[:160]}") for left in merged["left_out"]]
    found += [(row, "-", "-", "-", "-", why, "", "-") for row, why in left_out]
    measured = {(goal["of"], goal["name"]) for row in merged["rows"] for goal in row["goals"]}
    return found + [
        (row, "-", "-", "-", "-", f"{name}: not measured", _bounds(*bounds), "-")
        for row, figures in GOALS.items() for name, bounds in figures.items() if (row, name) not in measured
    ]  # fmt: skip


def captions(merged: dict[str, Any]) -> list[str]:
    """Returns what was measured on what, and what was found out besides times: one line each."""
    versions = ", ".join(f"{name} {merged['versions'][name]}" for name in ("torch", "triton", "cusparselt"))
    found = [f"{merged['hardware']['device']}; {versions}; medians."]
    found += [f"{report['what']}: {report['found']}." for report in merged["reports"]]
    found += [f"Warning: {warning}." for warning in merged["warnings"]]
    found += [f"Not run yet: {', '.join(merged['missing'])}."] * bool(merged["missing"])
    found += [f"Not used: {part}." for part in merged["not_used"]]
    for part in merged["parts"]:
        limited = sorted({f"{group}: {reason}" for group, states in part["gpu_state"].items()
                          for reason in (states.get("after") or {}).get("limited_by") or ()})  # fmt: skip
        held = f"; clocks were held down ({', '.join(limited)})" if limited else ""
        cut = "" if part["finished"] else "; it was cut off"
        found.append(f"`{part['command']}`: {part['started']}, commit {(part['commit'] or 'unknown')[:12]}, "
                     f"{_ceilings(part['ceilings'])}{held}{cut}.")  # fmt: skip
    return found


def print_table(merged: dict[str, Any]) -> None:
    """Prints the table."""
    title = merged["hardware"]["device"] + (", a rehearsal: the times mean nothing" if merged["rehearsal"] else "")
    table = Table(*HEADINGS, title=title, title_justify="left")
    for line in lines(merged):
        table.add_row(*line)
    console = Console(width=200, markup=False)
    console.print(table)
    for caption in captions(merged):
        console.print(caption)


def markdown(merged: dict[str, Any]) -> str:
    """Returns the table for NOTES.md, with the machine and versions it was measured on."""
    rows = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines(merged)]
    notes = [f"- {' '.join(caption.split())}" for caption in captions(merged)]
    head = [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    return "\n".join([*head, *(f"| {row} |" for row in rows), "", *notes])


def unmeasured() -> str:
    """Returns the table of NOTES.md until there is a result: the goals."""
    rows = ["| row | figure | goal | measured |", "|---|---|---|---|"]
    for row, figures in GOALS.items():
        rows += [f"| {row} | {name} | {_bounds(*bounds)} | not measured |" for name, bounds in figures.items()]
    return "\n".join(
        [*rows, "", "No GPU has run this version: the commands above, on a machine with one, fill this table."]
    )


def _micro(times: dict[str, Any] | None) -> str:
    return "-" if times is None else f"{times['p50_us']:.1f}"


def _best_peer(times: dict[str, dict[str, Any]]) -> str:
    peers = {name: quantiles["p50_us"] for name, quantiles in times.items() if name not in (OURS, *COPIES)}
    best = min(peers, key=peers.__getitem__, default=None)
    return "-" if best is None else f"{peers[best]:.1f} {best}"


def _bounds(least: float | None, most: float | None) -> str:
    parts = [f">= {least:g}"] if least is not None else []
    return ", ".join(parts + ([f"<= {most:g}"] if most is not None else []))


def _verdict(goal: dict[str, Any]) -> str:
    return {None: "-", True: "yes", False: "NO"}[goal["passed"]]


def _ceilings(limits: dict[str, Any] | None) -> str:
    if limits is None:
        return "no ceilings"
    return f"copy {limits['copy_gb_s']:.0f} GB/s, bf16 matmul {limits['matmul_tflop_s']:.0f} TFLOP/s"

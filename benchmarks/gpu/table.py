"""The result file as a table, for a terminal and in Markdown. Imports no torch: checking the Markdown pages uses it."""

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.goals import GOALS

OURS, COPY = "permtriton", "copy_ of the same bytes"
HEADINGS = ("row", "case", "ours, us", "best peer, us", "floor, us", "figure", "goal", "met")


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns one line per goal: row, case, our p50, the best peer's, floor, figure, bounds of the goal, verdict."""
    found = []
    for row in result["rows"]:
        ours, peer, floor = (_micro(row["times"].get(OURS)), _best_peer(row["times"]), row.get("floor_us"))
        for number, goal in enumerate(row["goals"]):
            first = (row["row"], row["case"], ours, peer, "-" if floor is None else f"{floor:.1f}")
            value = f"{goal['name']}: not measured" if goal["value"] is None else f"{goal['value']:.3g} {goal['name']}"
            bounds = _bounds(goal["least"], goal["most"])
            found.append((*(first if not number else ("",) * len(first)), value, bounds, _verdict(goal)))
    left_out = [(left["row"], f"left out: {' '.join(left['why'].split())[:160]}") for left in result["left_out"]]
    return found + [(row, "-", "-", "-", "-", why, "", "-") for row, why in left_out]


def print_table(result: dict[str, Any]) -> None:
    """Prints the table."""
    title = f"{result['hardware']['device']}" + (", a rehearsal: the times mean nothing" if result["rehearsal"] else "")
    table = Table(*HEADINGS, title=title, title_justify="left")
    for line in lines(result):
        table.add_row(*line)
    console = Console(width=200, markup=False)
    console.print(table)
    console.print(f"{_ceilings(result)}; p50 of each; GPU tests: {_tests(result)}")


def markdown(result: dict[str, Any]) -> str:
    """Returns the table for NOTES.md, with the machine and versions it was measured on."""
    rows = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines(result)]
    versions, hardware = result["versions"], result["hardware"]
    return "\n".join([
        f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS), *(f"| {row} |" for row in rows), "",
        f"{hardware['device']}; {_ceilings(result)}; torch {versions['torch']}, triton {versions['triton']}; commit "
        f"{(result['commit'] or 'unknown')[:12]}; medians; GPU tests: {_tests(result)}; `{result['command']}`.",
    ])  # fmt: skip


def unmeasured() -> str:
    """Returns the table of NOTES.md until there is a result: the goals."""
    rows = ["| row | figure | goal | measured |", "|---|---|---|---|"]
    for row, figures in GOALS.items():
        rows += [f"| {row} | {name} | {_bounds(*bounds)} | not measured |" for name, bounds in figures.items()]
    return "\n".join([
        *rows, "",
        "No GPU has run this version: `python -m benchmarks.gpu --out benchmarks/results`, on a machine with one, "
        "fills this table.",
    ])  # fmt: skip


def _micro(times: dict[str, Any] | None) -> str:
    return "-" if times is None else f"{times['p50_us']:.1f}"


def _best_peer(times: dict[str, dict[str, Any]]) -> str:
    peers = {name: quantiles["p50_us"] for name, quantiles in times.items() if name not in (OURS, COPY)}
    best = min(peers, key=peers.__getitem__, default=None)
    return "-" if best is None else f"{peers[best]:.1f} {best}"


def _bounds(least: float | None, most: float | None) -> str:
    parts = [f">= {least:g}"] if least is not None else []
    return ", ".join(parts + ([f"<= {most:g}"] if most is not None else []))


def _verdict(goal: dict[str, Any]) -> str:
    return {None: "-", True: "yes", False: "NO"}[goal["passed"]]


def _ceilings(result: dict[str, Any]) -> str:
    limits = result["ceilings"]
    if limits is None:
        return "ceilings not measured"
    return f"copy {limits['copy_gb_s']:.0f} GB/s, bf16 matmul {limits['matmul_tflop_s']:.0f} TFLOP/s"


def _tests(result: dict[str, Any]) -> str:
    return "not run" if result["tests"] is None else result["tests"]["summary"]

"""The result file as a table, on a terminal and in Markdown."""

from typing import Any

from rich.console import Console
from rich.table import Table

OURS, COPY = "permtriton", "copy_ of the same bytes"


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns a line a goal: row, case, our p50, the best peer's, the floor, the figure, its bounds, the verdict."""
    found = []
    for row in result["rows"]:
        ours, peer, floor = (_micro(row["times"].get(OURS)), _best_peer(row["times"]), row.get("floor_us"))
        for number, goal in enumerate(row["goals"]):
            first = (row["row"], row["case"], ours, peer, "-" if floor is None else f"{floor:.1f}")
            value = "not measured" if goal["value"] is None else f"{goal['value']:.3g} {goal['name']}"
            if goal["value"] is None:
                value += f": {goal['name']}"
            found.append((*(first if not number else ("",) * len(first)), value, _bounds(goal), _verdict(goal)))
    left_out = [(left["row"], f"left out: {left['why'][:160]}") for left in result["left_out"]]
    return found + [(row, "-", "-", "-", "-", why, "", "-") for row, why in left_out]


HEADINGS = ("row", "case", "ours, us", "best peer, us", "floor, us", "figure", "goal", "")


def print_table(result: dict[str, Any]) -> None:
    """Prints it."""
    title = f"{result['hardware']['device']}" + (", a rehearsal: the times mean nothing" if result["rehearsal"] else "")
    table = Table(*HEADINGS, title=title, title_justify="left")
    for line in lines(result):
        table.add_row(*line)
    console = Console(width=200)
    console.print(table, markup=False)
    limits = result["ceilings"]
    console.print(
        f"copy {limits['copy_gb_s']:.0f} GB/s, bf16 matmul {limits['matmul_tflop_s']:.0f} TFLOP/s; p50 of each"
    )


def markdown(result: dict[str, Any]) -> str:
    """Returns it for README.md, with what it was measured on."""
    rows = ["| " + " | ".join(HEADINGS[:-1]) + " | met |", "|" + "---|" * len(HEADINGS)]
    rows += ["| " + " | ".join(line) + " |" for line in lines(result)]
    versions, limits = result["versions"], result["ceilings"]
    rows += [
        "",
        f"{result['hardware']['device']}; copy {limits['copy_gb_s']:.0f} GB/s, bf16 matmul "
        f"{limits['matmul_tflop_s']:.0f} TFLOP/s; torch {versions['torch']}, triton {versions['triton']}; commit "
        f"{(result['commit'] or 'unknown')[:12]}; medians; `{result['command']}`.",
    ]
    return "\n".join(rows)


def _micro(times: dict[str, Any] | None) -> str:
    return "-" if times is None else f"{times['p50_us']:.1f}"


def _best_peer(times: dict[str, dict[str, Any]]) -> str:
    peers = {name: told["p50_us"] for name, told in times.items() if name not in (OURS, COPY)}
    best = min(peers, key=peers.__getitem__, default=None)
    return "-" if best is None else f"{peers[best]:.1f} {best}"


def _bounds(goal: dict[str, Any]) -> str:
    parts = [f">= {goal['least']:g}"] if goal["least"] is not None else []
    return ", ".join(parts + ([f"<= {goal['most']:g}"] if goal["most"] is not None else []))


def _verdict(goal: dict[str, Any]) -> str:
    return {None: "-", True: "yes", False: "NO"}[goal["passed"]]

"""Which rows there are, how long they take, their goals, and the results as a table. Imports no torch.

A row is what is measured, cut off and repeated as a whole. A call is a command of less than ten minutes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULE, OUT = "python -m benchmarks.gpu", "benchmarks/results/gpu.json"
SHAPES_7B = [(11008, 4096), (4096, 11008), (4096, 4096)]  # rows and channels of the linears of LLaMA-2-7B
OURS, COPIES = "permtriton", ("copy_ in a graph", "copy_ on the stream")
Bounds = tuple[float | None, float | None]


@dataclass(frozen=True)
class Row:
    """What is measured as a whole, in a process of its own.

    Attributes:
        call: command that it belongs to.
        seconds: predicted for an H200 and 16 cores, with the start of the process.
        limit: seconds after which it is cut off.
        what: is measured.
    """

    call: str
    seconds: int
    limit: int
    what: str


ROWS = {
    "tests": Row("checks", 115, 220, "tests/gpu in up to 8 processes"),
    "memcheck": Row("checks", 65, 125, "a small case of each kernel under compute-sanitizer"),
    "racecheck": Row("checks", 65, 125, "the same cases"),
    "cusparselt": Row("checks", 25, 45, "where cuSPARSELt keeps its values, and whether a CUDA graph can hold it"),
    "sparse_linear": Row("kernels", 55, 120, "the packed product with few tokens"),
    "nm_mask": Row("kernels", 25, 50, "masked weights, and the gradients of their permutation"),
    "permute": Row("kernels", 45, 90, "the gather, also as written by hand in CUDA"),
    "norm": Row("kernels", 25, 50, "RMSNorm that writes a permuted order"),
    "sinkhorn": Row("kernels", 60, 90, "the relaxation of one step, with torch.compile as a peer"),
    "assignment": Row("kernels", 40, 80, "the hard permutations of one step, with scipy as a peer"),
    "swap_gains": Row("kernels", 25, 60, "the gains of a search"),
    "prefill": Row("models", 45, 90, "the packed product with many tokens"),
    "learning_step": Row("models", 115, 200, "a learning step on 32 layers, at two micro-batch sizes"),
    "compile": Row("models", 60, 120, "permtriton.compile on two layers, with its default recipe"),
    "inference": Row("models", 80, 130, "32 layers packed: a forward pass, and generating text"),
}
CALLS = tuple(dict.fromkeys(row.call for row in ROWS.values()))

SPEED = "times the speed of "
COPY = "of copy bandwidth"
GOALS: dict[str, dict[str, Bounds]] = {  # how a result's name begins -> figure -> (least, most)
    "sparse_linear, 1 token": {f"{SPEED}cuBLAS, dense": (1.65, None)},
    "sparse_linear, 16 tokens": {f"{SPEED}cuBLAS, dense": (1.5, None)},
    "assignment": {"milliseconds": (None, 5.0), f"{SPEED}scipy in one thread": (200.0, None)},
    "sinkhorn forward": {COPY: (0.8, None)},
    "sinkhorn both": {f"{SPEED}eager torch": (20.0, None), f"{SPEED}torch.compile": (5.0, None)},
    "nm_mask forward": {COPY: (0.8, None)},
    "nm_mask backward": {COPY: (0.5, None)},
    "swap_gains": {"1e12 pairs and rows a second": (3.0, None)},
    "permute, 16384 rows": {COPY: (0.95, None)},
    "permute": {f"{SPEED}the kernel in CUDA": (0.95, None)},
    "RMSNorm": {f"{SPEED}our RMSNorm alone": (0.97, None)},
    "learning step": {f"{SPEED}a dense forward and backward pass": (0.95, None)},
    "2:4 prefill": {f"{SPEED}cuSPARSELt": (0.98, None), f"{SPEED}cuBLAS, dense": (1.0, None)},
}
HEADINGS = ("result", "case", "ours, us", "best peer, us", "floor, us", "figure", "goal", "met")


def read(file: Path) -> dict[str, Any]:
    """Returns the records of a result file; none where it is not there yet."""
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else {}


def plan(out: str = OUT) -> str:
    """Returns the commands with the minutes that each should take, for a terminal and for a Markdown page."""
    shapes = " ".join(f"--shape {rows}x{channels}" for rows, channels in SHAPES_7B)
    lines = [f"permtriton autotune {shapes}  # if it should be tuned first; repeat it where it is cut off"]
    for call in CALLS:
        rows = {name: row for name, row in ROWS.items() if row.call == call}
        expected, most = (sum(getattr(row, of) for row in rows.values()) / 60 for of in ("seconds", "limit"))
        lines.append(f"{MODULE} --out {out} --only {call}  # {expected:.0f} minutes expected, {most:.1f} at most")
        lines += [f"#   {name:<13} {row.seconds:>3} s expected, {row.limit} at most: {row.what}"
                  for name, row in rows.items()]  # fmt: skip
    return "\n".join([*lines, "python benchmarks/readme_tables.py"])


def goals_of(name: str) -> dict[str, Bounds]:
    """Returns the goals of a result: figure -> bounds."""
    return {figure: bounds for start, goals in GOALS.items() if name.startswith(start)
            for figure, bounds in goals.items()}  # fmt: skip


def lines(rows: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns a line per figure of each result, then one per failure, then one per row that has not run.

    Args:
        rows: of the result file.
    """
    found = []
    for name in (name for name in ROWS if name in rows):
        for result in rows[name]["results"]:
            ours = result["times"].get(OURS)
            peers = {peer: time["p50_us"] for peer, time in result["times"].items() if peer not in (OURS, *COPIES)}
            best = min(peers, key=peers.__getitem__, default=None)
            first = (result["name"], result["case"], f"{ours['p50_us']:.1f}" if ours else "-",
                     f"{peers[best]:.1f} {best}" if best else "-",
                     f"{result['floor_us']:.1f}" if result["floor_us"] else "-")  # fmt: skip
            bounds = goals_of(result["name"])
            for number, (figure, value) in enumerate(result["figures"].items()):
                low, high = bounds.get(figure, (None, None))
                inside = (low is None or value >= low) and (high is None or value <= high)
                met = "-" if rows[name]["tiny"] or figure not in bounds else "yes" if inside else "NO"
                start = ("",) * 5 if number else first
                found.append((*start, f"{value:.3g} {figure}", _words(low, high), met))
        found += [(failure["what"], *"----", f"failed: {failure['why'][:160]}", "", "NO")
                  for failure in rows[name]["failures"]]  # fmt: skip
    missing = ", ".join(name for name in ROWS if name not in rows)
    return found + [(missing, *"----", "not run yet", "", "-")] * bool(missing)


def captions(rows: Mapping[str, Any]) -> list[str]:
    """Returns what rows were measured on, and what was found out besides times."""
    machines: dict[str, list[str]] = {}
    found = []
    for name, row in rows.items():
        versions, rates = row["versions"], row["ceilings"]
        machine = f"{row['hardware']['device']}, {row['started'][:10]}, commit {(row['commit'] or 'unknown')[:12]}, "
        machine += ", ".join(f"{of} {versions[of]}" for of in ("torch", "triton", "cusparselt"))
        machines.setdefault(machine, []).append(name)
        if rates:
            found.append(f"{name}: copy {rates['copy_gb_s']:.0f} GB/s, product {rates['matmul_tflop_s']:.0f} TFLOP/s.")
        held = [reason for reason, is_so in (row["after"] or {}).items() if is_so == "Active"]
        found += [f"{name}: clocks were held down, {', '.join(held)}."] * bool(held)
        found += [f"{each['what']}: {each['found']}." for each in row["findings"]]
    return [f"{', '.join(names)}: {machine}." for machine, names in machines.items()] + found


def markdown(rows: Mapping[str, Any]) -> str:
    """Returns the table for NOTES.md: results, or the goals where there are none."""
    if not rows:
        goals = [(name, figure, _words(*bounds)) for name, goals in GOALS.items() for figure, bounds in goals.items()]
        body = [("result", "figure", "goal", "measured"), *((*goal, "not measured") for goal in goals)]
        notes = ["No GPU has run this version: the commands above, on a machine with one, fill this table."]
    else:
        body, notes = [HEADINGS, *lines(rows)], [f"- {' '.join(caption.split())}" for caption in captions(rows)]
    text = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in body]
    return "\n".join([text[0], "|" + "---|" * len(body[0]), *text[1:], "", *notes])


def _words(least: float | None, most: float | None) -> str:
    parts = [f">= {least:g}"] if least is not None else []
    return ", ".join(parts + ([f"<= {most:g}"] if most is not None else []))

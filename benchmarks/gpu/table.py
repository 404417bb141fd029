"""Which rows there are, how long they take, their goals, and the results as a table. Imports no torch.

A row is what is measured, cut off and repeated as a whole. A call is a command of less than ten minutes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULE, OUT = "python -m benchmarks.gpu", "gpu-results"
WHEELS = ("'pydantic>=2.12'", "'psutil>=6.0'", "pytest", "pytest-xdist")  # as a shell takes them
CALL_SECONDS = 570  # of a call, unless --seconds says otherwise
SHAPES_7B = [(11008, 4096), (4096, 11008), (4096, 4096)]  # rows and channels of the linears of LLaMA-2-7B
LAYER_8B = {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1}  # of LLaMA-3-8B -> how many of each
FEW, MORE, MANY = (1, 16, 64), (128, 256, 512, 1024), (4096, 8192)  # tokens; those with the highest goals first
PREFILL, DECODING = "2:4 prefill", "decoding, 8B shape"
OURS, COPIES = "permtriton", ("copy_ in a graph", "copy_ on the stream")
DENSE, BARE = "cuBLAS, dense", "cuSPARSELt"
Bounds = tuple[float | None, float | None]


@dataclass(frozen=True)
class Row:
    """What is measured as a whole, in a process of its own.

    Attributes:
        call: command that it belongs to.
        seconds: predicted for an H200 and 16 cores, with the start of the process.
        limit: seconds after which it is cut off.
        what: is measured.
        ahead: whether what it launches is compiled before, by processes that time nothing.
    """

    call: str
    seconds: int
    limit: int
    what: str
    ahead: bool = False


ROWS = {
    "first_look": Row("decode", 30, 80, "versions, ceilings, and whether every kernel is right as it runs by default"),
    "tests": Row("decode", 115, 220, "tests/gpu in up to 8 processes"),
    "sparse_linear": Row("decode", 90, 180, "the packed product with 1 to 1024 tokens, shapes of an 8B model", True),
    "prefill": Row("decode", 60, 120, "the packed product with many tokens", True),
    "decoding": Row("decode", 100, 180, "a model of the 8B shape, a step captured in a CUDA graph"),
    "tune": Row(
        "tuned", 200, 230, "configurations and routes of what was measured before, the most valuable first", True
    ),
    "sparse_linear_tuned": Row("tuned", 80, 160, "the same with the fastest configurations"),
    "prefill_tuned": Row("tuned", 50, 110, "the same with the fastest configurations"),
    "decoding_tuned": Row("tuned", 90, 170, "the same with the fastest configurations"),
    "counters": Row("tuned", 40, 90, "the two decoding kernels under ncu: share of DRAM, why warps wait"),
    "learning_step": Row("learning", 120, 210, "a learning step on 32 layers, at two micro-batch sizes"),
    "compile_default": Row("learning", 130, 240, "permtriton.compile of a 1B shape, recipe default"),
    "compile_fast": Row("learning", 80, 160, "the same, recipe fast"),
    "inference": Row("learning", 80, 140, "32 layers packed: a forward pass, and generating text"),
    "memcheck": Row("rest", 65, 125, "a small case of each kernel under compute-sanitizer"),
    "racecheck": Row("rest", 65, 125, "the same cases"),
    "nm_mask": Row("rest", 25, 50, "masked weights, the gradients of their permutation, and unpacking", True),
    "permute": Row("rest", 25, 90, "the gather, also as written by hand in CUDA", True),
    "norm": Row("rest", 25, 50, "RMSNorm that writes a permuted order", True),
    "sinkhorn": Row("rest", 50, 90, "the relaxation of one step, with torch.compile as a peer", True),
    "assignment": Row("rest", 40, 80, "the hard permutations of one step, with scipy as a peer", True),
    "swap_gains": Row("rest", 25, 60, "the gains of a search", True),
}
CALLS = tuple(dict.fromkeys(row.call for row in ROWS.values()))
AHEAD_SECONDS = 90  # at most, for compiling before the rows of a call

SPEED = "times the speed of "
COPY, READ = "of copy bandwidth", "of read bandwidth"
PAIRS = "1e12 pairs and rows a second"
LAYER = "the linears of an 8B layer"
GOALS: dict[str, dict[str, Bounds]] = {  # how a result's name and case begin -> figure -> (least, most)
    f"sparse_linear, 1 token: {LAYER}": {f"{SPEED}{DENSE}": (1.6, None)},
    "sparse_linear, 1 token: 4096x4096": {f"{SPEED}{DENSE}": (1.45, None)},
    f"sparse_linear, 16 tokens: {LAYER}": {f"{SPEED}{DENSE}": (1.55, None)},
    f"sparse_linear, 64 tokens: {LAYER}": {f"{SPEED}{DENSE}": (1.4, None)},
    "sparse_linear, 128 tokens": {f"{SPEED}{DENSE}": (1.0, None)},
    "sparse_linear, 256 tokens": {f"{SPEED}{DENSE}": (1.0, None)},
    "sparse_linear, 512 tokens": {f"{SPEED}{DENSE}": (1.0, None)},
    "sparse_linear, 1024 tokens": {f"{SPEED}{DENSE}": (1.0, None)},
    PREFILL: {f"{SPEED}{DENSE}": (1.5, None), f"{SPEED}{BARE}, tuned": (0.98, None)},
    f"{DECODING}: batch 1,": {f"{SPEED}{DENSE}": (1.4, None)},
    f"{DECODING}: batch 64,": {f"{SPEED}{DENSE}": (1.25, None)},
    "learning step": {f"{SPEED}a dense forward and backward pass": (0.95, None)},
    "assignment": {"milliseconds": (None, 5.0), f"{SPEED}scipy in one thread": (200.0, None)},
    "sinkhorn forward": {COPY: (0.8, None)},
    "sinkhorn both": {f"{SPEED}eager torch": (20.0, None), f"{SPEED}torch.compile": (5.0, None)},
    "nm_mask forward": {COPY: (0.8, None)},
    "nm_mask backward": {COPY: (0.5, None)},
    "swap_gains": {PAIRS: (3.0, None)},
    "unpack": {COPY: (0.8, None)},
    "permute, 16384 rows": {COPY: (0.95, None)},
    "permute": {f"{SPEED}the kernel in CUDA": (0.95, None)},
    "RMSNorm": {f"{SPEED}our RMSNorm alone": (0.97, None)},
}
HEADINGS = ("result", "case", "ours, us", "best peer, us", "floor, us", "figures", "goal", "met", "ran as")


def read(file: Path) -> dict[str, Any]:
    """Returns the records of a result file; none where it is not there yet."""
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else {}


def plan(out: str = OUT, commit: str | None = None, with_rows: bool = True) -> str:
    """Returns the commands with the minutes that each should take, and what each row of a call takes."""
    known = f" --commit {commit}" if commit else ""
    lines = [
        "# Where there is a network, in the repository's root: a folder to take along, with the packages that a",
        "# machine with torch and transformers may lack (for Python 3.12; only compile_* and tests need them).",
        "git archive --prefix=permtriton-gpu/ HEAD | tar -x -C ..",
        "git describe --always --abbrev=40 --dirty > ../permtriton-gpu/COMMIT",
        "python -m pip download --only-binary=:all: --python-version 3.12 --implementation cp --platform "
        f"manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d ../permtriton-gpu/wheels {' '.join(WHEELS)}",
        "# There, in that folder. Nothing is installed but what the first line installs; each call ends by itself,",
        f"# goes on where an earlier one was cut off, and leaves all that it found in {out}: keep it between calls.",
        f"python -m pip install --no-index --find-links wheels {' '.join(WHEELS)}",
    ]
    for call in CALLS:
        rows = {name: row for name, row in ROWS.items() if row.call == call}
        seconds = sum(row.seconds for row in rows.values())
        minutes = (seconds + AHEAD_SECONDS / 2 * any(row.ahead for row in rows.values())) / 60
        lines.append(f"{MODULE} --out {out} --only {call}{known}  "
                     f"# {minutes:.0f} minutes expected, {CALL_SECONDS / 60:.1f} at most")  # fmt: skip
        lines += [f"#   {name:<19} {row.seconds:>3} s expected, {row.limit} at most: {row.what}"
                  for name, row in rows.items() if with_rows]  # fmt: skip
    return "\n".join([
        *lines, "# Back in the repository: its results become the table of benchmarks/NOTES.md.",
        f"cp {out}/results.json benchmarks/results/gpu.json && python benchmarks/readme_tables.py",
    ])  # fmt: skip


def goals_of(name: str, case: str = "") -> dict[str, Bounds]:
    """Returns the goals of a result: figure -> bounds; those of a row that was tuned are those of the same result."""
    about = f"{name}: {case}"
    return {figure: bounds for start, goals in GOALS.items() if about.startswith(start)
            for figure, bounds in goals.items()}  # fmt: skip


def lines(rows: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns a line per result, one per failure, one per row that was cut off, and one of those that have not run.

    Args:
        rows: of the result file.
    """
    found = []
    for name in (name for name in ROWS if name in rows):
        row = rows[name]
        found += [_line(name, result, row["tiny"]) for result in row["results"]]
        found += [(failure["what"], *"----", f"failed: {failure['why'][:160]}", "", "NO", "")
                  for failure in row["failures"]]  # fmt: skip
        if row["seconds"] is None:
            found.append((name, *"----", "not finished: the same command goes on with it", "", "-", ""))
    missing = ", ".join(name for name in ROWS if name not in rows)
    return found + [(missing, *"----", "not run yet", "", "-", "")] * bool(missing)


def _line(row: str, result: Mapping[str, Any], tiny: bool) -> tuple[str, ...]:
    ours, rejected = result["times"].get(OURS), result.get("rejected", [])
    peers = {peer: time["p50_us"] for peer, time in result["times"].items() if peer not in (OURS, *COPIES)}
    best = min(peers, key=peers.__getitem__, default=None)
    goals = {figure: bounds for figure, bounds in goals_of(result["name"], result["case"]).items()
             if figure in result["figures"]}  # fmt: skip
    inside = (
        (low is None or result["figures"][figure] >= low) and (high is None or result["figures"][figure] <= high)
        for figure, (low, high) in goals.items()
    )
    met = "-" if tiny or not goals else "yes" if all(inside) and not rejected else "NO"
    return (
        result["name"] + ", tuned" * row.endswith("_tuned"), result["case"], f"{ours['p50_us']:.1f}" if ours else "-",
        f"{peers[best]:.1f} {best}" if best else "-", f"{result['floor_us']:.1f}" if result["floor_us"] else "-",
        "; ".join(f"{value:.3g} {figure}" for figure, value in result["figures"].items()),
        "; ".join(f"{_words(*bounds)} {figure}" if len(result["figures"]) > 1 else _words(*bounds)
                  for figure, bounds in goals.items()), met,
        ", ".join(result.get("routes", [])) + "; REJECTED: " * bool(rejected) + ", ".join(rejected),
    )  # fmt: skip


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
            found.append(f"{name}: copy {rates['copy_gb_s']:.0f} GB/s, read {rates['read_gb_s']:.0f} GB/s, product "
                         f"{rates['matmul_tflop_s']:.0f} TFLOP/s.")  # fmt: skip
        held = [reason for reason, is_so in (row["after"] or {}).items() if is_so == "Active"]
        found += [f"{name}: clocks were held down, {', '.join(held)}."] * bool(held)
        found += [f"{each['what']}: {each['found']}." for each in row["findings"]]
    return [f"{', '.join(names)}: {machine}." for machine, names in machines.items()] + found


def markdown(rows: Mapping[str, Any]) -> str:
    """Returns the table for NOTES.md: results, or the goals where there are none."""
    if not rows:
        shown = {f"{SPEED}{DENSE}", *(figure for _, figure in PEERS.values())}
        goals = [(name, f"{_words(*bounds)} {figure}") for name, goals in GOALS.items()
                 for figure, bounds in goals.items() if figure not in shown]  # fmt: skip
        body = [("result", "goal"), *goals]
        notes = ["No GPU has run this version: the commands above, on a machine with one, fill this table. "
                 "The other goals are in the tables of predictions."]  # fmt: skip
    else:
        body, notes = [HEADINGS, *lines(rows)], [f"- {' '.join(caption.split())}" for caption in captions(rows)]
    text = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in body]
    return "\n".join([text[0], "|" + "---|" * len(body[0]), *text[1:], "", *notes])


PREDICTED = ("row", "case", "MB", "instructions per unit", "issue floor, us", "latency, us", "waves", "limited by",
             "predicted, us", "dense or a copy, us", "ratio", "goal", "measured")  # fmt: skip
PEERS = {  # how a counted kernel's name begins -> the result that has its goal, and the figure
    "permute": ("permute, 16384 rows", COPY), "sinkhorn backward": ("sinkhorn backward", COPY),
    "sinkhorn": ("sinkhorn forward", COPY), "nm_mask backward": ("nm_mask backward", COPY),
    "nm_mask": ("nm_mask forward", COPY), "norm_permute": ("RMSNorm", f"{SPEED}our RMSNorm alone"),
    "packing": ("unpack", COPY), "swap_gains": ("swap_gains", PAIRS), "assignment": ("assignment", "milliseconds"),
}  # fmt: skip
FIXED_US = 2.0  # of a launch in a CUDA graph: its first bytes, its last stores


def predicted(report: Mapping[str, Any], rows: Mapping[str, Any]) -> str:
    """Returns what is predicted for an H200: the products of an 8B layer, then the named shapes of other kernels.

    Args:
        report: of ``benchmarks/issue_floor.py``.
        rows: of the result file; what they measured stands in the last column.
    """
    found = [_predicted_product(one, rows) for one in report["predicted"] if not _by_others(one)]
    found += [_predicted_kernel(one, rows) for one in report["now"]["rows"]
              if one["gpu"] == "H200" and not one["name"].startswith("sparse_linear")]  # fmt: skip
    text = [f"| {' | '.join(line)} |" for line in (PREDICTED, *found)]
    return "\n".join([text[0], "|" + "---|" * len(PREDICTED), *text[1:]])


def _by_others(one: Mapping[str, Any]) -> bool:
    return "measured_at" in one or (one["case"] == LAYER and one["tokens"] > MORE[0] and "in CUDA" not in one["name"])


def predicted_many(report: Mapping[str, Any], rows: Mapping[str, Any]) -> str:
    """Returns what is predicted of cuSPARSELt: a line per number of tokens; see `predicted`."""
    found = [one for one in report["predicted"] if _by_others(one)]
    cases = list(dict.fromkeys(one["case"] for one in found))
    text = [("tokens", "goal", *cases)]
    for tokens in dict.fromkeys(one["tokens"] for one in found):
        mine = {one["case"]: one for one in found if one["tokens"] == tokens}
        low = goals_of(product_name(tokens))[f"{SPEED}{DENSE}"][0] or 0.0
        cells = []
        for case in cases:
            one, seen = mine[case], _measured(rows, product_name(tokens), case, f"{SPEED}{DENSE}")
            cell = f"{one['us']:,.0f}/{one['dense_us']:,.0f}, {one['ratio']:.2f}" + " MISSED" * (one["ratio"] < low)
            cells.append(cell + f", measured {seen}" * (seen != "-"))
        text.append((str(tokens), f">= {low:g}", *cells))
    lines = [f"|{'|'.join(line)}|" for line in text]
    return "\n".join([lines[0], "|" + "---|" * len(text[0]), *lines[1:]])


def product_name(tokens: int) -> str:
    """Returns the name of the result of a product of some tokens."""
    if tokens in MANY:
        return f"{PREFILL}, {tokens} tokens"
    return f"sparse_linear, {tokens} token{'s' * (tokens > 1)}"


def _predicted_product(one: Mapping[str, Any], rows: Mapping[str, Any]) -> tuple[str, ...]:
    figure, case = f"{SPEED}{DENSE}", one["case"]
    low = goals_of(one["name"], case).get(figure, (None, None))[0]

    def shown(part: str, digits: int = 1, unit: float = 1.0) -> str:
        return f"{one[part] / unit:.{digits}f}" if part in one else ""

    return (
        one["name"], case, shown("bytes", unit=1e6), shown("per_unit"), shown("issue_us"), shown("latency_us"),
        shown("waves", 2), one["limit"], f"{one['us']:,.1f}", f"{one['dense_us']:,.1f}", f"{one['ratio']:.2f}",
        _goal(low, one["ratio"]), _measured(rows, one["name"], case if one["name"] != DECODING else case[:9], figure),
    )  # fmt: skip


def _measured(rows: Mapping[str, Any], name: str, case: str, figure: str) -> str:
    """Returns a figure of each result of a name, and of cases that begin like ``case``."""
    found = [
        f"{result['figures'][figure]:.2f}"
        for row in rows.values()
        for result in row["results"]
        if result["name"] == name and result["case"].startswith(case) and figure in result["figures"]
    ]
    return ", then ".join(found) or "-"


def _goal(low: float | None, ratio: float) -> str:
    return "" if low is None else f">= {low:g}" + ", MISSED" * (ratio < low)


def _predicted_kernel(one: Mapping[str, Any], rows: Mapping[str, Any]) -> tuple[str, ...]:
    parts = {"bytes": one["memory_us"], "issuing": one["issue_us"], "latency": one["latency_us"]}
    certain = None not in parts.values()
    us = max(value for value in parts.values() if value is not None) + FIXED_US
    ratio, copy = (one["memory_us"] + FIXED_US) / us, f"{one['memory_us'] + FIXED_US:.0f}"
    name, figure = next(PEERS[start] for start in PEERS if one["name"].startswith(start))
    low, high = goals_of(name).get(figure, (None, None))
    if figure == PAIRS:  # of so many, 6.9 instructions each: the time of a copy says nothing
        ratio, copy = one["units"] / us / 1e6, "-"

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    goal = _goal(low, ratio) if certain else "" if high is None else f"<= {high:g}"
    return (
        one["name"].split()[0], " ".join(one["name"].split()[1:]), f"{one['bytes'] / 1e6:.0f}", shown(one["per_unit"]),
        shown(one["issue_us"]), shown(one["latency_us"]), f"{one['waves']:.2f}",
        max(parts, key=lambda of: parts[of]) if certain else "the data", f"{us:,.0f}" if certain else "-", copy,
        f"{ratio:.2f}" if certain else "-", f"{goal} {figure}" if goal and figure not in (COPY,) else goal,
        _measured(rows, name, "", figure),
    )  # fmt: skip


def _words(least: float | None, most: float | None) -> str:
    parts = [f">= {least:g}"] if least is not None else []
    return ", ".join(parts + ([f"<= {most:g}"] if most is not None else []))

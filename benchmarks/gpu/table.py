"""Which rows there are, how long they take, their goals, and the results as a table. Imports no torch.

A row is what is measured, cut off and repeated as a whole. A call is a command of less than ten minutes: as many of the
most valuable rows as fit.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULE, OUT = "python -m benchmarks.gpu", "gpu-results"
WHEELS = ("'pydantic>=2.12'", "'psutil>=6.0'", "pytest", "pytest-xdist")  # as a shell takes them
CALL_SECONDS = 570  # of a call, unless --seconds says otherwise
LAYER_8B = {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1}  # of LLaMA-3-8B -> how many of each
FEW, MORE, MANY = (1, 16, 64), (128, 256, 512, 1024), (4096, 8192)  # tokens; those with the highest goals first
MERGED_8B = {(6144, 4096): 1, (4096, 4096): 1, (28672, 4096): 1, (4096, 14336): 1}  # with q, k, v and gate, up as one
TABLE_3 = {"q, k, v, o": (4096, 4096), "up, gate": (11008, 4096), "down": (4096, 11008)}  # of LLaMA-2-7B
PREFILL, DECODING, COMPILED = "2:4 prefill", "decoding, 8B shape", "decoding, 8 layers of the 8B shape, torch.compile"
OURS, COPIES = "permtriton", ("copy_ in a graph", "copy_ on the stream")
DENSE, BARE, DENSE_FP8 = "cuBLAS, dense", "cuSPARSELt", "_scaled_mm, dense FP8"
# Bytes per weight, and what products in bfloat16 showed: bytes per microsecond, and microseconds per launch.
FP8_ESTIMATE = {DENSE_FP8: (1, 4.71e6, 6.14), OURS: (5 / 8, 4.01e6, 2.55)}
Bounds = tuple[float | None, float | None]


@dataclass(frozen=True)
class Row:
    """What is measured as a whole, in a process of its own.

    Attributes:
        seconds: on an H200 and 16 cores, measured or, where it was not yet, expected; with the start of the process.
        limit: seconds after which it is cut off.
        what: is measured.
        ahead: whether what it launches is compiled before, by processes that time nothing.
    """

    seconds: int
    limit: int
    what: str
    ahead: bool = False


ROWS = {  # in the order of their worth
    "first_look": Row(30, 80, "versions, ceilings, and whether every kernel is right as it runs by default"),
    "paper": Row(30, 90, "the paper's Table 3: products and permutations of LLaMA-2-7B, 2048 tokens", True),
    "kernels": Row(60, 140, "every Triton kernel of pruning once, beside a copy of its bytes", True),
    "sparse_linear": Row(30, 90, "the packed product with 1 to 1024 tokens, shapes of an 8B model", True),
    "decoding_compiled": Row(120, 220, "a step of decoding of 8 layers of the 8B shape under torch.compile"),
    "sparse_linear_fp8": Row(60, 150, "the packed FP8 product with 1 to 4096 tokens, its input quantized", True),
    "quantize": Row(30, 60, "activations quantized per token", True),
    "merged": Row(25, 80, "the packed product with q, k, v and gate, up as one, as engines have them", True),
    "prefill": Row(25, 60, "the packed product with many tokens", True),
    "compile_layers": Row(60, 150, "permtriton.compile of 4 layers of the 8B shape, recipe default, profiled"),
    "decoding": Row(45, 110, "a model of the 8B shape, a step captured in a CUDA graph"),
    "tune": Row(200, 230, "configurations and routes of what was measured before, the most valuable first", True),
    "sparse_linear_tuned": Row(30, 90, "sparse_linear with the fastest configurations"),
    "prefill_tuned": Row(25, 60, "prefill with the fastest configurations"),
    "decoding_tuned": Row(45, 110, "decoding with the fastest configurations"),
    "tests": Row(200, 300, "tests/gpu in up to 8 processes"),
    "learning_step": Row(80, 160, "a learning step on 32 layers, at two micro-batch sizes"),
    "compile_default": Row(105, 200, "permtriton.compile of a 1B shape, recipe default"),
    "compile_fast": Row(80, 160, "the same, recipe fast"),
    "inference": Row(80, 140, "32 layers packed: a forward pass, and generating text"),
    "counters": Row(40, 90, "the two decoding kernels under ncu: share of DRAM, why warps wait"),
    "memcheck": Row(65, 125, "a small case of each kernel under compute-sanitizer"),
    "racecheck": Row(65, 125, "the same cases"),
    "sinkhorn": Row(50, 90, "the relaxation of one step, with torch.compile as a peer", True),
    "assignment": Row(40, 80, "the hard permutations of one step, with scipy as a peer", True),
}
AHEAD_SECONDS = 60  # at most, for compiling before the rows of a call
USED = 2 / 3  # of the minutes that a machine is lent; it starts, idles and closes in the rest


def calls(minutes: float) -> list[tuple[list[str], float]]:
    """Returns the rows of each call and its seconds at most: the most valuable rows that fit into them.

    Args:
        minutes: that a machine is lent.
    """
    left, planned, found = 60 * minutes * USED, set[str](), []
    while left > 0:
        limit = min(CALL_SECONDS, left if found else 0.6 * left)
        rows: list[str] = []
        for name in ROWS:
            in_vain = name.endswith("_tuned") and "tune" not in planned | {*rows}
            if name not in planned and not in_vain and seconds_of([*rows, name]) <= limit:
                rows.append(name)
        if not rows:
            break
        found.append((rows, limit))
        planned |= {*rows}
        left -= limit
    return found


def seconds_of(names: Sequence[str]) -> float:
    """Returns the seconds that a call of these rows is expected to take."""
    rows = [ROWS[name] for name in names]
    return sum(row.seconds for row in rows) + AHEAD_SECONDS / 2 * any(row.ahead for row in rows)


SPEED = "times the speed of "
COPY, READ, FLOOR = "of copy bandwidth", "of read bandwidth", "of the floor's speed"
PAIRS = "1e12 pairs and rows a second"
LAYER, MERGED = "the linears of an 8B layer", "the linears of an 8B layer, merged"
GOALS: dict[str, dict[str, Bounds]] = {  # how a result's name and case begin -> figure -> (least, most)
    f"sparse_linear, 1 token: {LAYER}": {f"{SPEED}{DENSE}": (1.6, None)},
    "sparse_linear, 1 token: 4096x4096": {f"{SPEED}{DENSE}": (1.45, None)},
    f"sparse_linear, 16 tokens: {LAYER}": {f"{SPEED}{DENSE}": (1.55, None)},
    f"sparse_linear, 64 tokens: {LAYER}": {f"{SPEED}{DENSE}": (1.4, None)},
    "sparse_linear, 128 tokens": {f"{SPEED}{DENSE}": (1.0, None)},
    "sparse_linear, 256 tokens": {f"{SPEED}{DENSE}": (1.0, None)},
    "sparse_linear, 512 tokens": {f"{SPEED}{DENSE}": (1.0, None)},
    "sparse_linear, 1024 tokens": {f"{SPEED}{DENSE}": (1.0, None)},
    **{
        f"sparse_linear_fp8, {tokens}: {LAYER}": {f"{SPEED}{DENSE}": (dense, None), f"{SPEED}{DENSE_FP8}": (fp8, None)}
        for tokens, dense, fp8 in (
            ("1 token", 2.4, 1.25),
            ("16 tokens", 2.25, 1.25),
            ("64 tokens", 2.1, 1.15),
            ("256 tokens", 2.0, 1.05),
            ("4096 tokens", 2.25, 1.15),
        )
    },
    PREFILL: {f"{SPEED}{DENSE}": (1.5, None), f"{SPEED}{BARE}, tuned": (0.98, None)},
    f"{DECODING}: batch 1,": {f"{SPEED}{DENSE}": (1.4, None)},
    f"{DECODING}: batch 64,": {f"{SPEED}{DENSE}": (1.25, None)},
    f"{COMPILED}: batch 1,": {f"{SPEED}{DENSE}": (1.4, None)},
    f"{COMPILED}: batch 64,": {f"{SPEED}{DENSE}": (1.25, None)},
    "learning step": {f"{SPEED}a dense forward and backward pass": (0.95, None)},
    "assignment": {"milliseconds": (None, 5.0), f"{SPEED}scipy in one thread": (200.0, None)},
    "sinkhorn forward": {COPY: (0.8, None)},
    "sinkhorn both": {f"{SPEED}eager torch": (20.0, None), f"{SPEED}torch.compile": (5.0, None)},
    "nm_mask": {COPY: (0.8, None)},
    "placement_gradient": {PAIRS: (1.0, None)},
    "distances": {f"{SPEED}torch.cdist": (5.0, None)},
    "swap_gains": {PAIRS: (3.0, None)},
    "unpack": {COPY: (0.8, None)},
    "permute, 16384 rows": {COPY: (0.95, None)},
    "permute": {f"{SPEED}the kernel in CUDA": (0.95, None), COPY: (0.8, None)},
    "RMSNorm": {f"{SPEED}our RMSNorm alone": (0.97, None), COPY: (0.8, None)},
    "quantize": {COPY: (0.8, None)},
}
HEADINGS = ("result", "case", "ours, us", "best peer, us", "floor, us", "figures", "goal", "met", "ran as")


def read(file: Path) -> dict[str, Any]:
    """Returns the records of a result file; none where it is not there yet."""
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else {}


def plan(minutes: float, out: str = OUT, commit: str | None = None) -> str:
    """Returns the commands for a machine that is lent for some minutes, and what each row of a call takes."""
    known = f" --commit {commit}" if commit else ""
    lines = [
        "# Where there is a network, in the repository's root: a folder to take along, with the packages that a",
        "# machine with torch and transformers may lack (for Python 3.12; only compile_* and tests need them).",
        "git archive --prefix=permtriton-gpu/ HEAD | tar -x -C ..",
        "git describe --always --abbrev=40 --dirty > ../permtriton-gpu/COMMIT",
        "python -m pip download --only-binary=:all: --python-version 3.12 --implementation cp --platform "
        f"manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d ../permtriton-gpu/wheels {' '.join(WHEELS)}",
        "# In an environment with that machine's Python, torch, Triton, transformers and scipy; it needs no GPU:",
        f"{MODULE}.beforehand --out ../permtriton-gpu/{out}",
        "# There, in that folder, one call right after the other: a machine that idles may be taken back. Nothing is",
        "# installed but what the first line installs; each call ends by itself, goes on where an earlier one was cut",
        f"# off, and leaves all that it found in {out}: keep it between calls.",
        f"python -m pip install --no-index --find-links wheels {' '.join(WHEELS)}",
    ]
    planned = calls(minutes)
    for names, seconds in planned:
        only = "".join(f" --only {name}" for name in names)
        lines.append(f"{MODULE} --out {out} --seconds {seconds:.0f}{only}{known}  "
                     f"# {seconds_of(names):.0f} s expected")  # fmt: skip
        lines += [f"#   {name:<19} {ROWS[name].seconds:>3} s expected, {ROWS[name].limit} at most: {ROWS[name].what}"
                  for name in names]  # fmt: skip
    if rest := [name for name in ROWS if not any(name in names for names, _ in planned)]:
        lines.append(f"# Not in these {minutes:g} minutes: {', '.join(rest)}")
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

    A product of a single shape has its line if it misses its goal; of prefill, only with the smaller number of tokens.

    Args:
        rows: of the result file.
    """
    found = []
    for name in (name for name in ROWS if name in rows):
        row = rows[name]
        for result in row["results"]:
            line = _line(name, result, row["tiny"])
            if f"{MANY[-1]} tokens" in result["name"]:
                continue
            if name not in ("sparse_linear", "sparse_linear_fp8") or result["case"] == LAYER or "NO" in line:
                found.append(line)
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
        "; ".join(f"{value:.3g} {figure}" for figure, value in result["figures"].items()
                  if figure in goals or figure in (FLOOR, f"{SPEED}{best}") or not figure.startswith((SPEED, READ))),
        "; ".join(f"{_words(*bounds)} {figure}" if len(result["figures"]) > 1 else _words(*bounds)
                  for figure, bounds in goals.items()), met,
        ", ".join(result.get("routes", [])) + "; REJECTED: " * bool(rejected) + ", ".join(rejected),
    )  # fmt: skip


def captions(rows: Mapping[str, Any]) -> list[str]:
    """Returns what rows were measured on, and what was found out besides times."""
    machines: dict[str, list[str]] = {}
    held: dict[str, list[str]] = {}
    found = []
    for name, row in rows.items():
        versions, rates = row["versions"], row["ceilings"]
        machine = f"{row['hardware']['device']}, {row['started'][:10]}, commit {(row['commit'] or 'unknown')[:12]}, "
        machine += ", ".join(f"{of} {versions[of]}" for of in ("torch", "triton", "cusparselt"))
        machines.setdefault(machine, []).append(name)
        if rates:
            found.append(f"{name}: copy {rates['copy_gb_s']:.0f} GB/s, read {rates['read_gb_s']:.0f} GB/s, product "
                         f"{rates['matmul_tflop_s']:.0f} TFLOP/s.")  # fmt: skip
        for reason, is_so in (row["after"] or {}).items():
            if is_so == "Active":
                held.setdefault(reason, []).append(name)
        found += [f"{each['what']}: {each['found']}." for each in row["findings"]]
    found += [f"{', '.join(names)}: clocks were held down, {reason}." for reason, names in held.items()]
    return [f"{', '.join(names)}: {machine}." for machine, names in machines.items()] + found


def markdown(rows: Mapping[str, Any]) -> str:
    """Returns the table for NOTES.md: results, or the goals where there are none."""
    if not rows:
        goals = [(name, f"{_words(*bounds)} {figure}") for name, goals in GOALS.items()
                 for figure, bounds in goals.items()]  # fmt: skip
        body = [("result", "goal"), *goals]
        notes = ["No GPU has run this version: the commands above, on a machine with one, fill this table."]
    else:
        body, notes = [HEADINGS, *lines(rows)], [f"- {' '.join(caption.split())}" for caption in captions(rows)]
    text = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in body]
    short = ((f" {SPEED}", "x "), (FLOOR, "of the floor"), (", dense", ""))  # cuBLAS is dense, the floor a speed
    text = [functools.reduce(lambda line, words: line.replace(*words), short, line) for line in text]
    return "\n".join([text[0], "|" + "---|" * len(body[0]), *text[1:], "", *notes])


def summary(rows: Mapping[str, Any]) -> str:
    """Returns how fast packed products and decoding were, for the README: a line per number of tokens.

    Raises:
        KeyError: a product of the layer was not measured.
    """
    found = {(result["name"], result["case"]): result["times"]
             for row in ("sparse_linear", "prefill", "decoding", "sparse_linear_fp8") if row in rows
             for result in rows[row]["results"]}  # fmt: skip
    lines = ["| tokens at once | dense, us | packed 2:4, us | times as fast | cuSPARSELt, its best algorithm, us "
             "| dense FP8, us | packed FP8, us |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for tokens in (*FEW, *MORE, *MANY):
        parts = [(found[product_name(tokens), f"{rows}x{channels}"], count)
                 for (rows, channels), count in LAYER_8B.items()]  # fmt: skip
        dense, ours, theirs = (
            sum(count * times[of]["p50_us"] for times, count in parts) for of in (DENSE, OURS, f"{BARE}, tuned")
        )
        fp8 = found.get((fp8_product_name(tokens), LAYER), {})
        columns = [_in_fp8(fp8, of, tokens) for of in (DENSE_FP8, OURS)]
        lines.append(f"| {tokens} | {dense:,.0f} | {ours:,.0f} | {dense / ours:.2f} | {theirs:,.0f} "
                     f"| {' | '.join(columns)} |")  # fmt: skip
    steps = [
        f"{times[OURS]['p50_us'] / 1e3:.2f} ms in place of {times[DENSE]['p50_us'] / 1e3:.2f} for "
        f"{case.partition(',')[0]} ({times[DENSE]['p50_us'] / times[OURS]['p50_us']:.2f} times as fast)"
        for (name, case), times in found.items() if name == DECODING
    ]  # fmt: skip
    about, first = rows["sparse_linear"], rows["decoding"]["results"][0]
    packed = first["floor_us"] / 1e3  # of reading its bytes alone
    dense = packed / first["figures"]["of the dense model's bytes"]
    lines += ["", f"All linears of a layer of LLaMA-3-8B's shapes, bfloat16, on one {about['hardware']['device']}. A "
              f"step of decoding of the whole model, with 512 tokens of context, takes {', '.join(steps)}, as "
              "transformers launches it, in CUDA graphs. Reading the bytes alone would take "
              f"{dense:.1f} ms (dense) and {packed:.1f} ms (packed). From 512 tokens on, ours is cuSPARSELt's "
              "product. Random weights; torch "
              f"{about['versions']['torch']}, cuSPARSELt {about['versions']['cusparselt']}."]  # fmt: skip
    if any("~" in line for line in lines):
        lines[-1] += (" What begins with ~ is an estimate, not measured: the bytes of the weights in FP8 at the rate, "
                      "and the time per launch, of the products in bfloat16 here.")  # fmt: skip
    return "\n".join(lines)


def _in_fp8(times: Mapping[str, Any], of: str, tokens: int) -> str:
    """Returns the microseconds of a layer's products in FP8; an estimate where reading weights is all that counts."""
    if of in times:
        return f"{times[of]['p50_us']:,.0f}"
    if tokens not in FEW:
        return "-"
    bytes_per_weight, rate, launch = FP8_ESTIMATE[of]
    weights = sum(rows * channels * count for (rows, channels), count in LAYER_8B.items())
    return f"~{weights * bytes_per_weight / rate + sum(LAYER_8B.values()) * launch:.0f}"


def product_name(tokens: int) -> str:
    """Returns the name of the result of a product of some tokens."""
    if tokens in MANY:
        return f"{PREFILL}, {tokens} tokens"
    return f"sparse_linear, {tokens} token{'s' * (tokens > 1)}"


def fp8_product_name(tokens: int) -> str:
    """Returns the name of the result of a product of some tokens in FP8."""
    return f"sparse_linear_fp8, {tokens} token{'s' * (tokens > 1)}"


def _words(least: float | None, most: float | None) -> str:
    parts = [f">= {least:g}"] if least is not None else []
    return ", ".join(parts + ([f"<= {most:g}"] if most is not None else []))

"""The Markdown table of a result file."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks.real.rows import DENSE, OTHER_WINDOWS, ROWS
from permtriton.recipe import config_from

UNIT = "sparsegpt"  # the row whose loss counts as 1
BY_ONEDNN = " by oneDNN"  # ends the name of a peer's row where it multiplies as permtriton does
FLOAT32_MATMUL = "float32_matmul"  # what a row notes of its command: torch's precision, where "medium" means oneDNN
OTHER = "other_perplexity"  # what a row was evaluated to on text of another domain
LOSS = "Loss: the rise in log perplexity, log(perplexity / dense), as a share of SparseGPT's."
HEADING = "method | seeds | perplexity | loss | KL to dense | on other text | CPU seconds | peak memory"


def markdown(report: Mapping[str, Any], alike: str = "") -> str:
    """Returns a row per method, with the mean over seeds, and below the table how it was measured.

    Methods that no command measures any more are left out. ``alike`` names the table that says how this one was
    measured, too.
    """
    report = {**report, "rows": [row for row in report["rows"] if row["name"] in ROWS]}
    windows = next(row for row in report["rows"] if row["name"] == DENSE)["evaluation"]["windows"]
    command = f"```\n{report['command']}\n```"
    measured = f"Measured as {alike}." if alike else _measures(report, windows)
    words = f"{measured}{_library(report['rows'])} {_versions(report)}"
    return f"{_table(report)}\n\n{words}\n\n{command}"


def short(report: Mapping[str, Any], names: Sequence[str]) -> str:
    """Returns the rows of some methods, what is measured in short, and where the rest stands.

    Raises:
        KeyError: a method has no row.
    """
    rows = [row for name in names for row in report["rows"] if row["name"] == name]
    if missing := set(names) - {row["name"] for row in rows}:
        raise KeyError(f"no rows of {', '.join(sorted(missing))}")
    samples, length = report["inputs"]["calibration"]
    words = (
        f"Perplexity on WikiText-2, and on Python's language reference. {LOSS} All rows of a seed have the same "
        f"{samples} x {length} calibration tokens of WikiText-2; the training at the end of the default and of `best` "
        "reads more of it. ± is the standard deviation over seeds. [All rows, what each column means, versions and the "
        "command](docs/benchmarks.md#a-real-language-model)."
    )
    return f"{_table({**report, 'rows': rows})}\n\n{words}"


def in_words(report: Mapping[str, Any], ours: str, theirs: str) -> str:
    """Returns what one method gains over another, and what it costs, in two sentences."""

    def mean(name: str, part: str, key: str) -> float:
        return fmean(row[part][key] for row in report["rows"] if row["name"] == name and key in row.get(part, ()))

    dense, worse, better = (mean(name, "evaluation", "perplexity") for name in (DENSE, theirs, ours))
    elsewhere = ["{:.1f}".format(mean(name, "evaluation", OTHER)) for name in (DENSE, theirs, ours)]
    less = 1 - math.log(better / dense) / math.log(worse / dense)
    seconds, other = (mean(name, "pruning", "cpu_seconds") for name in (ours, theirs))
    peak, other_peak = (
        max(row["pruning"]["peak_bytes"] for row in report["rows"] if row["name"] == name and "pruning" in row) / 2**30
        for name in (ours, theirs)
    )
    samples, length = report["inputs"]["calibration"]
    return (
        f"**What you get.** SmolLM2-135M-Instruct has a perplexity of {dense:.1f} on WikiText-2. Pruned to 2:4 with "
        f"the same {samples} x {length} calibration tokens (and, for the last step of ours, "
        f"{_drawn(report)} sequences more), it has {worse:.1f} by llm-compressor's SparseGPT and "
        f"{better:.1f} by permtriton's default recipe: the rise in log perplexity is {less:.0%} smaller. (Calibration "
        "and test text are of the same domain. On Python's language reference, on which none was calibrated, the three "
        f"have {', '.join(elsewhere[:-1])} and {elsewhere[-1]}.)\n\n"
        f"**What it costs.** {seconds / other:.1f} times its CPU seconds ({seconds:.0f} against {other:.0f}), and "
        f"{peak:.1f} GiB of memory against {other_peak:.1f}. No GPU is needed."
    )


def _table(report: Mapping[str, Any]) -> str:
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        rows.setdefault(row["name"], []).append(row)
    measured = {name: [row["evaluation"] for row in found] for name, found in rows.items() if "error" not in found[0]}
    means = {name: fmean(each["perplexity"] for each in found) for name, found in measured.items()}
    lines = []
    for name, found in rows.items():
        if name not in means:
            lines.append(f"{name} | | does not run here: {found[0]['error']} | | | | |")
        elif name == DENSE:
            lines.append(f"{name} | | {means[name]:.2f} | 0 | | {_on_other_text(found)} | |")
        else:
            loss = math.log(means[name] / means[DENSE]) / math.log(means[UNIT] / means[DENSE])
            lines.append(f"{name} | {_numbers(found, means[name], loss)}")
    return _grid(HEADING, lines)


def _grid(heading: str, lines: Sequence[str]) -> str:
    rule = " | ".join(["---"] * (heading.count("|") + 1))
    return "\n".join(f"| {line} |" for line in (heading, rule, *lines))


def _numbers(found: Sequence[Mapping[str, Any]], mean: float, loss: float) -> str:
    values = [row["evaluation"]["perplexity"] for row in found]
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    kl = fmean(row["evaluation"]["kl"] for row in found)
    cost = " | "
    if costs := [row["pruning"] for row in found if "pruning" in row]:  # not of a row that was interrupted
        peak = max(each["peak_bytes"] for each in costs) / 2**30
        cost = f"{fmean(each['cpu_seconds'] for each in costs):.0f} | {peak:.1f} GiB"
    return f"{len(values)} | {mean:.2f}{spread} | {loss:.2f} | {kl:.3f} | {_on_other_text(found)} | {cost}"


def _on_other_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the mean perplexity on text of another domain; nothing where it was not measured."""
    measured = [row["evaluation"][OTHER] for row in rows if OTHER in row["evaluation"]]
    return f"{fmean(measured):.1f}" if measured else ""


def _measures(report: Mapping[str, Any], windows: int) -> str:
    (samples, length), compared = report["inputs"]["calibration"], report["inputs"]["kl_windows"]
    best = config_from({"samples": samples}, "best")
    return (
        f"Perplexity on the first {windows} windows of 1,024 tokens of WikiText-2's test split (tokenized, with "
        f"`<unk>`), KL on the first {compared}; other text: perplexity on {OTHER_WINDOWS} windows of Python's language "
        f"reference. Calibration: {samples} x {length} tokens of WikiText-2's validation split (the same domain), the "
        f"same ids for all rows of a seed; the training at the end of the default reads {_drawn(report)} further "
        f"sequences of it, that of `best` {samples * best.steps[-1].further}, and {best.generated} that the "
        f"dense model writes. ± is the sample standard deviation over seeds. {LOSS} The dense weights are those of a "
        "GGUF file in 4 bits, dequantized. CPU seconds and peak memory are those of the whole command; left out where "
        "it ran in parts."
    )


def second_in_words(report: Mapping[str, Any]) -> str:
    """Returns the mean perplexity of the default on Gemma, beside the dense model's and SparseGPT's, in a sentence."""
    names = (DENSE, "sparsegpt", "default")
    rows = {name: [row for row in report["rows"] if row["name"] == name] for name in names}
    dense, worse, better = (fmean(row["evaluation"]["perplexity"] for row in rows[name]) for name in names)
    elsewhere = [_on_other_text(rows[name]) for name in names]
    share = math.log(better / dense) / math.log(worse / dense)
    peer, fast = (
        next(row["evaluation"]["perplexity"] for row in report["rows"] if row["name"] == name)
        for name in ("llm-compressor sparsegpt", "fast")
    )
    return (
        f"**On a second model**, Gemma 3 270M from its 4-bit GGUF file, dequantized, mean of {len(rows['default'])} "
        f"seeds: {dense:.1f} dense, {worse:.1f} by SparseGPT, {better:.1f} by the default, whose rise is {share:.0%} "
        f"of SparseGPT's (of one seed: {peer:.1f} by llm-compressor's SparseGPT, {fast:.1f} by `fast`"
        f"); on Python's language reference {', '.join(elsewhere[:-1])} and {elsewhere[-1]} "
        "([rows](docs/benchmarks.md#gemma-3-270m))."
    )


def _drawn(report: Mapping[str, Any]) -> int:
    """Returns how many sequences the training at the end of the default reads."""
    samples, length = report["inputs"]["calibration"]
    return config_from({"samples": samples, "sequence_length": length}).steps[-1].fresh_samples


def _library(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns which rows oneDNN multiplied, a sentence with a space before it; nothing where it multiplied none."""
    by_onednn = {
        row["name"]: None
        for row in rows
        if row["name"].endswith(BY_ONEDNN) or row.get("pruning", {}).get(FLOAT32_MATMUL) == "medium"
    }
    others = {row["name"] for row in rows if row["name"] not in (*by_onednn, DENSE)}
    if not by_onednn:
        return ""
    *first, last = by_onednn
    of = f"{', '.join(first)} and {last}" if first else last
    return f" oneDNN multiplied in {of}" + (
        ", MKL in the other rows, which takes up to twice the time here." if others else "."
    )


def _versions(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    peers = "; ".join(", ".join(line.replace("==", " ") for line in lines) for lines in report["peers"].values())
    note = f" Note: {report['note']}." if report["note"] else ""
    return f"{report['hardware']}; {versions}{peers and f'; peers: {peers}'}.{note}"

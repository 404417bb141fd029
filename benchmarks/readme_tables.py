"""Writes the tables and plots of the Markdown pages, and the demo's report, from the result files and the code.

python benchmarks/readme_tables.py           rewrite the pages and plots
python benchmarks/readme_tables.py --check   exit with 1 if one is not up to date
"""

import argparse
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # python benchmarks/readme_tables.py has only its own folder there

from benchmarks import pages, report_demo, reproduce, trials  # noqa: E402
from benchmarks.architectures import table as architectures  # noqa: E402
from benchmarks.gpu import table as gpu  # noqa: E402
from benchmarks.real import plot  # noqa: E402
from benchmarks.real import table as real  # noqa: E402
from permtriton.evaluation.report_plots import Series, chart, colour  # noqa: E402
from permtriton.recipe import all_options, defaults  # noqa: E402

NAMED_PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "NOTES.md")
PAGES = (*NAMED_PAGES, *sorted((ROOT / "docs").glob("*.md")))
RESULTS = ROOT / "benchmarks" / "results"
REPORT = ROOT / "examples" / "report-demo.html"
REAL = "real-smollm2-cpu.json"
GEMMA = "real-gemma3-270m-cpu.json"

FUSED = " (fused)"
DEMO_ROWS = (  # the methods that a reader chooses from; the files have more
    "wanda", "sparsegpt", "wanda + heuristic", "wanda + searched", "heuristic + sparsegpt",
    "heuristic + sparsegpt + distill", "fast", "default", "best",
)  # fmt: skip
FIRST_SCREEN = (  # of the real model
    "dense", "sparsegpt", "llm-compressor sparsegpt", "fast", "default", "best",
)  # fmt: skip


def special_tokens_table() -> str:
    """Returns what models lose with and without special tokens around the sequences."""
    report = _load("special-tokens.json")
    lines = ["| model | what is measured | without | with |", "|---|---|---|---|"]
    for model, each in report["models"].items():
        if "dense" in each:
            none, auto = (each["dense"][choice] for choice in ("none", "auto"))
            lines.append(f"| {model} | perplexity of the dense model | {none:.1f} | {auto:.1f} |")
        for method in dict.fromkeys(row["method"] for row in each.get("rows", ())):
            found = {row["special_tokens"]: row["cosine"] for row in each["rows"] if row["method"] == method}
            words = f"cosine after {method}, calibrated without or with them, measured with them"
            lines.append(f"| {model} | {words} | {found['none']:.4f} | {found['auto']:.4f} |")
        if "why" in each:
            lines.append(f"| {model} | {each['why']} | the same | the same |")
    texts = "; ".join(f"{model}: {each['text']}" for model, each in report["models"].items() if "text" in each)
    return "\n".join([*lines, "", f"{texts}; one seed."])


def comparison_table(*names: str) -> str:
    """Returns the methods of several files of ``permtriton compare --output``, both layouts side by side.

    A method that several files have is taken from the last of them.
    """
    reports = [_load(name) for name in names]
    rows = {row["method"]: row for report in reports for row in report["rows"]}
    report, dense = reports[-1], rows.pop("dense")["mean"]
    config, versions, seeds = report["config"], report["versions"], len(report["seeds"])
    assert all((each["tokens"], each["seeds"]) == (report["tokens"], report["seeds"]) for each in reports)
    unit = math.log(rows["sparsegpt"]["mean"] / dense)

    def cells(method: str) -> str:
        row = rows.get(method)
        if row is None:
            return " | | "
        loss = math.log(row["mean"] / dense) / unit
        return f"{row['mean']:.3f} ± {row['spread']:.3f} | {loss:.2f} | {row['seconds'] / seeds:.0f}"

    lines = [
        f"| method, {seeds} seeds | portable: perplexity | loss | seconds | fused: perplexity | loss | seconds |",
        "|---|---|---|---|---|---|---|",
        f"| dense | {dense:.3f} | 0 | | | | |",
        *(f"| {name} | {cells(name)} | {cells(name + FUSED)} |" for name in DEMO_ROWS),
        "",
        f"{report['tokens']:,} held-out tokens; calibration {config['samples']} x {config['sequence_length']} tokens "
        f"(the same domain); {report['device']}; torch {versions['torch']}, transformers {versions['transformers']}. "
        "± is the sample standard deviation over seeds; a seed draws the calibration sequences. "
        f"{real.LOSS} Seconds per seed, with the evaluation. Methods without an order are the same in both layouts.",
    ]
    return "\n".join(lines)


def encoder_table(*names: str) -> str:
    """Returns the rows of comparisons by the cosine between last hidden states."""
    reports, lines = [_load(name) for name in names], []
    for report in reports:
        seeds = len(report["seeds"])
        for row in report["rows"]:
            if row["method"] != "dense" and "tune" not in row["method"]:  # no command runs this step any more
                mean = f"{1 - row['mean']:.4f} ± {row['spread']:.4f}"
                lines.append([row["method"], mean, f"{row['compile_seconds'] / seeds:.0f}"])
    assert len({tuple(report["seeds"]) for report in reports}) == 1
    caption = f"{_machine(reports)}; {seeds} seeds; seconds are of one compilation."
    return _table("method | 1 - cosine to dense | seconds", lines, caption)


def _table(heading: str, rows: Iterable[Sequence[str]], caption: str) -> str:
    lines = [heading, *(" | ".join(cells) for cells in rows)]
    lines = [f"| {line} |" for line in lines]
    return "\n".join([lines[0], "|---" * (heading.count("|") + 1) + "|", *lines[1:], "", caption]).rstrip()


def _sizes(row: Any) -> str:
    return ", ".join(str(row["shape"][name]) for name in ("hidden", "intermediate", "layers"))


def _machine(rows: Sequence[Any]) -> str:
    return f"{rows[-1]['device']}; torch {rows[-1]['versions']['torch']}"


def quantized_table(name: str) -> str:
    """Returns the rows of ``python -m benchmarks.quantized``."""
    report = _load(name)
    counts = ("zeros", "lost_zeros", "further_zeros", "groups_above_pattern")
    rows = [
        [
            row["name"], f"{row['bytes'] / 1e6:.0f} MB" if "bytes" in row else "", f"{row['perplexity']:.2f}",
            *(f"{row[key]:,}" if key in row else "" for key in counts),
        ]
        for row in report["rows"]
    ]  # fmt: skip
    heading = (
        "folder | size | perplexity | zeros before | zeros lost | further zeros | groups of 4 with more than 2 kept"
    )
    measured = report["rows"][-1]
    of = f"Perplexity on {measured['windows']} windows of {measured['window']:,} tokens, all but FP8 in bfloat16"
    return _table(heading, rows, f"{of}; {_machine([report])}.")


def rounding_table(name: str) -> str:
    """Returns the rows of ``python -m benchmarks.fp8_rounding``, means over the seeds."""
    report, lines = _load(name), []
    dense = report["rows"][0]["perplexity"]
    for way in dict.fromkeys(row["way"] for row in report["rows"]):
        cells = [way]
        for activations in ("as they are", "in FP8"):
            rows = [row for row in report["rows"] if (row["way"], row["activations"]) == (way, activations)]
            means = {
                key: sum(row[key] for row in rows) / len(rows)
                for key in ("perplexity", "kl")
                if rows and key in rows[0]
            }
            rise = (
                f"{means['perplexity']:.2f} ({means['perplexity'] / dense - 1:+.2%})"
                if "kl" in means
                else f"{dense:.2f}"
            )
            cells += [rise if rows else "", f"{means['kl']:.4f}" if "kl" in means else ""]
        lines.append(cells)
    heading = "weights in FP8 | perplexity | KL | activations in FP8, too: perplexity | KL"
    seeds = len({row["seed"] for row in report["rows"]})
    tokens = " x ".join(str(number) for number in report["calibration"])
    of = (
        f"{report['windows']} windows of {report['window']:,} tokens, in float32 but for what is in FP8; KL to the "
        f"model that is not rounded; {tokens} calibration tokens, {seeds} seed{'s' * (seeds > 1)}"
    )
    return _table(heading, lines, f"{of}; {_machine([report])}.")


def tasks_table(**files: str) -> str:
    """Returns the scores of ``permtriton evaluate --tasks`` for several models, a file each."""
    reports = {name: _load(file) for name, file in files.items()}
    first, perplexity = (
        next(iter(reports.values())),
        {row["name"]: row["evaluation"] for row in _load(REAL)["rows"][::-1]},
    )
    columns = [(task["name"], metric) for task in first["tasks"] for metric in task["scores"]]
    heading = " | ".join(["model", "perplexity", *(f"{task}, {metric}" for task, metric in columns)])
    rows = []
    for name, report in reports.items():
        scores = {task["name"]: task["scores"] for task in report["tasks"]}
        cells = [scores[task][metric] for task, metric in columns]
        values = [f"{cell['value']:.3f} ± {cell['stderr']:.3f}" for cell in cells]
        rows.append([name, f"{perplexity[name]['perplexity']:.2f}", *values])
    counts = " and ".join(f"{task['samples']} questions of `{task['name']}`" for task in first["tasks"])
    versions = ", ".join(f"{key} {first['versions'][key]}" for key in ("lm_eval", "torch", "transformers"))
    hardware = json.loads(pages.RESULT.read_text(encoding="utf-8"))["hardware"]
    caption = (
        f"Seed 0, in bfloat16; {counts}; ± is the standard error, which is larger than that of a difference, because "
        f"all answer the same questions. Perplexity: that of the table above. {hardware}; {versions}."
    )
    return _table(heading, rows, caption)


def plans_table() -> str:
    """Returns what ``python -m benchmarks.plans`` was told about large models."""
    report = _load("plans.json")
    rows = []
    for row in report["rows"]:
        count, memory = row["devices"].split("x")
        of_a_gpu, of_the_host = (row["memory"][place] / 2**30 for place in ("peak", "host"))
        host = f"{of_the_host:.0f} GiB" if of_the_host else "as usual"
        rows.append([row["model"], f"{count} of {memory} GiB", f"{of_a_gpu:.0f} GiB", host])
    caption = "Estimated, not run yet. Default recipe, 128 x 1024 tokens."
    return _table("LLaMA 3 | GPUs | memory of each GPU | of the host", rows, caption)


def variation_table(*names: str) -> str:
    """Returns the rows of ``benchmarks/variation.py`` for several models; settings that change no bit are one row."""
    reports, lines = list(map(_load, names)), []
    for report in reports:
        rows = {row["setting"]: row for row in report["rows"]}
        equal = [name for name, row in rows.items() if not row["weights"]]
        differing = [name for name in rows if name not in equal]
        lines += [
            [", ".join(settings), report["title"], *_differences(rows[settings[0]])]
            for settings in (equal, *([name] for name in differing))
        ]
    caption = "; ".join(f"{report['title']}: `{report['command']}`" for report in reports)
    caption += f"; {reports[0]['hardware']}; torch {reports[0]['versions']['torch']}."
    return _table("setting | model | mask entries that differ | weights (norm) | KL, nats | perplexity", lines, caption)


def _differences(row: dict[str, Any]) -> list[str]:
    shares = [f"{row['masks']:.1%}", f"{row['weights']:.1%}", f"{row['kl']:.3f}"] if row["weights"] else ["none"] * 3
    return [*shares, f"{row['perplexity']:.3f}"]


def seeded_faults_words(name: str) -> str:
    """Returns how many faults ``python -m benchmarks.faults`` saw the checks refuse."""
    report = _load(name)
    found = [[check for check in checks if check in report["checks"]] for checks in report["refused"].values()]
    alone = {checks[0] for checks in found if len(checks) == 1}
    return (
        f"{len(found)} planted faults are refused, by one or more of {len(report['checks'])} checks; {len(alone)} of "
        f"these checks refuse some fault that no other does. {len(report['tests'])} more faults only waste quality, "
        "and tests find them."
    )


def finetune_table() -> str:
    """Returns a row for each result of ``examples/finetune.py``."""
    lines, lost, report = [], "", {}
    for path in sorted(RESULTS.glob("finetune-*.json")):
        report, name = _load(path.name), path.stem.removeprefix("finetune-").removesuffix("-cpu")
        before, after = report["before"], report["after"]
        between = report.get("before_merging", {}).get("perplexity")
        cells = [before["dense_perplexity"], before["perplexity"], between, after["perplexity"]]
        numbers = [f"{before['kl']:.3f} → {after['kl']:.3f}", f"{report['cpu_seconds']:.0f} ({report['seconds']:.0f})"]
        link = f"[{name}](../benchmarks/results/{path.name})"
        lines.append([link, *("" if each is None else f"{each:.2f}" for each in cells), *numbers])
        if "lost" in report:
            lost = f"{report['lost']:.0%} of the adapter's change fell on zeros."
    versions = f"torch {report['versions']['torch']}, transformers {report['versions']['transformers']}"
    caption = (
        f"{report['hardware']}; {versions}; the files have the commands, that of {name}: `{report['command']}`. {lost}"
    )
    heading = "model | dense perplexity | pruned | with the adapter, not merged | trained | KL | CPU seconds (seconds)"
    return _table(heading, lines, caption)


SHORTER = (  # the words of error messages, as a column has room for them
    ("a positive finite number", "> 0"),
    ("a non-negative finite number", "≥ 0"),
    ("a finite number from", "from"),
    ("a non-negative integer", "integer ≥ 0"),
    ("an integer of at least", "integer ≥"),
    ("an integer from", "integer from"),
    ("one of ", ""),
    (" or false", ", false"),
)


def config_options_table() -> str:
    """Returns every option of a compilation and its steps, under the headings of ``--help-all``."""
    lines, first = [], dict[str, str]()
    options = list(all_options().values())
    for panel in dict.fromkeys(option.panel for option in options):
        lines += [f"**{panel}**", "", "| option | values | default | meaning |", "|---|---|---|---|"]
        for option in (option for option in options if option.panel == panel):
            values = functools.reduce(lambda text, short: text.replace(*short), SHORTER, option.expected)
            same = first.setdefault(f"{values} {option.help}", option.name)
            told = (values, option.help) if same == option.name else ("", f"As `{same}`.")
            lines.append(f"| `{option.name}` | {told[0]} | {defaults(option)} | {told[1]} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def pages_words() -> str:
    """Returns where ``benchmarks/pages.py`` ran, and how long its longest commands took."""
    report = json.loads(pages.RESULT.read_text(encoding="utf-8"))
    took = {record["commands"].split()[2]: record["cpu_seconds"] for record in report["pages"][pages.PAGES[0]]}
    minutes = "; ".join(f"`{name}` {took[name] / 60:.0f}" for name in ("compile", "evaluate"))
    versions = f"torch {report['versions']['torch']}, transformers {report['versions']['transformers']}"
    return f"{report['hardware']}; {versions}. CPU minutes: {minutes}."


SCORED = {
    "dense": "tasks-smollm2-dense.json",
    "sparsegpt": "tasks-smollm2-sparsegpt.json",
    "default": "tasks-smollm2-default.json",
}

TABLES = {
    "tasks": lambda: tasks_table(**SCORED),
    "plans": plans_table,
    "pages-machine": pages_words,
    "architectures-summary": architectures.summary,
    "finetune": finetune_table,
    "config-options": config_options_table,
    "variation": lambda: variation_table("variation-demo-refit.json", "variation-smollm2.json"),
    "seeded-faults": lambda: seeded_faults_words("seeded-faults.json"),
    "gpu-speed": lambda: gpu.summary(gpu.read(RESULTS / "gpu.json")),
    "gpu": lambda: gpu.markdown(gpu.read(RESULTS / "gpu.json")),
    "quantized": lambda: quantized_table("quantized-cpu.json"),
    "fp8-rounding": lambda: rounding_table("fp8-rounding-cpu.json"),
    "real": lambda: real.short(_load(REAL), FIRST_SCREEN),
    "real-all": lambda: real.markdown(_load(REAL)),
    "real-words": lambda: real.in_words(_load(REAL), "default", "llm-compressor sparsegpt"),
    "real-gemma": lambda: real.markdown(_load(GEMMA), "those of SmolLM2 above"),
    "real-gemma-words": lambda: real.second_in_words(_load(GEMMA)),
    "demo-methods": lambda: comparison_table(
        "compare-demo-recipe.json", "compare-demo-best.json", "compare-demo-tuned.json"
    ),
    "demo-learned": lambda: learned_table("compare-demo-learned.json"),
    "reproduce-table": lambda: reproduce.main_table(RESULTS),
    **{
        f"reproduce-{name}": functools.partial(reproduce.table, RESULTS, name)
        for name in ("zero-shot", "4of8", "sinkhorn", "calibration", "block-size", "layers")
    },
    "swap-prediction": lambda: swap_prediction_table("swap-prediction-learned-cpu.jsonl"),
    "trials": lambda: trials.table(RESULTS),
    "special-tokens": special_tokens_table,
    "encoder": lambda: encoder_table("compare-minilm.json", "compare-minilm-tuned.json"),
}


def learned_table(name: str) -> str:
    """Returns what a learned order gains over the heuristic one, which is in the same file."""
    report = _load(name)
    rows = {row["method"]: row for row in report["rows"]}
    dense, heuristic = rows.pop("dense")["mean"], rows[f"wanda + heuristic{FUSED}"]["mean"]
    lines = ["| method | perplexity | rise in log perplexity | less than heuristic |", "|---|---|---|---|"]
    lines.append(f"| dense | {dense:.3f} | 0 | |")
    for method, row in rows.items():
        rise = math.log(row["mean"] / dense)
        gained = 1 - rise / math.log(heuristic / dense)
        lines.append(f"| {method} | {_with_spread(row, report)} | {rise:.4f} | {gained:.1%} |")
    config, versions, seeds = report["config"], report["versions"], len(report["seeds"])
    learned = next(row["config"] for method, row in rows.items() if "learned" in method)
    budget = f"{learned['learn_epochs']} epochs in batches of {learned['learn_batch_size']}"
    read = f"{config['samples']} x {config['sequence_length']} tokens, {budget}"
    ran = f"{report['device']}; torch {versions['torch']}, transformers {versions['transformers']}"
    count = f"{seeds} seed{'s' * (seeds > 1)}"
    return "\n".join([*lines, "", f"{report['tokens']:,} held-out tokens; {read}; {count}; {ran}."])


def _with_spread(row: dict[str, Any], report: dict[str, Any]) -> str:
    return f"{row['mean']:.3f}" + (f" ± {row['spread']:.3f}" if len(report["seeds"]) > 1 else "")


def swap_prediction_table(name: str) -> str:
    """Returns how well each gradient of learning predicts single swaps, layout by layout."""
    reports = _load_lines(name)
    columns = ("rank correlation", "sign right", "predicted to lower the loss")
    lines = ["| layout | gradient | " + " | ".join(columns) + " | lower it |", "|---" * (len(columns) + 3) + "|"]
    for report in reports:
        for gradient in ("published", "placement without curvature", "placement"):
            found = report[gradient]
            shares = [f"{found[share]:.0%}" for share in ("sign_right", "predicted_to_fall")]
            cells = [report["layout"], gradient, f"{found['rank_correlation']:.2f}", *shares]
            lines.append(f"| {' | '.join(cells)} | {report['share_that_falls']:.0%} |")
    first, versions = reports[0], reports[0]["versions"]
    what = f"{first['placement']['swaps']} random swaps inside blocks, {first['samples']} calibration sequences"
    ran = f"{first['device']}; torch {versions['torch']}, transformers {versions['transformers']}"
    return "\n".join([*lines, "", f"Demo model, {what}, {ran}."])


def dense_share_plot(theme: str) -> str:
    """Draws what is left of the KL to the dense model when a share of the prunable weights stays dense."""
    series = []
    for name, file in DENSE_SHARES.items():
        rows = [row for row in _load(file)["rows"] if row["method"] != "dense"]
        points = [(100 * float(row["setting"].split()[-1]), row["kl"] / rows[0]["kl"]) for row in rows]
        series.append(Series(name, points, colour(len(series))))
    drawn = chart(series, "share left dense, %", "KL to the dense model; 1 with nothing left dense")
    names = [
        f'<text x="260" y="{40 + 18 * number}" fill="{curve.colour}">{curve.name}</text>'
        for number, curve in enumerate(series)
    ]
    drawn = drawn.replace("</svg>", "".join([*names, "</svg>"]))
    colours = plot.THEMES[theme]
    values = {**colours, "c0": colours["ours"], "c1": colours["theirs"]}
    return re.sub(r"var\(--(\w+)\)", lambda found: values[found[1]], drawn).replace("<svg", f"<svg {plot.FONT}") + "\n"


DENSE_SHARES = {"demo": "compare-demo-dense-share.json", "SmolLM2-135M": "compare-smollm2-dense-share.json"}
DRAWINGS: dict[str, Callable[[str], str]] = {
    "real": lambda theme: plot.svg(_load(REAL), theme),
    "dense-share": dense_share_plot,
}
PLOTS: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "images" / f"{name}-{theme}.svg": functools.partial(draw, theme)
    for name, draw in DRAWINGS.items()
    for theme in plot.THEMES
} | {REPORT: lambda: report_demo.page(RESULTS)}


SECTION = re.compile(r"<!-- table ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def rewritten(page: str) -> str:
    """Returns ``page`` with every ``<!-- table NAME -->`` section filled in."""
    return SECTION.sub(lambda found: f"<!-- table {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->", page)


def with_outputs(page: Path, text: str) -> str:
    """Returns a page with its tables, and with what the commands in it printed."""
    records = json.loads(pages.RESULT.read_text(encoding="utf-8"))["pages"]
    name = page.relative_to(ROOT).as_posix()
    return pages.filled(rewritten(text), records[name]) if name in records else rewritten(text)


def _load_lines(name: str) -> list[Any]:
    """Returns the results of a benchmark that prints one JSON line each."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    before = {page: page.read_text(encoding="utf-8") for page in PAGES}
    found = sorted(name for text in before.values() for name in SECTION.findall(text))
    if found != sorted(TABLES):
        sys.exit(f"the pages have the tables {', '.join(found)}: expected each once of {', '.join(sorted(TABLES))}")
    after = {page: with_outputs(page, text) for page, text in before.items()}
    after |= {path: draw() for path, draw in PLOTS.items()}
    for path, text in after.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.relative_to(ROOT)} is not what benchmarks/readme_tables.py writes: run it")


if __name__ == "__main__":
    main()

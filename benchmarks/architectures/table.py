"""The table of docs/architectures.md, from the results of ``python -m benchmarks.architectures``.

python -m benchmarks.architectures.table LlamaForCausalLM    what the results say of one class
"""

import argparse
import difflib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results" / "architectures.jsonl"
LAYOUTS = ("portable", "fused")
# Largest difference from the dense model's outputs, relative to the largest output. Rounding made up to 1.2e-4, a wrong
# plan 0.2 and more.
TOLERANCE = 1e-3
SHARE = 0.95
GOAL = 0.9  # of the classes that run on text
TEXT = ("causal language model", "masked language model", "text encoder", "encoder-decoder", "image and text")
# Reasons of linears that do not count: no pruning could touch them, or the text does not run through them.
OUTSIDE = ("does not feed the last hidden state", "output head, tied", "not used when the model runs")

Record = Mapping[str, Any]


def load(path: Path = RESULTS) -> tuple[Record, list[Record]]:
    """Returns the versions and command of a run, and its records, one per class."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return lines[0], lines[1:]


def share(entry: Record) -> float:
    """Returns the pruned share of the linear weights that the inputs run through, before the output head."""
    dense = sum(size for reason, size in entry["dense_weights"].items() if not reason.startswith(OUTSIDE))
    return entry["pruned_weights"] / (entry["pruned_weights"] + dense)


def problem(record: Record) -> str:
    """Returns what went wrong with a class: a traceback, a wrong output, or a refusal; empty if nothing did."""
    if "crashed" in record:
        return f"crash: {record['crashed']}"
    entries = [record[layout] for layout in LAYOUTS]
    for kind in ("traceback", "permuted"):
        if found := next((entry[kind] for entry in entries if kind in entry), ""):
            return f"traceback: {found}"
    for entry in entries:
        if not max(entry.get("difference", 0), entry.get("packed_difference", 0)) <= TOLERANCE:
            return f"wrong output: differs by {entry['difference']:.0e}"
    return next((f"refused: {entry['refused']}" for entry in entries if "refused" in entry), "")


def is_complete(record: Record) -> bool:
    """Whether nothing went wrong, at least `SHARE` is pruned, and every space is free but for the stream."""
    if problem(record):
        return False
    entry = record["portable"]
    frozen = [name for names in entry["frozen"].values() for name in names]
    return share(entry) >= SHARE and all(name.startswith("stream") for name in frozen)


def summary() -> str:
    """Returns a row per kind of model, and one for all that run on text."""
    about, records = load()
    lines = [
        "| kind | classes tried | built | tracebacks | wrong outputs | refused | complete | of those built |",
        "|---" * 8 + "|",
    ]
    for kind in dict.fromkeys(record["kind"] for record in records):
        of_kind = [record for record in records if record["kind"] == kind]
        lines.append(f"| {kind} | {len(of_kind)} | {' | '.join(_counts(of_kind))} |")
    text = [record for record in records if record["kind"] in TEXT]
    lines.append(f"| **runs on text** | {len(text)} | {' | '.join(_counts(text))} |")
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return "\n".join([*lines, "", _goals(records), "", f"{versions}; {about['command']}."])


def _goals(records: Sequence[Record]) -> str:
    """Returns how far the goals are met: no traceback, no wrong output, and `GOAL` of the text classes complete."""
    built = [record for record in records if "unbuilt" not in record]
    text = [record for record in built if record["kind"] in TEXT]
    words = Counter(problem(record).partition(":")[0] for record in built)
    complete = sum(is_complete(record) for record in text)
    wrong = {"traceback": words["traceback"] + words["crash"], "wrong output": words["wrong output"]}
    parts = [f"no {name}: {f'missed by {count} classes' if count else 'met'}" for name, count in wrong.items()]
    met = "met" if complete >= GOAL * len(text) else "missed"
    parts.append(
        f"{GOAL:.0%} of the classes that run on text and could be built complete: {met}, with {complete} of "
        f"{len(text)} ({complete / max(len(text), 1):.1%})"
    )
    return f"Goals: {'; '.join(parts)}. Of {len(records) - len(built)} classes no tiny model could be built."


def _counts(records: Sequence[Record]) -> list[str]:
    built = [record for record in records if "unbuilt" not in record]
    words = Counter(problem(record).partition(":")[0] for record in built)
    complete = sum(is_complete(record) for record in built)
    figures = [len(built), words["traceback"] + words["crash"], words["wrong output"], words["refused"], complete]
    return [*map(str, figures), f"{complete / max(len(built), 1):.0%}"]


def described(name: str) -> str:
    """Returns what the results say of one class.

    Raises:
        KeyError: no such class was tried.
    """
    record = {record["class"]: record for record in load()[1]}[name]
    if "unbuilt" in record:
        return f"{name}: not tried, because no tiny model of it could be built: {record['unbuilt']}"
    lines = [f"{name} ({record['kind']}): {problem(record) or ('complete' if is_complete(record) else 'compiled')}"]
    for layout in LAYOUTS:
        entry = record.get(layout, {})
        if "pruned_weights" in entry:
            lines.append(
                f"{layout}: {share(entry):.0%} of the linear weights before the output head are pruned; "
                f"{entry['free']} of {entry['free'] + entry['kept']} orders are free"
            )
            lines += [f"  keeps its order: {', '.join(names)}: {why}" for why, names in entry["frozen"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints what the results say of a class of transformers.")
    parser.add_argument("name", help="such as LlamaForCausalLM")
    name = parser.parse_args().name
    try:
        print(described(name))
    except KeyError:
        known = [record["class"] for record in load()[1]]
        near = difflib.get_close_matches(name, known)
        sys.exit(f"{name} was not tried" + (f"; did you mean {' or '.join(near)}?" if near else ""))


if __name__ == "__main__":
    main()

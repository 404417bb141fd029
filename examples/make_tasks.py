"""Makes tasks for lm-eval from a text, without drawing at random and without a network.

    python examples/make_tasks.py                                  # from the demo's held-out text, in examples/tasks
    python examples/make_tasks.py --text test.txt --output tasks   # from paragraphs, such as WikiText-2's

Of the demo's text, which is Python code:

- `demo_continuation`: which of four pieces of code continues a piece? The wrong ones are continuations from elsewhere.
- `demo_text`: the perplexity of pieces of the text, per word and per byte.

Of a text with a paragraph per line:

- `continuation`: which of four pieces continues the start of a paragraph? The wrong ones are of the next paragraphs.
- `cloze`: which word follows? It stands in the paragraph before; right is the model's most likely one only.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from permtriton import demo

FOLDER = Path(__file__).parent / "tasks"
QUESTIONS, CHOICES = 100, 4
CONTEXT_LINES, CONTINUATION_LINES = 8, 3
DOCUMENTS, DOCUMENT_LINES = 20, 40
CONTEXT_WORDS, CONTINUATION_WORDS = 40, 16
CLOZES, CLOZE_WORDS, SHORTEST = 400, 80, 4  # questions, the most words of one, the fewest letters of an answer

MEANS = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
DESCRIPTIONS = {
    "continuation": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": MEANS,
    },
    "cloze": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{answer}}",
        "metric_list": MEANS[:1],
    },
}


def questions(lines: list[str]) -> list[dict[str, Any]]:
    """Returns questions from places that are spread evenly over the text; the right answers take turns."""
    length = CONTEXT_LINES + CONTINUATION_LINES
    starts = range(0, len(lines) - length, (len(lines) - length) // QUESTIONS)[:QUESTIONS]
    contexts = ["".join(lines[start : start + CONTEXT_LINES]) for start in starts]
    continuations = ["".join(lines[start + CONTEXT_LINES : start + length]) for start in starts]
    made = []
    for number, context in enumerate(contexts):
        wrong = [continuations[(number + QUESTIONS * step // CHOICES) % QUESTIONS] for step in range(1, CHOICES)]
        made.append(_question(number, context, continuations[number], wrong))
    return made


def documents(lines: list[str]) -> list[dict[str, Any]]:
    """Returns pieces of the text that are spread evenly over it."""
    starts = range(0, len(lines) - DOCUMENT_LINES, (len(lines) - DOCUMENT_LINES) // DOCUMENTS)[:DOCUMENTS]
    return [{"text": "".join(lines[start : start + DOCUMENT_LINES])} for start in starts]


def continuations(paragraphs: list[list[str]]) -> list[dict[str, Any]]:
    """Returns questions about paragraphs that are spread evenly over the text; the right answers take turns."""
    end = CONTEXT_WORDS + CONTINUATION_WORDS
    long = [words for words in paragraphs if len(words) >= end]
    pieces = [" " + " ".join(words[CONTEXT_WORDS:end]) for words in long]
    places = range(0, len(long) - CHOICES, (len(long) - CHOICES) // QUESTIONS)[:QUESTIONS]
    return [
        _question(number, " ".join(long[at][:CONTEXT_WORDS]), pieces[at], pieces[at + 1 : at + CHOICES])
        for number, at in enumerate(places)
    ]


def clozes(paragraphs: list[list[str]]) -> list[dict[str, Any]]:
    """Returns a question about each of several paragraphs: its first word that could be asked for."""
    made = []
    for words in paragraphs:
        for at in range(CONTEXT_WORDS, min(len(words), CLOZE_WORDS)):
            word = words[at]
            if len(word) >= SHORTEST and word.isalpha() and word in words[:at]:
                made.append({"context": " ".join(words[:at]), "answer": f" {word}"})
                break
    return made[:: max(1, len(made) // CLOZES)][:CLOZES]


def _question(number: int, context: str, right: str, wrong: list[str]) -> dict[str, Any]:
    answer = number % CHOICES
    return {"context": context, "choices": [*wrong[:answer], right, *wrong[answer:]], "answer": answer}


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tasks(text: str, folder: Path) -> None:
    """Writes both tasks about paragraphs, with their descriptions (JSON is YAML)."""
    folder.mkdir(exist_ok=True)
    paragraphs = [line.split() for line in text.splitlines() if not line.startswith(" =")]  # headings in WikiText
    for name, rows in {"continuation": continuations(paragraphs), "cloze": clozes(paragraphs)}.items():
        write_rows(folder, name, rows)
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}}
        described = {"task": name, **data, "test_split": "test", **DESCRIPTIONS[name], "metadata": {"version": 1.0}}
        (folder / f"{name}.yaml").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text with a paragraph per line; without it, the demo's text")
    parser.add_argument("--output", type=Path, default=Path("tasks"), help="with --text, the folder to write")
    arguments = parser.parse_args()
    if arguments.text:
        write_tasks(arguments.text.read_text(encoding="utf-8"), arguments.output)
        return
    text = (demo.FOLDER / "heldout.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    write_rows(FOLDER, "demo_continuation", questions(lines))
    write_rows(FOLDER, "demo_text", documents(lines))


if __name__ == "__main__":
    main()

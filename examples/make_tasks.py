"""Makes the tasks in examples/tasks/ from the demo model's held-out text, without drawing at random.

- `demo_continuation`: which of four pieces of code continues a piece? The wrong ones are continuations from elsewhere.
- `demo_text`: the perplexity of pieces of the text, per word and per byte.

    python examples/make_tasks.py
    permtriton evaluate demo --eval-data none --tasks demo_continuation,demo_text --tasks-dir examples/tasks
"""

import json
from pathlib import Path
from typing import Any

from permtriton import demo

FOLDER = Path(__file__).parent / "tasks"
QUESTIONS, CHOICES = 100, 4
CONTEXT_LINES, CONTINUATION_LINES = 8, 3
DOCUMENTS, DOCUMENT_LINES = 20, 40


def questions(lines: list[str]) -> list[dict[str, Any]]:
    """Returns questions from places that are spread evenly over the text; the right answers take turns."""
    length = CONTEXT_LINES + CONTINUATION_LINES
    starts = range(0, len(lines) - length, (len(lines) - length) // QUESTIONS)[:QUESTIONS]
    contexts = ["".join(lines[start : start + CONTEXT_LINES]) for start in starts]
    continuations = ["".join(lines[start + CONTEXT_LINES : start + length]) for start in starts]
    made = []
    for number, context in enumerate(contexts):
        answer = number % CHOICES
        wrong = [continuations[(number + QUESTIONS * step // CHOICES) % QUESTIONS] for step in range(1, CHOICES)]
        choices = [*wrong[:answer], continuations[number], *wrong[answer:]]
        made.append({"context": context, "choices": choices, "answer": answer})
    return made


def documents(lines: list[str]) -> list[dict[str, Any]]:
    """Returns pieces of the text that are spread evenly over it."""
    starts = range(0, len(lines) - DOCUMENT_LINES, (len(lines) - DOCUMENT_LINES) // DOCUMENTS)[:DOCUMENTS]
    return [{"text": "".join(lines[start : start + DOCUMENT_LINES])} for start in starts]


def main() -> None:
    """Writes the data of both tasks."""
    text = (demo.FOLDER / "heldout.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    for name, rows in {"demo_continuation": questions(lines), "demo_text": documents(lines)}.items():
        content = "".join(json.dumps(row) + "\n" for row in rows)
        (FOLDER / f"{name}.jsonl").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Runs the commands of Markdown pages as they are written, and writes what they print into the pages.

    make tutorial TEXTS=FOLDER MODEL=FILE    # or python -m benchmarks.pages --texts FOLDER --model FILE [PAGE ...]

A block whose lines begin with ``$ `` is run by bash, and a block of Python that "It prints" follows by Python, all of
them in one folder and in the order of the pages. The output stands below the commands (of Python, in the next block):
all of it, or, after ``...``, as many last lines as the page has. Other blocks are left alone. What was printed is kept
in a result file, from which ``benchmarks/readme_tables.py`` fills the pages and by which its ``--check`` compares them.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "pages-smollm2-cpu.json"
PAGES = ("docs/tutorial.md", "docs/quantizing.md", "docs/benchmarks.md", "docs/evaluation.md", "docs/fine-tuning.md")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
PROMPT, PRINTS, SHORTENED, MOST_LINES = "$ ", "It prints", "...", 60


class Block(NamedTuple):
    """Commands of a page, and the place of what they print.

    Attributes:
        program: the words that run the commands.
        commands: as the page has them.
        output: what the page shows of their output.
        start: where that begins in the page.
        end: where it ends.
    """

    program: tuple[str, ...]
    commands: str
    output: str
    start: int
    end: int


def blocks(page: str) -> Iterator[Block]:
    fences = list(FENCE.finditer(page))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        body, start = fence[2], fence.start(2)
        if fence[1] == "python" and following and page[fence.end() : following.start()].strip() == PRINTS:
            yield Block((sys.executable, "-c"), body, following[2], following.start(2), following.end(2))
        elif not fence[1] and body.startswith(PROMPT):
            commands = _commands(body)
            yield Block(
                ("bash", "-e", "-o", "pipefail", "-c"),
                commands,
                body[len(commands) :],
                start + len(commands),
                fence.end(2),
            )


def _commands(body: str) -> str:
    """Returns the lines that begin with a prompt, each with the lines that continue it."""
    taken, continued = [], False
    for line in body.splitlines(keepends=True):
        if not (continued or line.startswith(PROMPT)):
            break
        taken.append(line)
        continued = line.endswith("\\\n")
    return "".join(taken)


def filled(page: str, records: list[dict[str, Any]]) -> str:
    """Returns a page with the outputs of a result file.

    Raises:
        KeyError: the page has commands that were not run.
    """
    printed = {record["commands"]: record["output"] for record in records}
    for block in reversed(list(blocks(page))):
        if block.commands not in printed:
            raise KeyError(f"these commands were not run: python -m benchmarks.pages does it\n{block.commands}")
        page = page[: block.start] + _shown(block.output, printed[block.commands]) + page[block.end :]
    return page


def _shown(before: str, lines: list[str]) -> str:
    if not before:
        return ""
    if before.startswith(SHORTENED):
        lines = [SHORTENED, *lines[-(before.count("\n") - 1) :]]
    return "".join(f"{line}\n" for line in lines)


def run(block: Block, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Runs the commands of a block; returns its record.

    Raises:
        CalledProcessError: a command failed.
    """
    commands = re.sub(rf"^{re.escape(PROMPT)}", "", block.commands, flags=re.MULTILINE)
    began, used = time.perf_counter(), _cpu_seconds()
    done = subprocess.run(
        [*block.program, commands],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if block.program[0] == sys.executable else subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{block.commands}{done.stdout}\nended with {done.returncode}")
    return {
        "commands": block.commands,
        "output": [_anywhere(line.rstrip(), folder) for line in done.stdout.strip("\n").splitlines()][-MOST_LINES:],
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(_cpu_seconds() - used, 1),
    }


def _anywhere(line: str, folder: Path) -> str:
    """Returns a line that names another folder to work in; a line of a table keeps its width."""
    named = line.replace(str(folder), "/home/me")
    return named[:-1].ljust(len(line) - 1) + "│" if line.endswith("│") else named


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def about() -> dict[str, Any]:
    """Returns what the result file says of the machine and the versions."""
    from benchmarks.real.__main__ import commit, processor  # here: it imports transformers, which filling does not need
    from permtriton.util.machine import versions

    threads, load = os.environ["OMP_NUM_THREADS"], os.getloadavg()[0]
    return {
        "command": "make tutorial TEXTS=FOLDER MODEL=FILE",
        "hardware": f"{processor()}, {os.cpu_count()} cores, {threads} of them used, load average {load:.0f}",
        "versions": versions(),
        "commit": commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pages", nargs="*", default=PAGES, help="all by default; later ones use folders of earlier ones"
    )
    parser.add_argument("--texts", type=Path, required=True, help="folder with valid.txt and test.txt of WikiText-2")
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "smollm2", help="folder to work in")
    parser.add_argument("--resume", action="store_true", help="run only commands that the result file does not have")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {"pages": {}}
    if not arguments.resume:
        report = {
            **about(),
            "pages": {name: kept for name, kept in report["pages"].items() if name not in arguments.pages},
        }
        if PAGES[0] in arguments.pages:
            shutil.rmtree(arguments.work, ignore_errors=True)
    environment = prepared(arguments.work.resolve(), arguments.texts.resolve(), arguments.model.resolve())
    for page in arguments.pages:
        records = report["pages"].setdefault(page, [])
        done = {record["commands"] for record in records}
        for block in blocks((ROOT / page).read_text(encoding="utf-8")):
            if block.commands not in done:
                print(block.commands, end="", flush=True)
                records.append(run(block, arguments.work, environment))
                print(f"{records[-1]['cpu_seconds']} CPU seconds", flush=True)
                RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "readme_tables.py")], check=True)


def prepared(work: Path, texts: Path, model: Path) -> dict[str, str]:
    """Puts the model and the checkout's folders into the folder to work in; returns the environment of commands."""
    work.mkdir(parents=True, exist_ok=True)
    for name, target in {
        "smollm2.gguf": model,
        "examples": ROOT / "examples",
        "benchmarks": ROOT / "benchmarks",
    }.items():
        (work / name).unlink(missing_ok=True)
        (work / name).symlink_to(target)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "TEXTS": str(texts), "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}


if __name__ == "__main__":
    main()

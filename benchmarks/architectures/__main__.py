"""Tries every class of the zoo, and keeps a line of JSON per class in ``benchmarks/results/architectures.jsonl``.

python -m benchmarks.architectures                            all classes: planned and permuted at random
python -m benchmarks.architectures --compile                  compiled, saved, exported packed and reloaded, too
python -m benchmarks.architectures --resume LlamaForCausalLM  these classes again; the others stay
python -m benchmarks.architectures LlamaForCausalLM           printed only

Afterwards ``python benchmarks/readme_tables.py`` writes docs/architectures.md.
"""

import argparse
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.architectures import tiny, trial
from benchmarks.architectures.table import RESULTS, load
from permtriton.util.machine import versions

SECONDS = 240  # per class
CLASSES = 50  # per process, so that what earlier classes left in memory goes


class Worker:
    """A process that tries one class after another. One that crashes or hangs costs one class, not the run."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.tried = 0

    def attempt(self, name: str, compiled: bool) -> dict[str, Any]:
        """Returns the record of one class; a worker that ends meanwhile is no longer `usable`.

        Args:
            name: class in transformers.
            compiled: whether to compile, save and reload it, too.
        """
        self.tried += 1
        self.pipe.send((name, compiled))
        try:
            if self.pipe.poll(SECONDS):
                record: dict[str, Any] = self.pipe.recv()
                return record
            self.end()
            ending = f"it did not end within {SECONDS} s"
        except EOFError:
            self.process.join()
            ending = f"the process ended with code {self.process.exitcode}"
        return {"class": name, "kind": tiny.classes()[name], "crashed": ending}

    @property
    def usable(self) -> bool:
        """Whether the worker can try another class."""
        return self.tried < CLASSES and self.process.is_alive()

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.join()


def _work(pipe: Connection) -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    while True:
        pipe.send(trial.trial(*pipe.recv()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="names of classes; default: all")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--compile", action="store_true", help="also compile, save, export and reload each class")
    parser.add_argument("--kinds", nargs="*", choices=dict.fromkeys(tiny.MAPPINGS.values()), help="default: all")
    parser.add_argument("--resume", action="store_true", help="keep what the output holds of other classes")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(50)
    known = tiny.classes()
    of_kinds = [name for name, kind in known.items() if kind in (arguments.kinds or (kind,))]
    names = arguments.classes or of_kinds
    kept = (
        {record["class"]: record for record in load(arguments.output)[1]}
        if arguments.resume and arguments.output.exists()
        else {}
    )
    worker = Worker()
    for number, name in enumerate(names):
        if not worker.usable:
            worker.end()
            worker = Worker()
        started = time.perf_counter()
        record = worker.attempt(name, arguments.compile)
        print(f"{number + 1} of {len(names)}: {name}, {time.perf_counter() - started:.1f} s")
        if arguments.classes and not arguments.resume:
            print(json.dumps(record, indent=1))
            continue
        kept[name] = record
        write(arguments.output, [kept[name] for name in known if name in kept])
    worker.end()


def write(output: Path, records: list[dict[str, Any]]) -> None:
    """Writes the versions and a line per record, so that a run that is stopped keeps what it found."""
    about = {"versions": versions(), "command": "python -m benchmarks.architectures"}
    lines = [json.dumps(line) for line in (about, *records)]
    partial = output.with_suffix(".partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(output)


if __name__ == "__main__":
    main()

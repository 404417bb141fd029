"""``permtriton compile`` is killed at random moments, or told to end; the same command then ends as if nothing had
happened.

The processes are forked from one that has imported everything, because importing torch takes longer than a compilation
of the tiny model. A moment is the number of a change to files beside the output, and a delay after it.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .folders import files

SERVER = """
import json, os, signal, sys, threading
import networkx, torch.export, torch._inductor, torch._functorch.aot_autograd
import permtriton.cli.compile
from permtriton.cli.main import app
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

def compile(arguments, place, number, delay, log, kind, events):
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    seen = 0

    def watch(event, details):
        nonlocal seen
        if event not in events or not str(details[0]).startswith(place):
            return
        seen += 1
        if seen == number:
            threading.Timer(delay, os.kill, (os.getpid(), kind)).start() if delay else os.kill(os.getpid(), kind)

    sys.addaudithook(watch)
    try:
        app(arguments)
        code = 0
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    with open(log + ".changes", "w") as file:
        file.write(str(seen))
    os._exit(code)

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which may have started the tests, ignores it
        compile(**job)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
RENAMES = ("os.rename",)
QUICK = ("--samples", 4, "--sequence-length", 16, "--micro-batch-size", 4, "--eval-data", "none", "--overwrite")
SEARCH = ("--search-rounds", 2)
LEARN = ("--learn-epochs", 2, "--learn-batch-size", 4, "--learn-block-size", 8)
DISTILL = ("--distill-epochs", 2, "--distill-batch-size", 4)
COMMANDS = {
    "searched, distill": ("--recipe", "heuristic,searched,mask,distill", *SEARCH, *DISTILL),
    "distill, round, in 8 bits": ("--recipe", "sparsegpt,distill,round", *DISTILL, "--save-format", "packed-fp8"),
    "learned, distill": ("--recipe", "heuristic,learned,mask,distill", *LEARN, *DISTILL),
    "default": ("--generated", 2),
    "searched, fused, a dense share": ("--recipe", "values", *SEARCH, "--layout", "fused", "--dense-share", 0.3),
}


class Compilations:
    """Runs compilations of one model, each in a process that may be killed."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._log = model, folder / "log"
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        place: Path,
        options: tuple[object, ...],
        number: int = 0,
        delay: float = 0.0,
        kind: signal.Signals = signal.SIGKILL,
        events: tuple[str, ...] = CHANGES,
    ) -> int:
        """Compiles to ``out`` in ``place``, with a signal at a change; returns the exit code: -9 if it was killed."""
        arguments = ["compile", self._model, "--calibration", self._model.parent / "text.txt", "--output"]
        job = {
            "arguments": [str(each) for each in (*arguments, place / "out", *QUICK, *options)],
            "place": str(place),
            "number": number,
            "delay": delay,
            "kind": kind,
            "events": events,
            "log": str(self._log),
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    @property
    def log(self) -> str:
        """What the last compilation printed."""
        return self._log.read_text()

    @property
    def changes(self) -> int:
        """How often the last compilation, which must have ended by itself, changed files beside its output."""
        return int(Path(f"{self._log}.changes").read_text())

    def close(self) -> None:
        """Ends the server."""
        self._server.kill()
        self._server.wait()


@pytest.fixture(scope="module")
def compilations(model_folder, tmp_path_factory) -> Iterator[Compilations]:
    found = Compilations(model_folder, tmp_path_factory.mktemp("log"))
    yield found
    found.close()


def weights(place: Path) -> dict[str, bytes]:
    """The tensors' files of the output, which must be all that stands there."""
    assert [path.name for path in place.iterdir()] == ["out"], "litter"
    return {name: content for name, content in files(place / "out").items() if name.endswith(".safetensors")}


@pytest.mark.slow
def test_killed_compilations_end_as_if_uninterrupted(compilations, tmp_path, soak):
    """2 kills, or 50 with ``--soak``: of every kind of stage with a state, and while saving in two formats."""
    kills, chance = (50, random.Random(0)) if soak else (2, random.Random(1))
    places = {}
    for name, options in list(COMMANDS.items())[: None if soak else 2]:
        place = tmp_path / name
        place.mkdir()
        assert compilations.run(place, options) == 0, compilations.log
        places[name] = place, weights(place), compilations.changes
    killed = 0
    for attempt in range(kills):
        name = list(places)[attempt % len(places)]
        place, expected, changes = places[name]
        # Most changes are those of saving, which takes a moment; the stages pass between few.
        number = chance.randint(1, changes) if attempt % 2 else chance.randint(1, changes // 2)
        code = compilations.run(place, COMMANDS[name], number, chance.choice([0.0, 0.002, 0.05, 0.3]))
        assert code in (0, -9), compilations.log
        killed += code == -9
        assert compilations.run(place, COMMANDS[name]) == 0, compilations.log
        assert weights(place) == expected, f"{name}, killed at change {number} of {changes}"
    assert killed > kills // 2


@pytest.mark.slow
def test_a_signal_to_end_is_taken_as_an_interruption(compilations, tmp_path):
    """While the state of the second round takes its place, and while the output does."""
    options = ("--recipe", "heuristic,searched,mask", *SEARCH)
    assert compilations.run(tmp_path, options, events=RENAMES) == 0, compilations.log
    expected, renames = weights(tmp_path), compilations.changes
    for kind, number in ((signal.SIGTERM, 2), (signal.SIGHUP, renames)):
        code = compilations.run(tmp_path, options, number, kind=kind, events=RENAMES)
        assert code == 128 + kind, compilations.log
        last = compilations.log.splitlines()[-1]
        assert last.startswith("error: interrupted: no half-written output is left"), compilations.log
        assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.searched.safetensors"}
        left = files(tmp_path / "out")
        assert {name: left[name] for name in expected} == expected, "whole"
        assert compilations.run(tmp_path, options) == 0, compilations.log
        assert "continuing after round" in compilations.log
        assert weights(tmp_path) == expected

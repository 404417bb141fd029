"""``permtriton compile`` under ``torchrun``: the ranks end together, in seconds.

The ranks are forked from a process that has imported everything, because importing torch takes longer than a
compilation of the tiny model. The process does what ``torchrun`` does: it sets the environment, and ends the ranks that
are left when one ends with an error.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .desk import RUNNER, app

AGENT = """
import json, os, signal, sys, threading, time
import networkx, torch.export, torch.distributed.fsdp, torch._inductor, torch._functorch.aot_autograd
import permtriton.cli.compile
import permtriton.util.bars as bars
from permtriton.cli.main import app
from torch.distributed import TCPStore
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

bars.SELDOM = 0  # every step is told, so that a test knows where a rank is

def work(rank, arguments, environment, log):
    signal.alarm(200)  # ends a rank that waits forever
    with open(f"{log}.{rank}", "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    if "SLOWLY" in environment:
        save = PreTrainedModel.save_pretrained
        def save_slowly(model, folder, *arguments, **options):
            save(model, folder, *arguments, **options)
            if ".partial-" in str(folder):
                print("saving slowly", flush=True)
                time.sleep(60)
        PreTrainedModel.save_pretrained = save_slowly
    code = 1
    try:
        app(arguments[rank] or sys.exit(code))
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

def reached(log, text):
    return any(text in open(f"{log}.{rank}").read() for rank in range(2) if os.path.exists(f"{log}.{rank}"))

for line in sys.stdin:
    job = json.loads(line)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job["environment"]["MASTER_PORT"] = str(store.port)
    ranks, children, codes = len(job["arguments"]), {}, {}
    for rank in range(ranks):
        child = os.fork()
        if not child:
            work(rank, job["arguments"], job["environment"], job["log"])
        children[child] = rank
    killed = job["kill"] is None
    while len(codes) < ranks:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            code = os.waitstatus_to_exitcode(status)
            codes[children.pop(child)] = code
            for other in children if code and job["agent"] else ():
                os.kill(other, signal.SIGTERM)
        elif not killed and reached(job["log"], job["after"]):
            number, rank = job["kill"]
            os.kill(next(child for child, each in children.items() if each == rank), number)
            killed = True
        elif job["kill"] and job["kill"][0] == signal.SIGSTOP and len(codes) == ranks - 1:
            os.kill(next(iter(children)), signal.SIGKILL)
        else:
            time.sleep(0.02)
    print(json.dumps([codes[rank] for rank in range(ranks)]), flush=True)
"""
QUICK = ("--samples", 5, "--sequence-length", 16, "--eval-data", "none", "--overwrite")
SEARCH = ("--recipe", "heuristic,searched,mask", "--search-rounds", 3)


class Torchrun:
    """Runs compilations of one model on two ranks."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder, self._log = model, folder, folder / "log"
        self._agent = subprocess.Popen(
            [sys.executable, "-c", AGENT],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def command(self, output: Path, *options: object) -> list[str]:
        words = ["compile", self._model, "--calibration", self._model.parent / "text.txt", "--output", output]
        return [str(word) for word in (*words, *QUICK, *options)]

    def run(
        self,
        *commands: list[str] | None,
        kill=None,
        after: str = "",
        agent: bool = True,
        **environment: str,
    ) -> list[int]:
        """Runs one command per rank, and returns their exit codes; ``kill`` is a signal and the rank that gets it.

        A rank without a command ends at once, with 1.
        """
        for old in self._folder.glob("log.*"):
            old.unlink()
        environment |= {
            **{"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            **{"WORLD_SIZE": str(len(commands)), "LOCAL_WORLD_SIZE": str(len(commands))},
        }
        job = {"arguments": commands, "environment": environment, "log": str(self._log), "kill": kill, "after": after}
        assert self._agent.stdin is not None
        assert self._agent.stdout is not None
        self._agent.stdin.write(json.dumps({**job, "agent": agent}) + "\n")
        self._agent.stdin.flush()
        return json.loads(self._agent.stdout.readline())

    def said(self, rank: int) -> str:
        return Path(f"{self._log}.{rank}").read_text()

    def close(self) -> None:
        self._agent.kill()
        self._agent.wait()


@pytest.fixture(scope="module")
def torchrun(model_folder, tmp_path_factory) -> Iterator[Torchrun]:
    found = Torchrun(model_folder, tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error:")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_two_ranks_write_one_output(torchrun, tmp_path):
    command = torchrun.command(tmp_path / "out", *SEARCH)
    assert torchrun.run(command, command) == [0, 0], torchrun.said(0)
    assert "written to" in torchrun.said(0)
    assert torchrun.said(1) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "litter"


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_the_same_command_continues(torchrun, tmp_path):
    command = torchrun.command(tmp_path / "out", *SEARCH)
    assert torchrun.run(command, command) == [0, 0], torchrun.said(0)
    expected = weights(tmp_path / "out")
    for rank in (0, 1):
        command = torchrun.command(tmp_path / f"killed-{rank}", *SEARCH)
        codes = torchrun.run(command, command, kill=(9, rank), after="round 2")
        assert codes[rank] == -9
        assert codes[1 - rank] in (-15, 2), "torchrun's signal ends it, or it finds out by itself"
        assert "Traceback" not in torchrun.said(1 - rank)
        assert torchrun.run(command, command) == [0, 0], torchrun.said(0)
        assert "continuing after round 1" in torchrun.said(0)
        found = weights(tmp_path / f"killed-{rank}")
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_signal_to_end_while_the_first_rank_saves(torchrun, tmp_path):
    command = torchrun.command(tmp_path / "out", "--recipe", "mask")
    codes = torchrun.run(command, command, kill=(15, 0), after="saving slowly", SLOWLY="yes")
    assert codes[0] == 143, torchrun.said(0)
    assert "interrupted: no half-written output is left" in torchrun.said(0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_error_of_one_rank_is_said_with_its_number(torchrun, tmp_path):
    command = torchrun.command(tmp_path / "out")
    codes = torchrun.run(command, ["compile", "./missing", *command[2:]])
    assert (codes[0] in (-15, 2), codes[1]) == (True, 2)
    (line,) = errors(torchrun.said(1))
    assert "rank 1: ./missing" in line


@pytest.mark.slow
def test_other_commands_refuse_several_ranks(torchrun, model_folder):
    command = ["evaluate", str(model_folder)]
    assert torchrun.run(command, command, agent=False) == [2, 2]
    assert "start it without torchrun" in errors(torchrun.said(0))[0]


def test_shard_needs_several_processes(model_folder):
    for more in ((), ("--dry-run",)):
        result = RUNNER.invoke(app, ["compile", str(model_folder), "--shard", *more])
        assert result.exit_code == 2
        assert "start permtriton with torchrun" in result.stderr

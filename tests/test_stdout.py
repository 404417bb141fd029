"""Standard output that is full: one line says so, what is saved stays, and a pipe that nobody reads is no error.

A full standard error changes nothing but what can be read there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .desk import Desk, check_refusal
from .test_output_files import commands

FULL = Path("/dev/full")
UNPRINTED = "standard output, or a temporary file, cannot be written: No space left on device"


def started(arguments: list[str], stdout: int) -> tuple[int, str]:
    """Runs a command in a process of its own; returns its exit code and what it said on standard error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "permtriton", *arguments]
    result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, check=False)
    return result.returncode, result.stderr.decode()


def into_full_disk(arguments: list[str]) -> tuple[int, str]:
    with FULL.open("w") as full:
        return started(arguments, full.fileno())


def into_closed_pipe(arguments: list[str]) -> tuple[int, str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return started(arguments, writer)
    finally:
        os.close(writer)


def saving(desk: Desk, *more: str) -> dict[str, tuple[list[str], Path]]:
    """Commands that save something and then print, with what they save."""
    table = desk.folder / "t.json"
    evaluate = commands(desk, table)["evaluate"]
    return {"compile": (desk.compile(*more), desk.out), "evaluate": ([*evaluate, *more], table)}


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(("command", "more"), [("compile", ()), ("evaluate", ("--json",))])
@pytest.mark.slow
def test_what_is_saved_stays_where_standard_output_is_full(desk, command, more):
    arguments, saved = saving(desk, *more)[command]
    code, said = into_full_disk(arguments)
    check_refusal(code, said, (UNPRINTED,))
    assert (saved / "config.json").is_file() if saved == desk.out else "perplexity" in saved.read_text()


@pytest.mark.slow
def test_a_pipe_that_nobody_reads_is_no_error(desk):
    said = "reading the sizes of the model, not its weights\n"
    assert into_closed_pipe(["inspect", str(desk.model), "--json"]) == (0, said)


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.slow
def test_a_full_standard_error_stops_no_work(desk):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for arguments, code in ((desk.compile(), 0), (["inspect", "./nowhere"], 2)):
        with FULL.open("w") as full:
            command = [sys.executable, "-m", "permtriton", *arguments]
            result = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, env=environment, check=False)
        assert result.returncode == code, arguments
        assert (b"written to" in result.stdout) == (code == 0)

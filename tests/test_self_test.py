"""The self-test of `permtriton doctor`: what works, and what fails, with the reason."""

import json

import torch
from typer.testing import CliRunner

from permtriton.cli import self_test as module
from permtriton.cli.main import app
from permtriton.cli.self_test import FAILS, WORKS, Check, self_test
from permtriton.kernels import permute
from permtriton.kernels.tools.cases import permute_case


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_every_kernel_that_runs_here_works():
    checks = self_test()
    assert [check for check in checks if check.outcome == FAILS] == []
    assert bool(checks) == torch.cuda.is_available()


def test_a_kernel_that_computes_something_else_fails(monkeypatch):
    """On the CPU the operators run their references, so a wrong one stands in for a wrong kernel."""
    cpu, cases = torch.device("cpu"), [permute_case(16, 64, torch.float16)]
    check = module._checked("Triton", cases, cpu)
    assert (check.outcome, check.detail) == (WORKS, "1 calls agree with their references")
    monkeypatch.setattr(permute, "permute", lambda x, index, dim=-1: x)
    cases = [permute_case(16, 64, torch.float16)]
    check = module._checked("Triton", cases, cpu)
    assert check.outcome == FAILS
    assert "kernel permute" in check.detail


def test_the_command_prints_all_of_it(monkeypatch):
    checks = [Check("Triton", WORKS, "21 calls", 1.0)]
    monkeypatch.setattr("permtriton.cli.doctor.self_test", lambda: checks)
    shown = run()
    assert shown.exit_code == 0
    assert [word for word in ("Self-test", "works", "21 calls") if word not in shown.stdout] == []
    assert json.loads(run("--json").stdout)["self_test"] == [
        {"name": "Triton", "outcome": "works", "detail": "21 calls", "seconds": 1.0}
    ]


def test_a_failure_is_exit_code_2_with_the_reason(monkeypatch):
    checks = [Check("Triton", FAILS, "outputs differ", 1.0)]
    monkeypatch.setattr("permtriton.cli.doctor.self_test", lambda: checks)
    for arguments in ([], ["--json"]):
        shown = run(*arguments)
        assert shown.exit_code == 2
        assert "the self-test failed: Triton: outputs differ" in shown.stderr
    assert json.loads(run("--json").stdout)["self_test"][0]["outcome"] == FAILS

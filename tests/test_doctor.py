"""`permtriton doctor`: what this machine is."""

import json

from typer.testing import CliRunner

from permtriton.cli.main import app


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_it_says_what_the_machine_is():
    report = json.loads(run("--json", "--no-self-test").stdout)
    assert report["self_test"] == []
    assert set(report) >= {"system", "versions", "GPU", "triton", "CUDA compiler", "kernels run"}
    assert "torch" in report["versions"]
    shown = run("--no-self-test")
    assert shown.exit_code == 0
    assert "kernels run" in shown.stdout

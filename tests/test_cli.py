"""The command line: help, what each command writes and prints, and an earlier output that survives every failure."""

import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from permtriton.cli.compile import verdict
from permtriton.cli.main import app, command_named
from permtriton.driver import job
from permtriton.errors import ConfigError
from permtriton.recipe import all_options, defaults

from .desk import LEARN, RUNNER
from .folders import LAST_UP

# -- help ----------------------------------------------------------------------------------------------------------


def flags_of(command: str) -> set[str]:
    return {name for each in command_named(command).params for name in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("command", ["compile", "compare"])
def test_help_all_shows_every_flag_with_its_default(command):
    text = RUNNER.invoke(app, [command, "--help-all"], env={"COLUMNS": "600"}).stdout
    flags = {flag for flag in flags_of(command) if flag.startswith("--")}
    assert flags <= set(text.split())
    assert all(f"default: {defaults(o)}]" in text for o in all_options().values() if o.flag in flags)


def test_compare_offers_only_what_its_rows_leave_open():
    assert flags_of("compare") & {"--importance", "--layout", "--seed", "--patterns"} == set()
    assert {"--sparsity", "--pattern", "--seeds"} <= flags_of("compare")


def test_version():
    assert RUNNER.invoke(app, ["--version"]).stdout == f"permtriton {metadata.version('permtriton')}\n"


def test_help_imports_no_library():
    """torch and transformers take seconds to import."""
    code = (
        "import sys\nfrom permtriton.cli.main import app\ntry:\n    app(['--help'])\n"
        "finally:\n    print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    imported = set(result.stderr.splitlines()[-1].split())
    assert {"typer", "rich", "permtriton"} <= imported
    assert imported & {"torch", "transformers", "scipy", "datasets", "numpy", "triton", "safetensors"} == set()


# -- outputs -------------------------------------------------------------------------------------------------------


def test_interruption(desk, monkeypatch):
    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", interrupt)
    before = desk.files()
    result = RUNNER.invoke(app, desk.compile())
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].startswith("error: interrupted: no half-written output is left")
    assert desk.files() == before


@pytest.mark.parametrize("name", ["tiny", "tiny/", "tiny/../tiny"])
def test_default_output_is_named_after_the_model(desk, monkeypatch, name):
    targets = []

    def claimed(target: Path, **_options: object) -> None:
        targets.append(target)
        raise ConfigError("far enough")

    monkeypatch.setattr(job, "claimed", claimed)
    monkeypatch.chdir(desk.model.parent)
    RUNNER.invoke(app, ["compile", name, "--sparsity", "4:8"])
    assert [target.name for target in targets] == ["tiny-4of8"]


# -- good input ----------------------------------------------------------------------------------------------------


def test_compile_replaces_the_earlier_output_and_prints_json_alone(desk):
    options = (*LEARN, "--learn-epochs", "2", "--micro-batch-size", "16", "--eval-data", desk.text, "--json")
    result = RUNNER.invoke(app, desk.compile(*options))
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed == json.loads((desk.out / "permtriton.json").read_text())
    assert [path.name for path in desk.folder.iterdir()] == ["out"], "the state of learning is gone"
    assert printed["config"]["learn_epochs"] == 2
    assert printed["calibration"]["shape"] == [4, 16]
    assert [step["name"] for step in printed["steps"]] == ["heuristic", "learned", "mask"]
    assert [epoch["epoch"] for epoch in printed["steps"][1]["history"]] == [0, 1, 2]
    assert {printed["evaluation"]["measure"], printed["evaluation"]["text"]} == {"perplexity", str(desk.text)}
    weight = AutoModelForCausalLM.from_pretrained(desk.out).get_parameter(LAST_UP)
    assert (weight.unflatten(1, (-1, 4)) != 0).sum(-1).max() == 2


def test_compile_ends_with_a_verdict_and_the_next_step(desk):
    result = RUNNER.invoke(app, desk.compile("--eval-data", desk.text, "--eval-windows", 2))
    assert result.exit_code == 0, result.stderr
    for word in ("perplexity, dense model", "perplexity, this model", "stream", "peak memory", "50.00%"):
        assert word in result.stdout
    first, second, *_, last = result.stdout.splitlines()
    assert (first, second.rstrip()) == (f"written to {desk.out}", "Permutations")
    evaluation = json.loads((desk.out / "permtriton.json").read_text())["evaluation"]
    dense, pruned = evaluation["dense"], evaluation["compiled"]
    assert evaluation["windows"] == [2, 32]
    change = f"{dense:.2f} -> {pruned:.2f} ({pruned / dense - 1:+.1%})"
    assert last == f"{desk.out}: perplexity {change}; packed: permtriton export {desk.out}"


def test_compile_shows_no_permutations_where_nothing_moved(desk):
    result = RUNNER.invoke(app, desk.compile("--recipe", "mask", "--save-format", "packed"))
    first, second, *_, last = result.stdout.splitlines()
    assert (first, second.rstrip()) == (f"written to {desk.out}", "Result")
    measure = f"not measured yet (permtriton evaluate {desk.out} --against {desk.model})"
    assert last == f"{desk.out}: {measure}; it loads with transformers after import permtriton"


def test_a_cosine_is_no_perplexity():
    report = {"model": "m", "evaluation": {"measure": "cosine", "dense": 1.0, "compiled": 0.98765}}
    assert verdict(report, "my folder") == (
        "my folder: cosine with the dense model 0.9877; packed: permtriton export 'my folder'"
    )


@pytest.mark.slow
def test_inspect_needs_no_weights(desk, tmp_path):
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    (model / "model.safetensors").unlink()
    result = RUNNER.invoke(app, ["inspect", str(model), "--json"])
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert len(plan["sites"]) == 8
    assert "stream" in {site["permutation"] for site in plan["sites"]}
    assert RUNNER.invoke(app, ["inspect", str(model)]).stdout.startswith("Sites")

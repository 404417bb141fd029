"""What works without the extras, and what is said where one is missing."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from permtriton.errors import MissingExtraError
from permtriton.util.extras import EXTRAS, RELEASE, install_command, require

from . import zoo

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = sorted({module for modules in EXTRAS.values() for module in modules})
# A finder that hides the packages of the extras, and what they alone need, as where only the core is installed.
CORE_ONLY = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

    def invalidate_caches(self):
        pass

import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] in {names} else find(name, *more)
sys.meta_path.insert(0, Hidden())
from permtriton.cli.main import app

def run(*words):
    try:
        app(list(words))
    except SystemExit as stop:
        print(words[0], stop.code, file=sys.stderr)

"""
HIDDEN = {*OPTIONAL, "pandas", "dill", "sacrebleu", "nltk", "evaluate", "peft", "matplotlib", "sklearn"}


def core_only(code: str, folder: Path) -> str:
    """Runs code where no package of an extra can be imported, and returns what it wrote on standard error."""
    environment = {**os.environ, "COLUMNS": "200"}
    text = CORE_ONLY.format(names=sorted(HIDDEN)) + code
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_every_extra_installs_what_it_is_for():
    extras = PROJECT["optional-dependencies"]
    names = {"lm_eval": "lm-eval", "compressed_tensors": "compressed-tensors"}
    for extra, modules in EXTRAS.items():
        installed = {re.match(r"[\w-]+", each)[0] for each in extras[extra]}
        assert {names.get(module, module) for module in modules} <= installed
        core = {re.match(r"[\w-]+", each)[0] for each in PROJECT["dependencies"]}
        assert installed & core == set()
    (everything,) = extras["all"]
    assert set(re.search(r"\[(.*)\]", everything)[1].split(",")) == set(EXTRAS), "but for vllm"
    assert "permtriton[all]" in extras["dev"]


def test_one_sentence_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        MissingExtraError, match=re.escape(f"jinja2, which is not installed: {install_command('report')}")
    ):
        require("a report", "jinja2")
    require("zero-shot tasks", "lm_eval")


@pytest.mark.slow
def test_the_core_compiles_exports_and_loads(tmp_path):
    """And every command that needs an extra says so in one line, with exit code 2."""
    zoo.tiny_llama().save_pretrained(tmp_path / "tiny")
    (tmp_path / "text.parquet").write_bytes(b"")
    (tmp_path / "text.jsonl").write_text(json.dumps({"input_ids": zoo.tiny_ids(1, 64)[0].tolist()}))
    said = core_only(
        """
options = ["--recipe", "mask", "--samples", "2", "--sequence-length", "16", "--eval-data", "none"]
run("compile", "tiny", "--calibration", "text.jsonl", "--output", "out", *options)
run("export", "out", "--output", "packed")
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained("packed")
run("report", "out")
run("evaluate", "tiny", "--eval-data", "none", "--tasks", "arc_easy")
run("evaluate", "tiny", "--eval-data", "wikitext2")
run("compile", "tiny", "--calibration", "text.parquet", "--output", "other", *options)
""",
        tmp_path,
    )
    assert "compile 0" in said
    assert "export 0" in said
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    words = rf'needs (\w+), which is not installed: pip install "{re.escape(RELEASE)}\[(\w+)\]"'
    found = [re.search(words, line).groups() for line in lines]
    assert found == [("jinja2", "report"), ("lm_eval", "eval"), ("datasets", "data"), ("pyarrow", "data")]
    assert said.count(" 2\n") == 4

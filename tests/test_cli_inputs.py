"""Models and texts that cannot be used: one line, exit code 2, and no file changed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import permtriton
from permtriton.cli.main import app
from permtriton.errors import ModelError

from . import zoo
from .desk import RUNNER, Desk, check_refusal
from .folders import LAST_UP, configure, edit_tensors
from .sentences import SENTENCE


def test_a_compiled_model_is_not_compiled_again(desk):
    """Pruning it again would report the pruned model as the dense one."""
    model = shutil.copytree(desk.model, desk.folder / "compiled")
    (model / "permtriton.json").write_text("{}")
    for command in (desk.compile(model=model), ["compare", str(model), "--calibration", str(desk.text)]):
        desk.refuses(command, "already been compiled", "original model")


# -- models --------------------------------------------------------------------------------------------------------


def test_a_model_in_memory_that_was_compiled_is_not_compiled_again(desk):
    (desk.out / "permtriton.json").write_text("{}")
    LlamaForCausalLM.from_pretrained(desk.model).save_pretrained(desk.out)
    model = LlamaForCausalLM.from_pretrained(desk.out)
    with pytest.raises(ModelError, match="has already been compiled by permtriton: pass the original model"):
        permtriton.compile(model, data=zoo.tiny_ids(4, 16), recipe="mask")


@pytest.mark.parametrize("flag", ["--methods", "--sparsity", "--values"])
def test_an_empty_list_is_not_all(desk, flag):
    desk.refuses(
        ["compare", str(desk.model), "--ablate", "layers", "--values", "1", flag, ""], f"{flag} '' has an empty name"
    )


def test_options_of_other_libraries_with_names_of_ours_are_no_flags(desk, tmp_path):
    """transformers names `dtype=torch.int8` and `attn_implementation=...` in its messages."""
    folder = shutil.copytree(desk.model, tmp_path / "model")
    configure(folder, dtype="int8")
    done = RUNNER.invoke(app, desk.compile(model=folder))
    assert done.exit_code == 2
    assert "'dtype=torch.int8'" in done.stderr


def poison(value: float) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda weights: weights[LAST_UP][2, 3].fill_(value))


def overflow(folder: Path) -> None:
    """Makes weights that are finite in float16, but whose products are not."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for linear in (model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.down_proj):
            linear.weight.fill_(3e4)
    model.half().save_pretrained(folder)


def shrink_vocabulary(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(50)
    model.save_pretrained(folder)


BAD_MODELS = {
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), ["no weights", "convert pickles"]),
    "NaN": (poison(torch.nan), [LAST_UP, "NaN or infinite"]),
    "another tokenizer": (shrink_vocabulary, ["0 to 49", "tokenizer"]),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_models(desk, tmp_path, case):
    damage, words = BAD_MODELS[case]
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    damage(model)
    desk.refuses(desk.compile(model=model), *words)


@pytest.mark.parametrize("command", ["compile", "evaluate"])
def test_tensors_that_the_class_does_not_use_are_named(desk, tmp_path, command):
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    further = [f"model.layers.{layer}.eh_proj.weight{end}" for layer in (2, 3) for end in ("", "_scale")]
    names = [*further, "score.bias", "score.weight"]
    edit_tensors(model, lambda tensors: tensors.update({name: torch.ones(2) for name in names}))
    options = (
        desk.compile(model=model) if command == "compile" else [command, str(model), "--eval-data", str(desk.text)]
    )
    done = RUNNER.invoke(app, options)
    assert done.exit_code == 0, done.stderr
    listed = "model.layers.2-3.eh_proj.weight, model.layers.2-3.eh_proj.weight_scale, score.bias, score.weight"
    assert f"tensors that LlamaForCausalLM does not use are left out: {listed}\n" in done.stderr


def test_activations_that_overflow_on_the_held_out_text(desk, tmp_path):
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    overflow(model)
    desk.refuses(desk.compile("--eval-data", desk.text, model=model), "not finite", "--dtype float32")


@pytest.mark.parametrize("command", ["compile", "inspect", "compare"])
@pytest.mark.parametrize("name", ["./nowhere", "a/b/c"])
def test_unknown_folders(desk, command, name):
    desk.refuses([command, name, *(["--output", str(desk.folder / "new")] * (command == "compile"))], name, "folder")


def offline(desk: Desk, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a command in a process of its own without network access."""
    cache = desk.folder.parent / "cache"
    return subprocess.run(
        [sys.executable, "-m", "permtriton.cli.main", *arguments],
        env={**os.environ, "HF_HOME": str(cache), "OMP_NUM_THREADS": "1"},
        cwd=desk.folder.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_hub_name_that_cannot_be_fetched(desk):
    before = desk.files()
    result = offline(desk, *desk.compile(model="nobody/no-such-model"))
    check_refusal(result.returncode, result.stderr, ("nobody/no-such-model", "can be fetched"))
    assert desk.files() == before


# -- texts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--calibration", "--eval-data"])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "\n \n", ["is empty"]),
        ("a.txt", bytes(9999), ["character 0 is a NUL", "UTF-8"]),
        ("a.txt", SENTENCE.encode("utf-16-le"), ["character 1 is a NUL", "UTF-8"]),
        ("a.jsonl", '{"text": "a"}\n{"text": "b\\u0000"}\n', ["document 2", "character 1 is a NUL", "UTF-8"]),
        ("a.jsonl", '{"words": "a"}\n', ["['words']", "text or input_ids"]),
    ],
)
def test_bad_texts(desk, option, name, content, words):
    path = desk.write(name, content)
    desk.refuses(desk.compile(option, path), str(path), *words)


def test_too_little_text(desk):
    path = desk.write("a.txt", SENTENCE)
    desk.refuses(desk.compile("--calibration", path), str(path), "4 are needed", "--samples", "--sequence-length")

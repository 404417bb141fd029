"""The command line: every kind of bad input ends in one line, exit code 2, and nothing lost."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from permtriton import memory
from permtriton.cli import compile as compile_command  # the module
from permtriton.cli.main import app
from permtriton.errors import ConfigError

SENTENCE = "the quick brown fox jumps over the lazy dog and sleeps until noon. "
LAST_UP = "model.layers.1.mlp.up_proj.weight"
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A tiny model with its tokenizer, and beside it a text."""
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([SENTENCE], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder.parent / "text.txt").write_text(SENTENCE * 60, encoding="utf-8")
    return folder


class Desk:
    """A folder with an earlier output in it, and the arguments of a compilation that would replace it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self.text, self.out = folder, model, model.parent / "text.txt", folder / "out"
        self.out.mkdir()
        (self.out / "permtriton.json").write_text("{}")
        (self.out / "model.safetensors").write_bytes(b"hours of work")

    def files(self) -> dict[str, bytes | None]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else None
            for path in self.folder.rglob("*")
        }

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def compile(self, *more: object, model: object = None, output: Path | None = None) -> list[str]:
        """Later options win over earlier ones."""
        arguments = [
            "compile", model or self.model, "--output", output or self.out, "--overwrite", "--permutation", "heuristic",
            "--calibration", self.text, "--samples", 4, "--sequence-length", 16, "--eval-text", "none", *more,
        ]  # fmt: skip
        return [str(argument) for argument in arguments]

    def refuses(self, arguments: list[str], *words: str) -> None:
        """Runs and checks that it ends in one line that holds ``words``, and that no file changed, came or went."""
        before = self.files()
        result = RUNNER.invoke(app, arguments)
        assert isinstance(result.exception, SystemExit), f"a traceback: {result.exception!r}"
        check_refusal(result.exit_code, result.stderr, words)
        assert result.stdout == ""
        assert self.files() == before


def check_refusal(exit_code: int, stderr: str, words: tuple[str, ...]) -> None:
    lines = stderr.splitlines()
    assert exit_code == 2, stderr
    assert [line for line in lines if line.startswith("error:")] == lines[-1:], stderr
    assert "Traceback" not in stderr
    assert [word for word in words if word not in lines[-1]] == [], lines[-1]


@pytest.fixture
def desk(tmp_path, pristine, monkeypatch) -> Desk:
    # The runner closes each command's streams, which loggers of libraries that met an earlier one still hold.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    (tmp_path / "desk").mkdir()
    return Desk(tmp_path / "desk", pristine)


def test_a_compiled_model_is_not_compiled_again(desk):
    """Pruned once more, it would be told as dense."""
    model = shutil.copytree(desk.model, desk.folder / "compiled")
    (model / "permtriton.json").write_text("{}")
    for command in (desk.compile(model=model), ["compare", str(model), "--calibration", str(desk.text)]):
        desk.refuses(command, "compiled already", "original model")


# -- options -------------------------------------------------------------------------------------------------------

LEARN = ("--permutation", "learned")
BAD_OPTIONS = {
    "more kept than there are": (("--sparsity", "4:2"), ["4:2", "0 < N < M"]),
    "none kept": (("--sparsity", "0:4"), ["0:4", "0 < N < M"]),
    "three numbers": (("--sparsity", "2:3:4"), ["'2:3:4'", "N:M"]),
    "letters": (("--sparsity", "a:b"), ["'a:b'", "N:M"]),
    "pattern that does not fit": (("--sparsity", "3:5"), ["layers.0", "16 input channels", "--skip-indivisible"]),
    "zero samples": (("--samples", "0"), ["samples is 0", "at least one"]),
    "one token": (("--sequence-length", "1"), ["sequence_length is 1", "at least 2"]),
    "beyond the positions": (("--sequence-length", "33"), ["33", "32 positions", "--sequence-length 32"]),
    "more samples than text": (("--samples", "9999"), ["9999 are asked for", "--samples"]),
    "unknown recipe": (("--recipe", "fancy"), ["'fancy'", "default, published, demo"]),
    "unknown importance": (("--importance", "fancy"), ["'fancy'", "magnitude, wanda, ria, obs"]),
    "unknown permutation": (("--permutation", "fancy"), ["'fancy'", "none, heuristic, learned"]),
    "unknown update": (("--weight-update", "fancy"), ["'fancy'", "none, sparsegpt"]),
    "unknown layout": (("--layout", "folded"), ["'folded'", "portable, fused"]),
    "unknown dtype": (("--dtype", "int8"), ["'int8'", "bfloat16"]),
    "unknown device": (("--device", "tpu"), ["'tpu'", "auto, cpu or cuda"]),
    "negative seed": (("--seed", "-1"), ["seed is -1"]),
    "enormous seed": (("--seed", str(2**64)), ["seed"]),
    "epochs without learning": (("--epochs", "3"), ["--epochs", "--permutation heuristic", "--permutation learned"]),
    "layers without learning": (("--permutation", "none", "--learn-layers", "last:1"), ["--learn-layers", "none"]),
    "mask without update": (("--update-mask", "keep"), ["--update-mask", "--weight-update sparsegpt"]),
    "block no multiple": ((*LEARN, "--block-size", "30"), ["block_size 30", "2:4", "multiple of 4"]),
    "no epochs": ((*LEARN, "--epochs", "0"), ["epochs is 0", "at least 1"]),
    "endless decay": ((*LEARN, "--weight-decay", "inf"), ["weight_decay", "inf"]),
    "wrong layers": ((*LEARN, "--learn-layers", "first:2"), ["'first:2'", "last:K"]),
    "no config file": (("--config", "no.toml"), ["no.toml", "cannot be read"]),
    "no calibration file": (("--calibration", "no.txt"), ["no.txt", "demo, c4, wikitext2, pile"]),
    "no evaluation file": (("--eval-text", "no.txt"), ["no.txt", "demo, wikitext2"]),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(desk, case):
    options, words = BAD_OPTIONS[case]
    desk.refuses(desk.compile(*options), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("epochs = ", ["not TOML"]),
        (b"\xff", ["not TOML"]),
        ("[learn]\nepochs = 3", ["[learn]", "flat"]),
        ("fancy = 1", ["'fancy'", "the options are"]),
        ('seed = "one"', ["seed", "'one'", "expected int"]),
        ('sparsity = "4:2"', ["4:2"]),
        ("recipe = [1]", ["recipe", "default, published, demo"]),
    ],
)
def test_bad_config_files(desk, content, words):
    desk.refuses(desk.compile("--config", desk.write("options.toml", content)), *words)


@pytest.mark.parametrize("options", [["--fancy", "1"], ["--epochs", "many"], ["--samples", "1.5"]])
def test_words_that_are_no_options_or_values(desk, options):
    """These are the option parser's own to tell, in its own frame."""
    before = desk.files()
    result = RUNNER.invoke(app, desk.compile(*options))
    assert (result.exit_code, result.stdout) == (2, "")
    assert options[0] in result.stderr
    assert desk.files() == before


def test_cuda_without_a_gpu(desk, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    desk.refuses(desk.compile("--device", "cuda"), "no usable CUDA GPU", "--device cpu")


def test_too_little_memory(desk, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    desk.refuses(desk.compile(), "1000 B are free", "--sequence-length")


# -- models --------------------------------------------------------------------------------------------------------


def configure(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        stored = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in stored.items() if v is not None}))

    return change


def poison(value: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights[LAST_UP][2, 3] = value
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return change


def overflow(folder: Path) -> None:
    """Finite in float16, but not what they compute."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for linear in (model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.down_proj):
            linear.weight.fill_(3e4)
    model.half().save_pretrained(folder)


def drop_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def shrink_vocabulary(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(50)
    model.save_pretrained(folder)


BAD_MODELS = {
    "no config": (lambda f: (f / "config.json").unlink(), ["holds no config.json"]),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json"]),
    "no architectures": (configure(architectures=None), ["architectures", "LlamaForCausalLM"]),
    "unknown class": (configure(architectures=["FancyForCausalLM"]), ["FancyForCausalLM", "--trust-remote-code"]),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), ["pytorch_model.bin", "pickle"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["no weights"]),
    "not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"garbage" * 9), ["LlamaForCausalLM"]),
    "empty": (lambda f: [path.unlink() for path in f.iterdir()], ["holds no config.json"]),
    "NaN": (poison(float("nan")), [LAST_UP, "NaN or infinite"]),
    "infinity": (poison(float("inf")), [LAST_UP, "NaN or infinite"]),
    "no tokenizer": (drop_tokenizer, ["no tokenizer", "input_ids"]),
    "another tokenizer": (shrink_vocabulary, ["0 to 49", "tokenizer"]),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_models(desk, tmp_path, case):
    damage, words = BAD_MODELS[case]
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    damage(model)
    desk.refuses(desk.compile(model=model), *words)


@pytest.mark.parametrize("importance", ["magnitude", "wanda", "ria", "obs"])
@pytest.mark.parametrize("more", [(), ("--permutation", "none"), (*LEARN, "--epochs", "1")])
def test_activations_that_overflow(desk, tmp_path, importance, more):
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    overflow(model)
    desk.refuses(desk.compile("--importance", importance, *more, model=model), "--dtype float32")


def test_activations_that_overflow_on_the_held_out_text(desk, tmp_path):
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    overflow(model)
    desk.refuses(desk.compile("--eval-text", desk.text, model=model), "not finite", "--dtype float32")


@pytest.mark.parametrize("command", ["compile", "inspect", "compare"])
@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_unknown_folders(desk, command, name):
    desk.refuses([command, name, *(["--output", str(desk.folder / "new")] * (command == "compile"))], name, "folder")


def offline(desk: Desk, *arguments: str) -> subprocess.CompletedProcess:
    """A real process, cut off from the network."""
    cache = desk.folder.parent / "cache"
    return subprocess.run(
        [sys.executable, "-m", "permtriton.cli.main", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "OMP_NUM_THREADS": "1"},
        cwd=desk.folder.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_hub_name_that_cannot_be_fetched(desk):
    before = desk.files()
    result = offline(desk, *desk.compile(model="nobody/no-such-model"))
    check_refusal(result.returncode, result.stderr, ("nobody/no-such-model", "can be fetched"))
    assert desk.files() == before


def test_c4_offline(desk):
    before = desk.files()
    result = offline(desk, *desk.compile("--calibration", "c4"))
    check_refusal(result.returncode, result.stderr, ("c4", "cannot be fetched", "local file"))
    assert desk.files() == before


# -- texts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--calibration", "--eval-text"])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "", ["is empty"]),
        ("a.txt", "\n \n", ["is empty"]),
        ("a.txt", b"caf\xe9 au lait", ["not UTF-8", "byte 3"]),
        ("a.jsonl", '{"text": "a"}\n{"text"\n', ["line 2", "not JSON"]),
        ("a.jsonl", '{"words": "a"}\n', ["line 1", '"text"', '"input_ids"']),
        ("a.jsonl", '{"input_ids": [1, 5000]}\n', ["1 to 5000", "vocabulary"]),
        ("a.jsonl", '{"input_ids": [100000000000000000000]}\n', ["vocabulary"]),
        ("a.parquet", "garbage", ["parquet"]),
        ("a.pdf", "%PDF", [".pdf", ".jsonl"]),
    ],
)
def test_bad_texts(desk, option, name, content, words):
    path = desk.write(name, content)
    desk.refuses(desk.compile(option, path), str(path), *words)


def test_too_little_text(desk):
    path = desk.write("a.txt", SENTENCE)
    desk.refuses(desk.compile("--calibration", path), str(path), "4 are asked for", "--samples", "--sequence-length")


# -- outputs -------------------------------------------------------------------------------------------------------


def test_existing_output_needs_overwrite(desk):
    arguments = [argument for argument in desk.compile() if argument != "--overwrite"]
    desk.refuses(arguments, str(desk.out), "exists", "--overwrite")


def test_overwrite_spares_a_folder_that_is_not_ours(desk):
    (desk.out / "permtriton.json").rename(desk.out / "thesis.json")
    desk.refuses(desk.compile(), str(desk.out), "not written by permtriton", "choose another folder")


def test_overwrite_spares_a_file(desk):
    desk.refuses(desk.compile(output=desk.write("notes", "mine")), "not written by permtriton")


def test_missing_parent(desk):
    desk.refuses(desk.compile(output=desk.folder / "no" / "out"), str(desk.folder / "no"), "make it first")


@pytest.mark.parametrize("options", [(), (*LEARN, "--epochs", "1", "--micro-batch-size", "16")])
def test_full_disk(desk, monkeypatch, options):
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    state = desk.folder / ".out.learning.safetensors"
    arguments = desk.compile(*options)
    if options:  # what was learned stays, so that the same command goes on
        RUNNER.invoke(app, arguments)
        assert state.is_file()
    desk.refuses(arguments, "No space left on device", str(desk.out))


def test_interruption(desk, monkeypatch):
    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", interrupt)
    before = desk.files()
    result = RUNNER.invoke(app, desk.compile())
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].startswith("error: interrupted: no half-written output is left")
    assert desk.files() == before


@pytest.mark.parametrize("name", ["tiny", "tiny/", "."])
def test_default_output_is_named_after_the_model(desk, monkeypatch, name):
    asked = []

    def check_output(target: Path, *, overwrite: bool) -> None:
        asked.append(target)
        raise ConfigError("far enough")

    monkeypatch.setattr(compile_command, "check_output", check_output)
    monkeypatch.chdir(desk.model if name == "." else desk.model.parent)
    RUNNER.invoke(app, ["compile", name, "--sparsity", "4:8"])
    assert [target.name for target in asked] == ["tiny-4of8"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seeds", "a"), ["seeds 'a'", "0,1,2"]),
        (("--seeds", "-1"), ["seeds '-1'"]),
        (("--methods", "fancy"), ["'fancy'", "magnitude, wanda"]),
        (("--eval-text", "none"), ["nothing to compare on"]),
        (("--output", "no/such/report.json"), ["no/such"]),
        (("--sparsity", "4:2"), ["4:2"]),
    ],
)
def test_bad_comparisons(desk, options, words):
    arguments = ["compare", desk.model, "--calibration", desk.text, "--eval-text", desk.text, "--methods", "magnitude"]
    sizes = ["--samples", 4, "--sequence-length", 16]
    before = desk.files()
    result = RUNNER.invoke(app, [str(argument) for argument in (*arguments, *sizes, *options)])
    assert isinstance(result.exception, SystemExit), f"a traceback: {result.exception!r}"
    check_refusal(result.exit_code, result.stderr, tuple(words))
    assert desk.files() == before


# -- good input ----------------------------------------------------------------------------------------------------


def test_compile_replaces_the_earlier_output_and_prints_json_alone(desk):
    options = (*LEARN, "--epochs", "2", "--micro-batch-size", "16", "--eval-text", desk.text, "--json")
    result = RUNNER.invoke(app, desk.compile(*options))
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed == json.loads((desk.out / "permtriton.json").read_text())
    assert [path.name for path in desk.folder.iterdir()] == ["out"], "the state of learning is gone"
    assert printed["config"]["epochs"] == 2
    assert printed["calibration"]["shape"] == [4, 16]
    assert [epoch["epoch"] for epoch in printed["learning"]["epochs"]] == [0, 1, 2]
    assert {printed["evaluation"]["measure"], printed["evaluation"]["text"]} == {"perplexity", str(desk.text)}
    weight = AutoModelForCausalLM.from_pretrained(desk.out).get_parameter(LAST_UP)
    assert (weight.unflatten(1, (-1, 4)) != 0).sum(-1).max() == 2


def test_compile_prints_tables(desk):
    result = RUNNER.invoke(app, desk.compile("--eval-text", desk.text))
    assert result.exit_code == 0, result.stderr
    for word in ("held-out perplexity, dense", "held-out perplexity, compiled", "stream", "peak memory", "50.00%"):
        assert word in result.stdout


def test_inspect_needs_no_weights(desk, tmp_path):
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    (model / "model.safetensors").unlink()
    result = RUNNER.invoke(app, ["inspect", str(model), "--json", "--block-size", "8"])
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert len(plan["sites"]) == 8
    assert {site["permutation"]: site["blocks"] for site in plan["sites"]}["stream"] == 2
    assert RUNNER.invoke(app, ["inspect", str(model)]).stdout.startswith("Sites")


def test_inspect_demo():
    result = RUNNER.invoke(app, ["inspect", "demo", "--json"])
    assert result.exit_code == 0, result.stderr
    names = [site["name"] for site in json.loads(result.stdout)["sites"]]
    assert names[:2] == ["model.layers.0.self_attn.q_proj+k_proj+v_proj", "model.layers.0.self_attn.o_proj"]


def test_compare_prints_a_row_a_method(desk):
    arguments = [
        "compare", desk.model, "--calibration", desk.text, "--eval-text", desk.text, "--samples", 4, "--json",
        "--sequence-length", 16, "--methods", "wanda, magnitude", "--seeds", "0,1", "--output", desk.folder / "t.json",
    ]  # fmt: skip
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [row["method"] for row in report["rows"]] == ["dense", "wanda", "magnitude"]
    assert [len(row["values"]) for row in report["rows"]] == [1, 2, 2]
    assert report == json.loads((desk.folder / "t.json").read_text())

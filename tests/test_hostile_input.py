"""Hostile models, texts and options, one case per guard: one line, exit code 2, and no file changed."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import permtriton
from permtriton.checkpoint.export import export
from permtriton.cli.main import app
from permtriton.errors import ModelError, OutputError, PermTritonError, reading
from permtriton.model.load import load_model, load_original
from permtriton.model.source import Source

from . import folders, zoo
from .desk import RUNNER
from .folders import configure
from .sentences import trained_tokenizer

# -- the boundary --------------------------------------------------------------------------------------------------


class Panic(BaseException):
    """What tokenizers raise when their Rust code panics: no Exception."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\nsecond"), "a.json: first"),
        (Panic("it gave up"), "a.json: it gave up"),
        (KeyError("text"), "a.json: KeyError 'text'"),
        (RuntimeError("x" * 999), f"a.json: {'x' * 300}..."),
    ],
)
def test_whatever_a_library_raises_is_one_line(error, line):
    with pytest.raises(ModelError) as caught, reading("a.json", ModelError):
        raise error
    assert (str(caught.value), caught.value.__cause__) == (line, error)


# -- models --------------------------------------------------------------------------------------------------------

Damage = Callable[[Path], object]


def write(file: str, content: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(content)


MODELS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "adapter": (write("adapter_config.json", b"{}"), ("adapter_config.json", "merge")),
    "generation config": (write("generation_config.json", b'{"max_new_tokens": -5}'), ("max_new_tokens",)),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_and_tokenizers(desk, tmp_path, case):
    """What could not be saved is refused before the work, too."""
    damage, words = MODELS[case]
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    damage(model)
    desk.refuses(desk.compile(model=model), *words)


@pytest.mark.parametrize("to", ["../outside.safetensors", "outside.bin"])
def test_an_index_of_a_dense_model_stays_inside(desk, tmp_path, to):
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    shutil.move(model / "model.safetensors", tmp_path / "outside.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": to}}))
    desk.refuses(desk.compile(model=model), "index.json names the file")


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_neither_code_nor_pickles_of_a_model_run(tmp_path):
    model, mark = tmp_path / "model", tmp_path / "the code ran"
    trained_tokenizer().save_pretrained(model)
    zoo.tiny_llama(vocab_size=280).save_pretrained(model)
    (model / "modeling_evil.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(mark)))
    configure(model, auto_map={"AutoModelForCausalLM": "modeling_evil.LlamaForCausalLM"})
    load_original(Source(str(model), device="cpu"), saved=True)
    configure(model, architectures=["EvilForCausalLM"])
    with pytest.raises(ModelError, match="EvilForCausalLM is not a model class"):
        load_model(Source(str(model), device="cpu"))
    configure(model, architectures=["LlamaForCausalLM"])
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights that permtriton reads"):
        load_model(Source(str(model), device="cpu"))
    assert not mark.exists()


# -- texts and options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--calibration", "--output", "--config"])
def test_names_that_are_too_long(desk, option):
    desk.refuses(desk.compile(option, "x" * 5000))


@pytest.mark.slow
def test_names_are_printed_as_text(desk, tmp_path):
    """A name may hold markup, line breaks and the control codes of a terminal."""
    name = "a[/red]\n\x1b[31m:smile:b"
    model = Path(shutil.copytree(desk.model, tmp_path / name))
    out = desk.folder / f"{name}-out"
    out.parent.mkdir()
    result = RUNNER.invoke(app, desk.compile(model=model, output=out))
    assert result.exit_code == 0, result.stderr
    assert "\x1b" not in result.stdout
    desk.refuses(["inspect", f"{tmp_path / name}-nowhere"], "a[/red]\\n\\x1b[31m:smile:b-nowhere")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("learn_learning_rate = " + "9" * 400, ("--learn-learning-rate", "finite number")),
        ("learn_epochs = " + "[" * 5000, ("as TOML", "recursion")),
        (f'sparsity = "{"9" * 5000}:4"', ("sparsity",)),
    ],
)
def test_files_of_options(desk, content, words):
    desk.refuses(desk.compile("--config", desk.write("a.toml", content)), *words)


# -- what leads out of a folder ------------------------------------------------------------------------------------


def test_links_out_of_a_folder_are_not_exported(tmp_path):
    """Whoever publishes an export would publish what they lead to."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("mine")
    folder = folders.save(folders.model_of("llama"), tmp_path / "model")
    (folder / "notes.txt").symlink_to(tmp_path / "secret" / "key")
    (folder / "elsewhere").symlink_to(tmp_path / "secret")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "inside.txt").symlink_to(folder / "beside.json")
    said: list[str] = []
    permtriton.export(folder, tmp_path / "packed", progress=lambda event: said.append(event.text))
    assert (tmp_path / "packed" / "inside.txt").read_text() == "{}"
    found = {path.name for path in (tmp_path / "packed").iterdir()}
    assert not found & {"notes.txt", "elsewhere", "dangling"}
    assert [text for text in said if "notes.txt, a link out of the folder" in text]


def test_the_links_of_the_cache_of_the_hub_are_exported(tmp_path):
    """It keeps all files in a folder of blobs, and links to them."""
    blobs, snapshot = tmp_path / "models--me--tiny" / "blobs", tmp_path / "models--me--tiny" / "snapshots" / "0"
    folders.save(folders.model_of("llama"), snapshot)
    blobs.mkdir()
    for path in snapshot.iterdir():
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    permtriton.export(snapshot, tmp_path / "packed")
    assert (tmp_path / "packed" / "beside.json").read_text() == "{}"


def test_no_command_writes_into_what_it_reads(desk, tmp_path, monkeypatch):
    """The default output of a compilation stands in the present folder."""
    folder = folders.save(folders.model_of("llama"), tmp_path / "compiled")
    for output in (folder / "packed", folder, tmp_path):
        with pytest.raises(OutputError, match=r"is, contains or is in .*compiled, which is read: choose .* `output=`"):
            export(folder, output)
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    monkeypatch.chdir(model)
    before = folders.files(model)
    command = ["compile", ".", "--calibration", str(desk.text)]
    desk.refuses(command, "output model-2of4", f"is in {model}, which is read", "--output")
    assert folders.files(model) == before


# -- Python --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        permtriton.export,
        permtriton.inspect,
        permtriton.compile,
        permtriton.keep_pattern,
        permtriton.evaluate,
        lambda odd: permtriton.report("x", comparison=odd),
        lambda odd: permtriton.export("x", odd),
        lambda odd: permtriton.dry_run("demo", device=odd),
        lambda odd: permtriton.dry_run("demo", tokenizer=odd),
        lambda odd: permtriton.dry_run("demo", output=odd),
    ],
)
def test_arguments_of_a_wrong_type_are_our_error(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    for odd in (1.5, b"x", [], object()):
        with pytest.raises(PermTritonError) as caught:
            call(odd)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []

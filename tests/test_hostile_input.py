"""Hostile models, texts and options, one case per guard: one line, exit code 2, and no file changed."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

import permtriton
from permtriton.checkpoint.export import export
from permtriton.cli.main import app
from permtriton.errors import CalibrationError, ConfigError, ModelError, OutputError, PermTritonError, reading
from permtriton.model.load import load_empty_model, load_model, load_original
from permtriton.model.source import Source

from . import folders, zoo
from .desk import RUNNER
from .folders import configure, edit_json, edit_tensors
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


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CalibrationError("ours")])
def test_interruptions_and_our_own_errors_pass(error):
    with pytest.raises(type(error)) as caught, reading("a.json", ModelError):
        raise error
    assert caught.value is error


# -- models --------------------------------------------------------------------------------------------------------

DEEP = b'{"a":' * 20_000
Damage = Callable[[Path], object]


def write(file: str, content: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(content)


def sizes(**changes: object) -> Damage:
    return lambda folder: configure(folder, **changes)


def tokenizer(file: str = "tokenizer.json", **changes: object) -> Damage:
    return lambda folder: edit_json(folder / file, lambda found: found.update(changes))


def far(found: dict) -> None:
    """Gives a token an id far from the others; saving such a tokenizer ended the process."""
    found["model"]["vocab"]["a"] = 2**31


TEMPLATES = [{"name": "../../../evil", "template": "x"}, {"name": "default", "template": "y"}]
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(.*)*(.*)*(.*)*y"}, "behavior": "Isolated", "invert": False}
MODELS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "deep": (write("config.json", DEEP), ("config.json", "recursion")),
    "base class": (sizes(architectures=["PreTrainedModel"]), ("PreTrainedModel", "only a base")),
    "hidden_size 2^31": (sizes(hidden_size=2**31), ("parameters", "its checkpoint can fill")),
    "10^12 layers": (sizes(num_hidden_layers=10**12), ("num_hidden_layers", "at most 100000")),
    "adapter": (write("adapter_config.json", b"{}"), ("adapter_config.json", "merge")),
    "deep tokenizer": (write("tokenizer.json", DEEP), ("tokenizer", "recursion")),
    "expression gives up": (tokenizer(pre_tokenizer=BACKTRACKING), ("text.txt", "retry-limit")),
    "id 2^31": (lambda folder: edit_json(folder / "tokenizer.json", far), ("2147483648", "tokenizer")),
    "template outside": (tokenizer("tokenizer_config.json", chat_template=TEMPLATES), ("tokenizer", "../../../evil")),
    "generation config": (write("generation_config.json", b'{"max_new_tokens": -5}'), ("max_new_tokens",)),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_and_tokenizers(desk, tmp_path, case):
    """What could not be saved is refused before the work, too."""
    damage, words = MODELS[case]
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    damage(model)
    desk.refuses(desk.compile(model=model), *words)


def test_sizes_have_limits_where_there_are_no_weights(desk, tmp_path):
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    (model / "model.safetensors").unlink()
    load_empty_model(Source(str(model)))
    configure(model, vocab_size=2**40)
    with pytest.raises(ModelError, match="more than models have"):
        load_empty_model(Source(str(model)))


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
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin, a pickle"):
        load_model(Source(str(model), device="cpu"))
    assert not mark.exists()


def test_complex_weights_in_a_file_are_refused(tmp_path):
    """transformers would drop their imaginary parts."""
    zoo.tiny_llama().save_pretrained(tmp_path)
    norm = "model.norm.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({norm: tensors[norm].to(torch.complex64) * 1j}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is C64, expected floating-point weights"):
        load_model(Source(str(tmp_path), device="cpu"))


# -- texts and options ---------------------------------------------------------------------------------------------

NOT_UTF8 = pyarrow.Array.from_buffers(
    pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
)
TABLES = {
    "two columns of a name": pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text", "text"]),
    "not UTF-8": pyarrow.table({"text": NOT_UTF8}),
    "NUL": pyarrow.table({"text": pyarrow.array(["a", "b\0"])}),
    "time": pyarrow.table({"text": pyarrow.array([2**62], pyarrow.timestamp("us"))}),
}


@pytest.mark.parametrize("case", TABLES)
def test_parquet(desk, case):
    path = desk.folder / "a.parquet"
    pyarrow.parquet.write_table(TABLES[case], path)
    desk.refuses(desk.compile("--calibration", path), str(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b'{"text":' * 20_000, ("line 1", "recursion")), (b'{"text": "\\ud800 abc"}', ("cannot be tokenized",))],
)
def test_json_texts(desk, content, words):
    path = desk.write("a.jsonl", content)
    desk.refuses(desk.compile("--calibration", path), str(path), *words)


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


@pytest.mark.parametrize(("option", "name"), [("--config", "options.toml"), ("--calibration", "ids.safetensors")])
def test_a_pipe_is_no_file(desk, option, name):
    os.mkfifo(desk.folder / name)
    done = RUNNER.invoke(app, desk.compile(option, desk.folder / name))
    assert done.exit_code == 2
    assert "no plain file" in done.stderr


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
    for odd in (1.5, b"x", [], object(), Path("\0")):
        with pytest.raises(PermTritonError) as caught:
            call(odd)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("odd", [1, {None: 1}])
def test_options_of_a_wrong_type_are_our_error(odd):
    with pytest.raises(ConfigError, match="option"):
        permtriton.config_from(odd)

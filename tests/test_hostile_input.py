"""Hostile models, texts and options, one by one: one line, exit code 2, no hang, and no file changed."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import regex
import torch
from transformers import BertConfig, BertModel

import permtriton
from permtriton.checkpoint.export import export
from permtriton.cli.main import app
from permtriton.errors import CalibrationError, ConfigError, ModelError, OutputError, PermTritonError, reading
from permtriton.model.load import load_empty_model, load_model, load_original
from permtriton.model.source import Source

from . import folders
from .desk import RUNNER, check_refusal
from .folders import configure, edit_json, edit_tensors
from .hostile import limited, set_trap


@pytest.fixture(autouse=True)
def _limits():
    with limited():
        yield


# -- the boundary --------------------------------------------------------------------------------------------------


class Panic(BaseException):
    """What tokenizers raise when their Rust code panics: no Exception."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\nsecond"), "a.json: first"),
        (Panic("it gave up"), "a.json: it gave up"),
        (KeyError("text"), "a.json: KeyError 'text'"),
        (StopIteration(), "a.json: StopIteration"),
        (
            ValueError("Validation error for 'a':\n\n  TypeError: b\nc"),
            "a.json: Validation error for 'a': TypeError: b",
        ),
        (RuntimeError("x" * 999), f"a.json: {'x' * 300}..."),
    ],
)
def test_whatever_a_library_raises_is_one_line(error, line):
    with pytest.raises(ModelError) as caught, reading("a.json", ModelError):
        raise error
    assert (str(caught.value), caught.value.__cause__) == (line, error)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), CalibrationError("ours")])
def test_interruptions_and_our_own_errors_pass(error):
    with pytest.raises(type(error)) as caught, reading("a.json", ModelError):
        raise error
    assert caught.value is error


# -- configs -------------------------------------------------------------------------------------------------------

NORM = "model.norm.weight"
DEEP, DIGITS = b'{"a":' * 20_000, b'{"hidden_size": ' + b"9" * 5000 + b"}"
Damage = Callable[[Path], object]


def write(file: str, content: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(content)


def sizes(**changes: object) -> Damage:
    return lambda folder: configure(folder, **changes)


CONFIGS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "deep": (write("config.json", DEEP), ("config.json", "recursion")),
    "digits": (write("config.json", DIGITS), ("config.json", "5000 digits")),
    "base class": (sizes(architectures=["PreTrainedModel"]), ("PreTrainedModel", "only a base")),
    "another base class": (sizes(architectures=["LlamaPreTrainedModel"]), ("LlamaPreTrainedModel", "only a base")),
    "no such type": (sizes(model_type="\ud800"), ("config.json", "\\ud800")),
    "hidden_size 0": (sizes(hidden_size=0), ("embed_tokens", "[280, 0]")),
    "hidden_size 2^31": (sizes(hidden_size=2**31), ("parameters", "its checkpoint can fill")),
    "vocab_size 2^40": (sizes(vocab_size=2**40), ("parameters", "its checkpoint can fill")),
    "intermediate_size 2^40": (sizes(intermediate_size=2**40), ("parameters", "its checkpoint can fill")),
    "head_dim 2^31": (sizes(head_dim=2**31), ("parameters", "its checkpoint can fill")),
    "10^6 layers": (sizes(num_hidden_layers=10**6), ("num_hidden_layers is 1000000", "at most 100000")),
    "10^12 layers": (sizes(num_hidden_layers=10**12), ("num_hidden_layers", "at most 100000")),
    "10^12 labels": (sizes(num_labels=10**12), ("num_labels", "at most 100000")),
    "text for a number": (sizes(hidden_size="64"), ("config.json", "hidden_size", "expected int")),
    "negative layers": (sizes(num_hidden_layers=-1), ("no linear layer",)),
    "negative heads": (sizes(num_attention_heads=-4), ("config.json", "negative dimension")),
    "not that many heads": (sizes(num_attention_heads=3), ("hidden size (16) is not a multiple", "heads (3)")),
    "adapter": (write("adapter_config.json", b"{}"), ("adapter_config.json", "merge")),
}


@pytest.mark.parametrize("command", ["compile", pytest.param("inspect", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CONFIGS)
def test_configs(desk, tmp_path, case, command):
    damage, words = CONFIGS[case]
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    damage(model)
    desk.refuses(desk.compile(model=model) if command == "compile" else ["inspect", str(model)], *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 2**31}, r"embed_tokens.weight the shape \[280, 2147483648\]"),
        ({"vocab_size": 2**40}, "more than models have"),
    ],
)
def test_sizes_have_limits_where_there_are_no_weights(desk, tmp_path, changes, words):
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    (model / "model.safetensors").unlink()
    load_empty_model(Source(str(model)))
    configure(model, **changes)
    with pytest.raises(ModelError, match=words):
        load_empty_model(Source(str(model)))


SMALL_BERT = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def test_modules_are_counted_while_they_are_made(tmp_path, monkeypatch):
    """A class may make layers from an entry with any name."""
    BertModel(BertConfig(**SMALL_BERT)).save_pretrained(tmp_path / "bert")
    configure(tmp_path / "bert", num_hidden_layers=60)
    monkeypatch.setattr("permtriton.model.sizes.MORE_MODULES", 100)
    monkeypatch.setattr("permtriton.model.sizes.MODULES_PER_TENSOR", 1)
    for read in (load_model, load_empty_model):
        with pytest.raises(ModelError, match=r"bert: config\.json describes a model of more than \d+ modules"):
            read(Source(str(tmp_path / "bert"), device="cpu"))


# -- tokenizers ----------------------------------------------------------------------------------------------------


def tokenizer(file: str = "tokenizer.json", **changes: object) -> Damage:
    return lambda folder: edit_json(folder / file, lambda found: found.update(changes))


def split_by(pattern: str) -> Damage:
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer(pre_tokenizer=rule)


def far(found: dict) -> None:
    """Gives a token an id far from the others; saving such a tokenizer ended the process."""
    found["model"]["vocab"]["a"] = 2**31


WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
PARTS = {**WORDS, "type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
TEMPLATES = [{"name": "../../../evil", "template": "x"}, {"name": "default", "template": "y"}]
TOKENIZERS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "deep": (write("tokenizer.json", DEEP), ("tokenizer", "recursion")),
    "deep config": (write("tokenizer_config.json", DEEP), ("tokenizer", "recursion")),
    "no unknown word": (tokenizer(model=WORDS), ("tokenizer", "[UNK]")),
    "no unknown part": (tokenizer(model=PARTS), ("tokenizer", "[UNK]")),
    "length is text": (tokenizer("tokenizer_config.json", model_max_length="long"), ("tokenizer", "tokenize")),
    "expression gives up": (split_by("(.*)*(.*)*(.*)*y"), ("text.txt", "retry-limit")),
    "damaged table": (
        tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("tokenizer", "precompiled_charsmap"),
    ),
    "id 2^31": (lambda folder: edit_json(folder / "tokenizer.json", far), ("2147483648", "tokenizer")),
    "surrogate": (tokenizer("tokenizer_config.json", eos_token="\ud800"), ("tokenizer", "surrogates")),
    "template outside": (tokenizer("tokenizer_config.json", chat_template=TEMPLATES), ("tokenizer", "../../../evil")),
    "generation config": (write("generation_config.json", b'{"max_new_tokens": -5}'), ("max_new_tokens",)),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers_and_generation_configs(desk, tmp_path, case, capfd):
    """What could not be saved is refused before the work, too. Where Rust code gives up, it prints what it did."""
    damage, words = TOKENIZERS[case]
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    damage(model)
    desk.refuses(desk.compile(model=model), *words)
    assert "panicked" not in capfd.readouterr().err


# -- texts ---------------------------------------------------------------------------------------------------------

NOT_UTF8 = pyarrow.Array.from_buffers(
    pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
)
TABLES = {
    "two columns of a name": pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text", "text"]),
    "not UTF-8": pyarrow.table({"text": NOT_UTF8}),
    "NUL": pyarrow.table({"text": pyarrow.array(["a", "b\0"])}),
    "date": pyarrow.table({"text": pyarrow.array([2**31 - 1], pyarrow.date32())}),
    "time": pyarrow.table({"text": pyarrow.array([2**62], pyarrow.timestamp("us"))}),
    "duration": pyarrow.table({"input_ids": pyarrow.array([2**63 - 1], pyarrow.duration("s"))}),
}


@pytest.mark.parametrize("case", TABLES)
@pytest.mark.parametrize("option", ["--calibration", "--eval-data"])
def test_parquet(desk, case, option):
    path = desk.folder / "a.parquet"
    pyarrow.parquet.write_table(TABLES[case], path)
    words = ("document 2", "character 1 is a NUL", "UTF-8") if case == "NUL" else ()
    desk.refuses(desk.compile(option, path), str(path), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text":' * 20_000, ("line 1", "recursion")),
        (b'{"input_ids": [' + b"9" * 5000 + b"]}", ("line 1", "5000 digits")),
        (b'{"text": "\\ud800 abc"}', ("cannot be tokenized",)),
    ],
)
def test_json_texts(desk, content, words):
    path = desk.write("a.jsonl", content)
    desk.refuses(desk.compile("--calibration", path), str(path), *words)


# -- names ---------------------------------------------------------------------------------------------------------

LONG = "x" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ("--calibration", f"{LONG}.txt"),
        ("--eval-data", f"{LONG}.txt"),
        ("--output", LONG),
        ("--config", f"{LONG}.toml"),
        ("--calibration", "a\0b.txt"),
    ],
)
def test_names_that_are_too_long(desk, arguments):
    desk.refuses(desk.compile(*arguments))


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
    shown_name = "".join(line.strip("│┃ ") for line in result.stdout.splitlines())
    assert "[/red]" in shown_name.replace(" ", "")
    desk.refuses(["inspect", f"{tmp_path / name}-nowhere"], "a[/red]\\n\\x1b[31m:smile:b-nowhere")


# -- what leads out of a folder ------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["../outside.safetensors", "/outside.safetensors", "outside.bin", "\0", "x" * 5000])
def test_an_index_of_a_dense_model_stays_inside(desk, tmp_path, to):
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    shutil.copy(model / "model.safetensors", tmp_path / "outside.safetensors")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": to}}))
    (model / "other.safetensors").write_bytes(b"")
    desk.refuses(desk.compile(model=model), "index.json")
    (model / "other.safetensors").unlink()
    desk.refuses(desk.compile(model=model), "index.json names the file")


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "generation_config.json", "tokenizer_config.json", "merges.txt"]
)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_only_regular_files_of_a_model_are_opened(desk, tmp_path, file, make):
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    (model / file).unlink(missing_ok=True)
    make(model / file)
    for read in (load_model, load_empty_model):
        with pytest.raises(ModelError, match=f"{file} is no regular file"):
            read(Source(str(model), device="cpu"))


def test_neither_code_nor_pickles_of_a_model_run(tmp_path, monkeypatch):
    """The folder of the random cases works as it is, and a pickle that it asks for is not opened."""
    trap = set_trap(tmp_path / "trap")
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    source = Source(str(trap.pristine), device="cpu")
    assert not trap.judge(lambda: load_original(source, saved=True), "as it is")
    pickled = trap.damaged(lambda folder: (folder / "model.safetensors").unlink())
    assert trap.judge(lambda: load_model(Source(str(pickled), device="cpu")), "only pickles")
    unknown = trap.damaged(lambda folder: configure(folder, model_type="evil", architectures=["EvilForCausalLM"]))
    assert trap.judge(lambda: load_model(Source(str(unknown), device="cpu")), "its own class")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    return folders.save(folders.model_of("llama", dtype=torch.bfloat16), tmp_path_factory.mktemp("export") / "model")


def test_export_follows_no_links_to_folders(compiled, tmp_path):
    model = Path(shutil.copytree(compiled, tmp_path / "model"))
    (model / "notes").mkdir()
    (model / "notes" / "a.txt").write_text("kept")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("s")
    (model / "elsewhere").symlink_to(tmp_path / "secret")
    (model / "notes" / "circle").symlink_to(model)
    (model / "notes" / "dangling").symlink_to("nowhere")
    os.mkfifo(model / "notes" / "pipe")
    export(model, tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    assert found == {*os.listdir(compiled), "README.md", "notes", "notes/a.txt"}


def test_export_does_not_write_into_what_it_copies(compiled, tmp_path):
    model = Path(shutil.copytree(compiled, tmp_path / "model"))
    for output in (model / "packed", model, tmp_path):
        with pytest.raises(OutputError, match=r"is, contains or is in .*model, which is read: choose .* `output=`"):
            export(model, output)


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_compile_does_not_write_into_the_model(desk, tmp_path, monkeypatch, more):
    """The default output stands in the present folder."""
    model = Path(shutil.copytree(desk.model, tmp_path / "model"))
    monkeypatch.chdir(model)
    before = folders.files(model)
    command = ["compile", ".", "--calibration", str(desk.text), *more]
    desk.refuses(command, "output model-2of4", f"is in {model}, which is read", "--output")
    assert folders.files(model) == before


# -- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("learn_learning_rate = " + "9" * 400, ("--learn-learning-rate", "finite number")),
        ("[learned]\nlearning_rate = 0x" + "f" * 5000, ("--learn-learning-rate", "bits")),
        ("learn_epochs = " + "9" * 5000, ("as TOML", "5000 digits")),
        ("learn_epochs = " + "[" * 5000, ("as TOML", "recursion")),
        ("recipe = 0x" + "f" * 5000, ("recipe", "bits")),
        ("sparsity = 0x" + "f" * 5000, ("sparsity",)),
        (f'sparsity = "{"9" * 5000}:4"', ("sparsity",)),
    ],
)
def test_files_of_options(desk, content, words):
    command = desk.compile("--config", desk.write("a.toml", content))
    place = command.index("--recipe")  # a flag would win over the file
    desk.refuses(command[:place] + command[place + 2 :], *words)


# -- seen once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["targets", "pattern"])
@pytest.mark.slow
def test_an_expression_that_took_exponential_time_is_refused(desk, option):
    value = r"re:(\w+\.?)+!" + "=4:8" * (option == "pattern")
    started = time.process_time()
    desk.refuses(["inspect", str(desk.model), f"--{option}", value], f"--{option}", "names no linear")
    assert time.process_time() - started < 20


@pytest.mark.slow
def test_an_expression_that_takes_too_long_is_refused(desk, monkeypatch):
    def match(*_arguments: object, **_options: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(regex, "match", match)
    desk.refuses(["inspect", str(desk.model), "--ignore", "re:x"], "--ignore re:x takes more than 1 s on the name")


def test_a_pipe_is_no_file_of_options(desk):
    os.mkfifo(desk.folder / "options.toml")
    done = RUNNER.invoke(app, desk.compile("--config", desk.folder / "options.toml"))
    check_refusal(done.exit_code, done.stderr, ("options.toml does not exist, or is no plain file: give a TOML file",))


def test_a_pipe_is_no_file_of_tensors(desk):
    os.mkfifo(desk.folder / "ids.safetensors")
    done = RUNNER.invoke(app, desk.compile("--calibration", desk.folder / "ids.safetensors"))
    check_refusal(done.exit_code, done.stderr, ("ids.safetensors is no plain file",))


def test_complex_weights_in_a_file_are_refused(tmp_path):
    """transformers would drop their imaginary parts."""
    folder = set_trap(tmp_path / "trap").pristine
    edit_tensors(folder, lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.complex64) * 1j}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is C64, expected floating-point weights"):
        load_model(Source(str(folder), device="cpu"))


def test_links_out_of_a_folder_are_not_exported(tmp_path):
    """Whoever publishes an export would publish what they lead to."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    folder = folders.save(folders.model_of("llama"), tmp_path / "model")
    (folder / "notes.txt").symlink_to(secret)
    (folder / "inside.txt").symlink_to(folder / "beside.json")
    said: list[str] = []
    permtriton.export(folder, tmp_path / "packed", progress=lambda event: said.append(event.text))
    assert (tmp_path / "packed" / "inside.txt").read_text() == "{}"
    assert not (tmp_path / "packed" / "notes.txt").exists()
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


def given(odd: object) -> object:
    """Returns what is not left out, where None would leave it out."""
    return 1 if odd is None else odd


ODD = (None, 1, 1.5, b"x", [], {}, object(), [None], "\0", Path("\0"), torch.ones(2))


@pytest.mark.parametrize(
    "call",
    [
        permtriton.export,
        permtriton.inspect,
        permtriton.compile,
        permtriton.keep_pattern,
        permtriton.evaluate,
        lambda odd: permtriton.report("x", comparison=given(odd)),
        lambda odd: permtriton.export("x", given(odd)),
        lambda odd: permtriton.dry_run("demo", device=odd),
        lambda odd: permtriton.dry_run("demo", tokenizer=given(odd)),
        lambda odd: permtriton.dry_run("demo", output=given(odd)),
    ],
)
def test_arguments_of_a_wrong_type_are_our_error(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    for odd in ODD:
        with pytest.raises(PermTritonError) as caught:
            call(odd)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("odd", [1, [3], b"x", {3: 4}, {None: 1}])
def test_options_of_a_wrong_type_are_our_error(odd):
    with pytest.raises(ConfigError, match="option"):
        permtriton.config_from(odd)

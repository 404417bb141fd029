"""The functions of ``import permtriton``: what its page and its docstrings show, data of every kind, refusals."""

import doctest
import inspect
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import permtriton
from permtriton.cli.main import app
from permtriton.errors import CalibrationError, ConfigError, ModelError
from permtriton.model.source import Source
from permtriton.util.sparsity import NMPattern

from . import zoo
from .lm_tasks import CHOICE, QUESTIONS, datasets_cache, write_task  # noqa: F401 (a fixture)
from .pretend_gpu import PretendGpu
from .sentences import SENTENCE, trained_tokenizer

PAGE = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
TEXTS = [f"{number} {SENTENCE * 3}" for number in range(60)]
IDS = torch.arange(8 * 16).view(8, 16) % 200
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
QUICK = {"recipe": "mask", "samples": 4, "sequence_length": 16}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with the models and texts that the page names."""
    root = tmp_path_factory.mktemp("api")
    tokenizer = trained_tokenizer()
    for name, positions in (("my-model", 32), ("Qwen/Qwen3-0.6B", 1024)):
        model = zoo.tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=positions, **ONE_HEAD)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "my-text.txt").write_text("\n\n".join(TEXTS * 40), encoding="utf-8")
    (root / "my-heldout.txt").write_text("\n\n".join(TEXTS[:8]), encoding="utf-8")
    return root


@pytest.fixture
def here(models, tmp_path, monkeypatch) -> Path:
    """A folder of its own with those models, and wikitext2 from this machine."""
    for each in models.iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "permtriton.data.documents._from_hub", lambda name, arguments: Dataset.from_dict({"text": TEXTS})
    )
    return tmp_path


# -- what is shown -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_block_of_the_page_runs_as_written(here, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 8
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"^perplexity [\d.]+, dense [\d.]+, KL [\d.e-]+, cosine [\d.]+ on wikitext2 \(", printed, re.M)
    assert "did you mean samples" in printed
    first = json.loads((here / "qwen-2of4" / "permtriton.json").read_text())
    assert first["config"]["sparsity"] == "2:4"
    assert not any("layers.0." in name for name in first["sparsity_by_layer"])
    assert (here / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert not list(here.glob(".*partial*")) + list(here.glob(".*dense*")), "nothing is left beside the outputs"


PUBLIC = [*permtriton.__all__, "CompiledModel.evaluate", "CompiledModel.save_pretrained"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_described_and_their_examples_run(here, name):
    value = permtriton
    for part in name.split("."):
        value = getattr(value, part)
    assert name == "__version__" or inspect.getdoc(value), name
    if name == "__version__" or "Example:" not in inspect.getdoc(value):
        return
    names = {"permtriton": permtriton}
    if "compiled." in inspect.getdoc(value):
        names["compiled"] = permtriton.compile("my-model", data=TEXTS, **QUICK)
    if "my-model-2of4" in inspect.getdoc(value):
        permtriton.compile("my-model", data=TEXTS, output="my-model-2of4", **QUICK)
        shutil.copytree("my-model-2of4", "my-model-2of4-fused")
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(value), names, name, None, 0)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)
    assert test.examples


def test_every_name_of_the_page_is_public_and_the_other_way_round():
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    named = {name.partition(".")[0] for row in rows for name in re.findall(r"`(\w[\w.]*)`", row)}
    assert named == set(permtriton.__all__) - {"__version__", "DryRun", "Evaluated", "Event"}
    assert dir(permtriton) == sorted(permtriton.__all__)
    assert permtriton.__version__ == "0.1.0"


# -- the same work as the command's ----------------------------------------------------------------------------------


def test_python_and_the_command_line_write_the_same(here):
    options = ["--recipe", "mask", "--samples", "4", "--sequence-length", "16", "--ignore", "*.down_proj"]
    words = ["compile", "my-model", *options, "--calibration", "my-text.txt", "--eval-data", "my-heldout.txt"]
    result = CliRunner().invoke(app, [*words, "--output", "by-command"])
    assert result.exit_code == 0, result.stderr
    permtriton.compile(
        "my-model", data="my-text.txt", eval_data="my-heldout.txt", output="by-call", ignore="*.down_proj", **QUICK
    )
    first, second = (json.loads((here / name / "permtriton.json").read_text()) for name in ("by-command", "by-call"))
    changing = ("seconds", "memory", "card")  # which names the folder
    assert {k: v for k, v in first.items() if k not in changing} == {
        k: v for k, v in second.items() if k not in changing
    }
    assert first["evaluation"]["text"] == "my-heldout.txt"
    assert (here / "by-command" / "model.safetensors").read_bytes() == (
        here / "by-call" / "model.safetensors"
    ).read_bytes()


# -- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_arguments_of_other_types_are_one_line(here):
    model = AutoModelForCausalLM.from_pretrained("my-model")
    with pytest.raises(CalibrationError, match=r"expected integers \[samples, tokens\]"):
        permtriton.evaluate(model, IDS[0])
    with pytest.raises(CalibrationError, match="window holds 1 token"):
        permtriton.evaluate(model, IDS[:, :1])
    for name, value in (("window", "4"), ("window", 4.0), ("limit", "5"), ("batch_size", "4")):
        with pytest.raises(ConfigError, match=f"`{name}=` is .*expected a whole number"):
            permtriton.evaluate(model, IDS, **{name: value})
    options = {"methods": ["magnitude"], "samples": 4, "sequence_length": 16, "calibration": "my-text.txt"}
    found = permtriton.compare("my-model", eval_data=IDS, sparsity=NMPattern(1, 4), **options)
    assert found["patterns"] == ["1:4"]


def test_a_column_is_named_once_for_both_data(here):
    columns = Dataset.from_dict({"body": TEXTS})
    found = permtriton.compile("my-model", data=columns, eval_data=columns, text_column="body", **QUICK)
    assert "dense" in found.report["evaluation"]
    with pytest.raises(CalibrationError, match="has train, test: give one of them alone"):
        permtriton.compile("my-model", data=IDS, eval_data={"train": columns, "test": columns}, **QUICK)


def test_a_dataset_gives_the_texts_of_its_column(here):
    columns = Dataset.from_dict({"body": TEXTS, "text": ["other"] * len(TEXTS)})
    run = {"data": columns, **QUICK}
    by_list = permtriton.compile("my-model", **{**run, "data": TEXTS}).report["calibration"]["sha256"]
    assert permtriton.compile("my-model", text_column="body", **run).report["calibration"]["sha256"] == by_list


def test_texts_in_memory_give_what_their_file_does(here):
    """Where the model takes shorter sequences than the default's, a step of training reads more of them."""
    shutil.copytree("my-model", "short")
    config, texts = json.loads(Path("short/config.json").read_text()), TEXTS * 40
    Path("short/config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    Path("calibration.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"samples": 4, "distill_steps": 2, "refit_iterations": 1, "refit_metric_tokens": 0}
    by_name, by_list = (
        permtriton.compile("short", data=data, eval_data="none", **options).model.state_dict()
        for data in ("calibration.jsonl", texts)
    )
    assert all(torch.equal(weight, by_list[name]) for name, weight in by_name.items())


@pytest.mark.parametrize("kind", [None, "torch", "numpy"])
@pytest.mark.slow
def test_padding_in_a_dataset_is_not_read(here, kind):
    """As a tokenizer with ``padding="max_length"`` adds it, on either side."""
    rows = [[7 * row + at for at in range(20 + row)] for row in range(8)]
    ids = [[0] * (4 + row % 2) + ids + [0] * (23 - len(ids) - row % 2) for row, ids in enumerate(rows)]
    padded = Dataset.from_dict({"input_ids": ids, "attention_mask": [[int(each > 0) for each in row] for row in ids]})
    expected = permtriton.compile("my-model", data=[[each for each in row if each] for row in rows], **QUICK)
    found = permtriton.compile("my-model", data=padded.with_format(kind), **QUICK)
    assert found.report["calibration"]["sha256"] == expected.report["calibration"]["sha256"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": 3}, "data is 3, a int: expected a name"),
        ({"data": {"input_ids": [[1, 2], [3]]}}, "data cannot be made into tensors: expected sequence of length 2"),
        ({"data": []}, "data is [], a list"),
        ({"data": TEXTS[0] * 90}, "' is neither a file nor one of demo"),
        ({"data": [{"text": "x"}]}, "a list of texts"),
        ({"data": (text for text in TEXTS)}, "a generator"),
        ({"data": IDS, "samples": 9}, "data holds 8 samples, but 9 are needed"),
        ({"data": IDS, "text_column": "text"}, "text_column has an effect on a datasets.Dataset only"),
        ({"data": "my-text.txt", "split": "train"}, "`split=train` has an effect on a dataset on the hub only"),
        ({"data": Dataset.from_dict({"a": ["x"]})}, "the Dataset has the columns ['a'], not text: give text or"),
        ({"data": Dataset.from_dict({"a": ["x"]}), "text_column": "b"}, " has the columns ['a'], not b: give"),
        ({"data": DatasetDict({"a": Dataset.from_dict({"text": ["x"]})})}, "a dictionary of datasets"),
        ({"data": Dataset.from_dict({"text": ["x"]}).to_iterable_dataset()}, "a streamed dataset has no length"),
        ({"data": DataLoader([torch.ones(3).long(), torch.ones(4).long()])}, "of the DataLoader cannot be joined"),
        ({"data": {"input_ids": IDS, "attention_mask": IDS % 2}}, "positions are padding"),
        ({"data": {"words": IDS}}, "words is no argument of LlamaModel"),
        ({"data": IDS, "calibration": "c4"}, "`data=` and `calibration=` are two names"),
        ({"data": TEXTS, "samples": "many"}, "`samples=` is 'many': expected an integer of at least 1"),
        ({"data": TEXTS, "skip_indivisible": "maybe"}, "`skip_indivisible=` is 'maybe': expected true or false"),
        ({"data": TEXTS, "sparsty": "2:4"}, "unknown option 'sparsty': did you mean sparsity?"),
        ({"data": TEXTS, "devise": "cpu"}, "unknown option 'devise': did you mean device"),
        ({"data": TEXTS, "learn_epochs": 3}, "`learn_epochs=` has no effect with `recipe=mask`"),
        ({"data": TEXTS, "restart": True}, "no effect without `output=`"),
        ({"data": TEXTS, "save_format": "packed"}, "`save_format=` has no effect without `output=`"),
        ({"data": TEXTS, "save_format": "zip", "output": "o"}, "format 'zip' is unknown"),
        ({"save_format": "fp8", "output": "o", "recipe": "heuristic,mask", "layout": "fused"}, "at run time"),
        ({"data": TEXTS, "revision": "v2"}, "`revision=v2` has no effect on my-model, which is on this machine"),
        ({"data": TEXTS, "ignore": "*.nothing"}, "`ignore=*.nothing` names no linear of this model"),
        ({"data": TEXTS, "progress": 3}, "progress is 3: expected True, False, or a function"),
        ({"data": TEXTS, "model": 3}, "model is a int: expected a folder"),
        ({"data": TEXTS, "model": zoo.tiny_llama(), "dtype": "float16"}, "no effect on a loaded model"),
        ({"data": TEXTS, "model": zoo.tiny_llama()}, "holds text, but the model has no tokenizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refusals(here, options, words):
    with pytest.raises(permtriton.PermTritonError, match=re.escape(words)) as caught:
        permtriton.compile(**{"model": "my-model", **QUICK, **options})
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, CalibrationError | ConfigError)


# -- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_function_gets_every_step(here):
    events: list[permtriton.Event] = []
    permtriton.compile("my-model", data=TEXTS, progress=events.append, **{**QUICK, "recipe": "heuristic,mask"})
    counted = [event for event in events if event.total]
    assert {"load", "trace", "prove"} <= {event.stage for event in events}
    stages = {event.stage for event in counted}
    assert {"heuristic", "calibrate"} <= stages
    for stage in stages:
        first, *_, last = [event for event in counted if event.stage == stage]
        assert (first.done, last.done) == (0, first.total)
    assert "loading my-model" in [event.text for event in events if not event.stage]


# -- evaluating ------------------------------------------------------------------------------------------------------


def test_a_compiled_model_runs_tasks_alone(here):
    compiled_model = permtriton.compile("my-model", data=TEXTS, **QUICK)
    assert repr(compiled_model).startswith("<CompiledModel: LlamaForCausalLM, 14 linears at 2:4, recipe mask")
    write_task(here / "tasks", "foxes", CHOICE, QUESTIONS)
    found = compiled_model.evaluate("none", tasks=["foxes"], tasks_dir="tasks", limit=2)
    assert (found.perplexity, [task.samples for task in found.tasks]) == (None, [2])
    with pytest.raises(ConfigError, match="with `eval_data=none` there is none: name one"):
        compiled_model.evaluate("none", against="my-model", tasks=["foxes"], tasks_dir="tasks")


@pytest.mark.parametrize("token", ["hf secret", "hf_s\u00e9cret", " ", "hf_\nsecret"])
def test_a_token_that_cannot_be_one_is_not_shown(token, here):
    for call in (
        lambda: permtriton.inspect("my-model", token=token),
        lambda: permtriton.compile("my-model", data=TEXTS, token=token, **QUICK),
        lambda: permtriton.evaluate("my-model", TEXTS, token=token),
    ):
        with pytest.raises(ConfigError, match=r"`token=` is empty, or holds") as caught:
            call()
        assert "cret" not in str(caught.value)
    assert Source("my-model", token="hf_secret\n").token == "hf_secret", "as it is read from a file"


def test_a_model_that_is_divided_between_devices_is_refused():
    """As ``device_map="auto"`` loads a large one."""
    with PretendGpu().here():
        model = zoo.build("llama")
        model.model.layers[0].to("cuda:0")
        with pytest.raises(ModelError, match="is divided between cpu and cuda:0: load it without device_map"):
            permtriton.compile(model, data=zoo.token_ids(4, 12), **QUICK)


@pytest.mark.slow
def test_the_token_is_written_nowhere(here):
    words = ["compile", "my-model", "--recipe", "mask", "--samples", "4", "--sequence-length", "16"]
    words += ["--eval-data", "none", "--calibration", "my-text.txt", "--save-format", "packed", "--token", "secret"]
    said = CliRunner().invoke(app, [*words, "--output", "out"])
    assert said.exit_code == 0, said.output
    assert "secret" not in said.output
    assert not any(b"secret" in path.read_bytes() for path in (here / "out").iterdir())
    record = json.loads((here / "out" / "permtriton.json").read_text())
    assert record["export"]["format"] == "packed"
    assert "--save-format packed" in record["command"]

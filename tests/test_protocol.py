"""`protocol=wanda`: the samples, windows and tasks of the literature, with stand-ins for the hub."""

import random

import datasets
import pytest
import torch

import permtriton
from permtriton.arguments import EvaluateArgs
from permtriton.config import CalibrationConfig
from permtriton.data.calibration import all_windows
from permtriton.data.documents import named_documents
from permtriton.data.held_out import read_held_out
from permtriton.data.tokenize import Encoder
from permtriton.errors import CalibrationError
from permtriton.evaluation.protocol import PROTOCOLS

from . import zoo
from .desk import RUNNER
from .sentences import SENTENCE, trained_tokenizer

LENGTHS = (3, 40, 7, 90, 12, 55)  # sentences of the documents
CHOICES = {"text": ["dog", "fox", "noon", "brown"], "label": list("ABCD")}
DOCUMENTS = {  # one of each of the seven tasks, as the hub has them
    "aps/super_glue": {"passage": SENTENCE, "question": "does the dog sleep", "label": 1},
    "nyu-mll/glue": {"sentence1": SENTENCE, "sentence2": "The dog sleeps.", "label": 0},
    "Rowan/hellaswag": {
        "ctx_a": SENTENCE, "ctx_b": "the dog", "activity_label": "Dogs", "endings": CHOICES["text"], "label": "0",
    },
    "allenai/winogrande": {"sentence": "The fox jumps: _ is lazy.", "option1": "it", "option2": "dog", "answer": "2"},
    "allenai/ai2_arc": {"question": "Which animal is lazy?", "choices": CHOICES, "answerKey": "A"},
    "allenai/openbookqa": {"question_stem": "Until noon sleeps the", "choices": CHOICES, "answerKey": "A"},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer()


@pytest.fixture
def hub(monkeypatch) -> list[dict]:
    """A stand-in for the hub's texts; returns what was asked of it."""
    asked = []

    def load_dataset(**arguments):
        asked.append(arguments)
        if arguments.get("path") in DOCUMENTS:
            rows = datasets.Dataset.from_list([DOCUMENTS[arguments["path"]]] * 3)
            return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))
        return datasets.Dataset.from_dict(
            {"text": [f"{number} " + SENTENCE * size for number, size in enumerate(LENGTHS)]}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def published(texts, tokenizer, count, length, seed):
    """How SparseGPT and Wanda draw their sequences, written from their description."""
    generator, found = random.Random(seed), []
    while len(found) < count:
        ids = tokenizer(texts[generator.randint(0, len(texts) - 1)])["input_ids"]
        if len(ids) > length:
            start = generator.randint(0, len(ids) - length - 1)
            found.append(ids[start : start + length])
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_sequences_are_drawn_within_one_document_as_published(hub, tokenizer, seed):
    config = CalibrationConfig("c4", samples=5, sequence_length=100, one_document=True)
    found = all_windows(config, Encoder(named_documents("c4"), "c4", tokenizer, len(tokenizer)), seed).ids
    texts = datasets.load_dataset()["text"]
    assert found.tolist() == published(texts, tokenizer, 5, 100, seed)
    whole = [tokenizer(text)["input_ids"] for text in texts]
    for row in found.tolist():  # each stands in one document
        assert any(row == ids[at : at + 100] for ids in whole for at in range(len(ids) - 99))
    assert (hub[0]["path"], hub[0]["split"]) == ("allenai/c4", "train")


def test_no_document_is_long_enough(hub, tokenizer):
    config = CalibrationConfig("c4", samples=5, sequence_length=10**5, one_document=True)
    with pytest.raises(CalibrationError, match=r"no document with more than 100,000 tokens.*`sequence_length=`"):
        all_windows(config, Encoder(named_documents("c4"), "c4", tokenizer, len(tokenizer)), 0)


def test_one_word_sets_all():
    def measured_by(name, eval_data=None, window=None, tasks=None, model=""):
        args = EvaluateArgs(protocol=name, eval_data=eval_data, window=window, tasks=tasks).with_protocol(model)
        return args.eval_data, args.window, args.tasks

    config = permtriton.config_from({**PROTOCOLS["wanda"].options})
    chosen = config.calibration
    assert (chosen.calibration, chosen.samples, chosen.sequence_length, chosen.one_document) == ("c4", 128, 2048, True)
    text, window, tasks = measured_by("wanda")
    assert (text, window) == ("wikitext2", 2048)
    assert tasks == ("boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa")
    assert measured_by("wanda", "c4", 4096, "none") == ("c4", 4096, "none")
    assert measured_by(None) == (None, None, None)
    assert measured_by("permllm")[2] == ("hellaswag", "arc_easy", "arc_challenge", "openbookqa", "rte")
    assert measured_by("permllm", model="demo") == ("demo", None, None), "it has its own text"
    with pytest.raises(permtriton.PermTritonError, match="protocol 'papers' is unknown: choose wanda or permllm"):
        permtriton.compile("demo", protocol="papers")


def test_windows_have_the_length_that_was_asked_for(hub, tokenizer):
    model = zoo.tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=4096)
    texts = [SENTENCE * 600]
    tokens = len(tokenizer(texts[0])["input_ids"]) + 1  # with the end token
    for window in (100, 2048, 4096):
        found, _ = read_held_out("model", texts, tokenizer, model, window)
        assert found.ids.shape == (tokens // window, window)
    assert read_held_out("model", texts, tokenizer, model)[0].tokens == 2048
    short = zoo.tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=64)
    assert read_held_out("model", texts, tokenizer, short)[0].tokens == 64
    first, _ = read_held_out("model", texts, tokenizer, model, 100, 3)
    assert torch.equal(first.ids, read_held_out("model", texts, tokenizer, model, 100)[0][:3].ids)
    with pytest.raises(permtriton.PermTritonError, match="`eval_windows=` is 0: expected a number of windows"):
        read_held_out("model", texts, tokenizer, model, 100, 0)
    for window, words in ((4097, "at most the 4,096"), (1, "at least 2")):
        with pytest.raises(permtriton.PermTritonError, match=words):
            read_held_out("model", texts, tokenizer, model, window)
    with pytest.raises(permtriton.PermTritonError, match="`window=64` has no effect on Tensor in memory"):
        read_held_out("model", torch.ones(2, 8, dtype=torch.int64), tokenizer, model, 64)


@pytest.mark.slow
def test_the_seven_tasks_run(here, hub):
    found = permtriton.evaluate("model", "none", protocol="wanda")
    assert [task.name for task in found.tasks] == list(PROTOCOLS["wanda"].tasks)
    assert all(0 <= task.scores["acc"].value <= 1 for task in found.tasks)
    assert {each["path"] for each in hub} == set(DOCUMENTS)


@pytest.fixture
def here(tmp_path, monkeypatch, tokenizer, hub):
    model = zoo.tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=2048)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SMALL = ("--samples", "2", "--sequence-length", "64")


@pytest.mark.slow
def test_all_three_commands_take_it(here, hub):
    """With fewer and shorter samples, and without the tasks."""
    from permtriton.cli.main import app

    words = (
        ["compile", "model", "--protocol", "wanda", *SMALL, "--recipe", "mask", "--output", "out"],
        ["evaluate", "out", "--protocol", "wanda", "--tasks", "none", "--json"],
        ["compare", "model", "--protocol", "wanda", "--tasks", "none", *SMALL, "--methods", "wanda", "--window", "512"],
    )
    results = [RUNNER.invoke(app, each) for each in words]
    assert [each.exit_code for each in results] == [0, 0, 0], [each.stderr for each in results]
    assert "--one-document" in (here / "out" / "permtriton.json").read_text()
    assert '"window": 2048' in results[1].stdout
    assert "windows of 512" in " ".join(results[2].stdout.split())
    assert {(each["path"], each["split"]) for each in hub} == {("allenai/c4", "train"), ("Salesforce/wikitext", "test")}
    short = RUNNER.invoke(app, ["evaluate", "out", "--window", "4096"])
    assert (short.exit_code, "at most the 2,048" in short.stderr) == (2, True)

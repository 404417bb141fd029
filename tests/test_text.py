"""Calibration and held-out text as token ids, and the statistics of a dense model's activations."""

import json
from dataclasses import replace

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from permtriton import config_from
from permtriton.config import SURPLUS, CalibrationConfig
from permtriton.data.calibration import all_windows, calibration_samples, fitted
from permtriton.data.documents import named_documents
from permtriton.data.held_out import held_out_windows, read_held_out
from permtriton.data.samples import Samples
from permtriton.data.tokenize import Encoder
from permtriton.errors import CalibrationError, ConfigError
from permtriton.methods.measure.statistics import channel_norms, hessians
from permtriton.running.layer_walk import LayerWalk, from_model
from permtriton.util.progress import EventProgress, NoProgress
from permtriton.util.sparsity import NMPattern

from . import zoo
from .sentences import SENTENCE, VOCABULARY, trained_tokenizer
from .zoo import find_plan


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return trained_tokenizer()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return zoo.tiny_llama(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, max_position_embeddings=64)


@pytest.fixture(scope="module")
def plan(model):
    return find_plan(model, NMPattern(2, 4))


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def config(source, samples=4, sequence_length=16) -> CalibrationConfig:
    return CalibrationConfig(str(source), samples, sequence_length)


def calibration_ids(source: CalibrationConfig, tokenizer, vocabulary: int, seed: int, *surplus: int) -> torch.Tensor:
    """All sequences that are drawn with a surplus, else as many as the config says."""
    documents = named_documents(source.calibration, column=source.text_column, split=source.split)
    encoder = Encoder(documents, source.calibration, tokenizer, vocabulary)
    return all_windows(source, encoder, seed, *surplus).ids[: None if surplus else source.samples]


def held_out_ids(source: str, tokenizer, vocabulary: int, length: int) -> torch.Tensor:
    encoder = Encoder(named_documents(source, held_out=True), source, tokenizer, vocabulary)
    return held_out_windows(encoder, length).ids


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def counting_file(path, tokens: int):
    """A file whose token ids count upwards, so that a window shows where it came from."""
    path.write_text(json.dumps({"input_ids": list(range(tokens))}) + "\n", encoding="utf-8")
    return path


# -- drawing -------------------------------------------------------------------------------------------------------


def test_windows_do_not_overlap_and_hold_consecutive_tokens(tmp_path):
    ids = calibration_ids(config(counting_file(tmp_path / "a.jsonl", 250), 12, 20), None, 1000, seed=3)
    assert (ids.shape, ids.dtype) == ((12, 20), torch.int64)
    assert torch.equal(ids.diff(dim=1), torch.ones(12, 19, dtype=torch.int64))
    assert ids.unique().numel() == ids.numel()


def test_the_draw_depends_on_the_seed_alone(tmp_path):
    source = config(counting_file(tmp_path / "a.jsonl", 400))
    draws = [calibration_ids(source, None, 1000, seed) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(("further", "expected"), [(0, 16), (3, 16), (9, 40), (63, 49)])
def test_more_of_a_text_is_drawn_for_steps_that_read_it(tmp_path, further, expected):
    """What is drawn without them stays first, whatever they ask for."""
    path = tmp_path / "many.jsonl"
    rows = torch.arange(800).view(40, 20).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows), encoding="utf-8")
    wanted = config_from({"distill_further": further}, "mask,distill").surplus
    first, drawn = (calibration_ids(config(path), None, 1000, 0, ratio) for ratio in (SURPLUS, wanted))
    assert torch.equal(drawn[: len(first)], first)
    assert drawn.unique().numel() == drawn.numel()
    assert len(drawn) - expected in (0, 1), "as many as are asked for, and what a document has beside them"


def test_documents_end_with_the_end_token(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one fox"}\n\n{"text": "two dogs"}\n', encoding="utf-8")
    ids = held_out_ids(str(path), tokenizer, VOCABULARY, 1000).flatten().tolist()
    end = tokenizer.eos_token_id
    assert ids == [*tokenizer("one fox")["input_ids"], end, *tokenizer("two dogs")["input_ids"], end]


def test_held_out_windows_are_consecutive_and_a_short_text_is_one_window(tmp_path):
    path = counting_file(tmp_path / "a.jsonl", 50)
    assert held_out_ids(str(path), None, 1000, 16).tolist() == torch.arange(48).view(3, 16).tolist()
    assert held_out_ids(str(path), None, 1000, 64).tolist() == [list(range(50))]


KINDS = ("txt", "jsonl", "ids.jsonl", "padded.jsonl", "parquet", "ids.parquet", "padded.parquet")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_tokens(tmp_path, tokenizer, kind):
    path = tmp_path / f"a.{kind}"
    tokens = [*tokenizer(SENTENCE)["input_ids"], tokenizer.eos_token_id]
    padded = {"input_ids": [0, *tokens, 0, 0], "attention_mask": [0, *[1] * len(tokens), 0, 0]}
    match kind:
        case "txt":
            path.write_text(SENTENCE, encoding="utf-8")
        case "jsonl":
            path.write_text(json.dumps({"text": SENTENCE}), encoding="utf-8")
        case "ids.jsonl":
            path.write_text(json.dumps({"input_ids": tokens, "text": "not this"}), encoding="utf-8")
        case "parquet":
            write_parquet(path, text=[SENTENCE], other=[1])
        case "ids.parquet":
            write_parquet(path, input_ids=[tokens])
        case "padded.jsonl":
            path.write_text(json.dumps(padded), encoding="utf-8")
        case "padded.parquet":
            write_parquet(path, **{name: [values] for name, values in padded.items()})
    assert held_out_ids(str(path), tokenizer, VOCABULARY, 1000).tolist() == [tokens]


@pytest.mark.parametrize("rows", [[{"text": "one"}, {"text": "two"}], ["one", "two"]])
def test_an_array_of_texts(tmp_path, tokenizer, rows):
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    ids = held_out_ids(str(tmp_path / "a.json"), tokenizer, VOCABULARY, 1000).flatten()
    assert tokenizer.decode(ids) == "one<end>two<end>"


@pytest.mark.parametrize("kind", ["messages", "conversations"])
def test_conversations_are_written_by_the_chat_template(tmp_path, kind):
    tokenizer = trained_tokenizer()
    names = ("role", "content", "user") if kind == "messages" else ("from", "value", "human")
    row = {kind: [{names[0]: names[2], names[1]: "one"}], "id": "a"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(CalibrationError, match="document 1 is a conversation, but the model's tokenizer has no chat"):
        held_out_ids(str(tmp_path / "a.jsonl"), tokenizer, VOCABULARY, 1000)
    (tmp_path / "b.jsonl").write_text(json.dumps({kind: [{names[0]: names[2]}]}))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    ids = held_out_ids(str(tmp_path / "a.jsonl"), tokenizer, VOCABULARY, 1000).flatten()
    assert tokenizer.decode(ids) == "user: one"
    if kind == "conversations":
        with pytest.raises(CalibrationError, match="document 1: the chat template cannot write it: KeyError 'value'"):
            held_out_ids(str(tmp_path / "b.jsonl"), tokenizer, VOCABULARY, 1000)


# -- sources that cannot be used -----------------------------------------------------------------------------------

BAD_FILES = {
    "empty text": ("a.txt", "", ["is empty"]),
    "white text": ("a.txt", " \n\t\n", ["is empty"]),
    "not utf-8": ("a.txt", b"caf\xe9 au lait", ["cannot be read: 'utf-8' codec", "position 3"]),
    "no rows": ("a.jsonl", "\n\n", ["is empty"]),
    "empty rows": ("a.jsonl", '{"input_ids": []}\n{"input_ids": []}\n', ["is empty"]),
    "broken row": ("a.jsonl", '{"text": "a"}\n{"text": \n', ["line 2", "not JSON"]),
    "row is a list": ("a.jsonl", "[1, 2]\n", ["line 1 is [1, 2]", "a text or input_ids"]),
    "text is a number": ("a.jsonl", '{"text": 5}\n', ["document 1 is 5: text must be a string"]),
    "ids are fractions": ("a.jsonl", '{"input_ids": [1.5]}\n', ["document 1 is [1.5]", "integers"]),
    "ids are booleans": ("a.jsonl", '{"input_ids": [true]}\n', ["document 1 is [True]", "integers"]),
    "a shorter mask": ("a.jsonl", '{"input_ids": [1, 2], "attention_mask": [1]}\n', ["document 1", "attention_mask"]),
    "a text is missing": ("a.jsonl", '{"text": "a"}\n\n{"title": "b"}\n', ["row 2 has no text (1 of 2"]),
    "of two columns": ("a.jsonl", '{"text": "a"}\n\n{"input_ids": [1]}\n', ["row 1 has no input_ids (1 of 2"]),
    "messages as text": ("a.jsonl", '{"messages": "[]"}\n', ["document 1 is '[]'", "role and content"]),
    "id too large": ("a.jsonl", f'{{"input_ids": [1, {VOCABULARY}]}}', [f"to {VOCABULARY}", f"0 to {VOCABULARY - 1}"]),
    "id negative": ("a.jsonl", '{"input_ids": [1, -2]}\n', ["from -2", "vocabulary"]),
    "id enormous": ("a.jsonl", f'{{"input_ids": [{10**30}]}}\n', ["vocabulary"]),
    "another suffix": ("a.md", "text", [".md", ".jsonl"]),
    "no suffix": ("a", "text", ["missing", ".jsonl"]),
    "not parquet": ("a.parquet", "text", ["parquet"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(tmp_path, tokenizer, case):
    name, content, words = BAD_FILES[case]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    check_refused(path, tokenizer, words)


def check_refused(path, tokenizer, words):
    with pytest.raises(CalibrationError) as caught:
        calibration_ids(config(path), tokenizer, VOCABULARY, 0)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in [str(path), *words] if word not in message] == []


def test_missing_file_and_unknown_name_list_the_choices(tmp_path):
    for source in (tmp_path / "nothing.txt", tmp_path, "c5"):
        with pytest.raises(CalibrationError, match="neither a file nor one of demo, c4, wikitext2, pile"):
            calibration_ids(config(source), None, VOCABULARY, 0)


def test_text_without_a_tokenizer(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(SENTENCE, encoding="utf-8")
    with pytest.raises(CalibrationError, match=r"no tokenizer: give a \.jsonl with input_ids"):
        calibration_ids(config(path), None, VOCABULARY, 0)


@pytest.mark.parametrize(("split", "wanted"), [("", "train"), ("validation[:50]", "validation[:50]")])
def test_any_dataset_of_the_hub_with_its_split_and_column(monkeypatch, tokenizer, split, wanted):
    requests = []

    def load_dataset(**arguments):
        requests.append(arguments)
        return datasets.Dataset.from_dict({"body": [SENTENCE] * 40, "url": ["x"] * 40})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    asked = replace(config("someone/texts"), text_column="body", split=split)
    assert calibration_ids(asked, tokenizer, VOCABULARY, 0).shape == (4, 16)
    assert requests == [{"path": "someone/texts", "split": wanted}]
    with pytest.raises(CalibrationError, match=r"has the columns \['body', 'url'\], not text: .* `text_column=` may"):
        calibration_ids(replace(asked, text_column=""), tokenizer, VOCABULARY, 0)
    with pytest.raises(CalibrationError, match=r"has the columns \['body', 'url'\], not title: give text"):
        calibration_ids(replace(asked, text_column="title"), tokenizer, VOCABULARY, 0)


def test_padding_in_a_dataset_of_the_hub_is_not_read(monkeypatch):
    padded = {"input_ids": [[7, 8, 9, 0, 0]] * 4, "attention_mask": [[1, 1, 1, 0, 0]] * 4}
    monkeypatch.setattr(datasets, "load_dataset", lambda **_: datasets.Dataset.from_dict(padded))
    assert held_out_ids("someone/ids", None, 10, 12).tolist() == [[7, 8, 9] * 4]


def test_the_column_of_a_file(tmp_path, tokenizer):
    lines, table = tmp_path / "a.jsonl", write_parquet(tmp_path / "a.parquet", body=[SENTENCE] * 40, text=["x"] * 40)
    lines.write_text("\n".join([json.dumps({"text": "x", "body": SENTENCE})] * 40), encoding="utf-8")
    found = [calibration_ids(replace(config(each), text_column="body"), tokenizer, VOCABULARY, 0)
             for each in (lines, table)]  # fmt: skip
    assert found[0].shape == (4, 16)
    assert torch.equal(*found)
    with pytest.raises(CalibrationError, match=r"a.jsonl has the columns \['text', 'body'\], not title: give text"):
        calibration_ids(replace(config(lines), text_column="title"), tokenizer, VOCABULARY, 0)
    with pytest.raises(
        ConfigError, match=r"`split=train` has an effect on a dataset on the hub only, not on .*a\.jsonl"
    ):
        calibration_ids(replace(config(lines), split="train"), tokenizer, VOCABULARY, 0)
    with pytest.raises(ConfigError, match="`text_column=body` has no effect on demo"):
        calibration_ids(replace(config("demo"), text_column="body"), tokenizer, VOCABULARY, 0)


def test_the_lines_of_wikitext2_are_one_text(monkeypatch, tokenizer):
    lines = ["", " = Title = \n", "", SENTENCE]
    dataset = datasets.Dataset.from_dict({"text": lines})
    monkeypatch.setattr(datasets, "load_dataset", lambda **_: dataset)
    expected = [*tokenizer("\n\n".join(lines))["input_ids"], tokenizer.eos_token_id]
    found = held_out_ids("wikitext2", tokenizer, VOCABULARY, 4).flatten().tolist()
    assert len(found) > 4
    assert found == expected[: len(found)]


def test_c4_is_evaluated_as_published(monkeypatch, tokenizer):
    """1,100 documents of the first validation file, joined by spaces, and of these at most 256 windows."""
    requests = []

    def load_dataset(**arguments):
        requests.append(arguments)
        return datasets.Dataset.from_dict({"text": [SENTENCE.strip()] * 100})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    windows = held_out_ids("c4", tokenizer, VOCABULARY, 4)
    assert windows.shape == (256, 4)
    assert windows.flatten().tolist() == tokenizer(" ".join([SENTENCE.strip()] * 100))["input_ids"][: 256 * 4]
    assert requests == [
        {
            "path": "allenai/c4",
            "data_files": {"validation": "en/c4-validation.00000-of-00008.json.gz"},
            "split": "validation[:1100]",
        }
    ]


@pytest.mark.parametrize("error", [ConnectionError("no route\nsecond line"), RuntimeError(), FileNotFoundError("gone")])
def test_hub_failures_are_one_line_with_advice(monkeypatch, error):
    def load_dataset(**_arguments):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(CalibrationError, match=r"c4 .*cannot be fetched.*give a local file") as caught:
        calibration_ids(config("c4"), None, VOCABULARY, 0)
    assert "\n" not in str(caught.value)


# -- statistics ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (5, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_name_the_site(model, plan, ids, value):
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    try:
        weight.data[3] = value
        for statistics in (
            lambda: channel_norms(LayerWalk(model, plan, Samples.of(ids), 4), NoProgress()),
            lambda: hessians(model, from_model(model, plan.sites, Samples.of(ids), 4), lambda steps=1, note="": None),
        ):
            with pytest.raises(CalibrationError, match=r"layers\.0\.mlp\.down_proj: 1 of 48 input channels .*float32"):
                statistics()
    finally:
        weight.data.copy_(before)


def test_labels_are_left_out_where_a_model_reads_no_pairs(tmp_path, model):
    """Rows for training a decoder, whose labels are its inputs, would give every sequence the same text twice."""
    rows = [[(5 * row + column) % 60 for column in range(20)] for row in range(30)]
    plain, labelled = tmp_path / "plain.jsonl", tmp_path / "labelled.jsonl"
    plain.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    labelled.write_text("".join(json.dumps({"input_ids": row, "labels": [-100, *row[1:]]}) + "\n" for row in rows))
    drawn, held_out = zip(
        *(
            (
                calibration_samples(
                    config_from({"calibration": str(path), "samples": 4, "sequence_length": 16}), None, model
                )[0].ids,
                read_held_out("", str(path), None, model, 16)[0].ids,
            )
            for path in (plain, labelled)
        ),
        strict=True,
    )
    assert drawn[0].shape == (4, 16)
    assert torch.equal(*drawn)
    assert torch.equal(*held_out)


def test_a_default_length_follows_the_model_and_one_that_was_asked_for_does_not(model):
    said = []
    default = fitted(CalibrationConfig(), {}, model, EventProgress(lambda event: said.append(event.text)))
    assert default.sequence_length == 64
    assert said == ["sequence length: 64, not 1024: the model has no more positions"]
    asked = CalibrationConfig(sequence_length=100)
    assert fitted(asked, {"sequence_length": 100}, model, NoProgress()) is asked
    short = CalibrationConfig(sequence_length=32)
    assert fitted(short, {}, model, NoProgress()) is short

"""The model card: valid front matter, the result, how to load it, and never over somebody else's README.md."""

import re
from pathlib import Path

import pytest
import torch
import transformers
import yaml

import permtriton
from permtriton.checkpoint.card import ALONE, PROJECT, WITH_PERMTRITON, model_card
from permtriton.checkpoint.export import export
from permtriton.driver.pipeline import compile_model
from permtriton.util.extras import WHERE, install_command

from . import zoo
from .folders import record

REPORT = record(
    pruned_weights={"a": 1},
    model="org/model-7b",
    command="permtriton compile org/model-7b --recipe heuristic,mask",
    config={**record()["config"], "calibration": "/home/me/text.txt"},
    calibration={"sha256": "0", "shape": [8, 256]},
    evaluation={"measure": "perplexity", "dense": 5.472, "compiled": 6.75, "text": "wikitext2"},
    proof={**record()["proof"], "fold_difference": 1e-6},
)


@pytest.fixture(scope="module")
def compiled() -> dict[str, permtriton.CompiledModel]:
    configs = {layout: permtriton.config_from({"layout": layout}, "heuristic,mask") for layout in ("portable", "fused")}
    ids = zoo.tiny_ids(4, 16)
    return {name: compile_model(zoo.tiny_llama(), None, config, ids=ids) for name, config in configs.items()}


@pytest.fixture(scope="module")
def folders(compiled, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("card")
    return {layout: model.save_pretrained(root / layout) for layout, model in compiled.items()}


def front(text: str) -> dict:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)[1])


def test_front_matter():
    found = front(model_card(REPORT, "LlamaForCausalLM", ALONE, "out"))
    [index] = found.pop("model-index")
    assert index["name"] == "org/model-7b 2:4"
    assert index["results"] == [
        {"task": {"type": "text-generation"}, "dataset": {"name": "wikitext2", "type": "wikitext2"},
         "metrics": [{"type": "perplexity", "value": 6.75}]}
    ]  # fmt: skip
    assert found == {
        "library_name": "transformers",
        "base_model": "org/model-7b",
        "base_model_relation": "quantized",
        "pipeline_tag": "text-generation",
        "tags": ["permtriton", "sparse", "2:4"],
    }
    assert "base_model" not in front(
        model_card({**REPORT, "model": "/home/me/model"}, "LlamaForCausalLM", ALONE, "out")
    )
    assert "pipeline_tag" not in front(model_card(REPORT, "BertModel", ALONE, "out"))


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("LlamaForCausalLM", "text-generation"),
        ("T5ForConditionalGeneration", "text-generation"),
        ("BartForConditionalGeneration", "text-generation"),
        ("BertForMaskedLM", "fill-mask"),
        ("BertForSequenceClassification", "text-classification"),
        ("BertForTokenClassification", "token-classification"),
        ("BertForQuestionAnswering", "question-answering"),
        ("LlavaForConditionalGeneration", "image-text-to-text"),
        ("Gemma3ForConditionalGeneration", "image-text-to-text"),
        ("ViTForImageClassification", "image-classification"),
        ("WhisperForConditionalGeneration", "automatic-speech-recognition"),
        ("WhisperForAudioClassification", "audio-classification"),
        ("Wav2Vec2ForCTC", "automatic-speech-recognition"),
        ("BertForMultipleChoice", None),
        ("BertModel", None),
    ],
)
def test_a_card_loads_the_class_that_was_saved(architecture, task):
    card, saved = model_card(REPORT, architecture, ALONE, "out"), getattr(transformers, architecture)
    loader = getattr(transformers, re.search(r"\nmodel = (\w+)\.from_pretrained", card)[1])
    with torch.device("meta"):
        assert loader is saved or type(loader.from_config(saved.config_class())) is saved
    assert front(card).get("pipeline_tag") == task


def test_content():
    text = model_card(REPORT, "LlamaForCausalLM", ALONE, "out")
    for line in (
        "| held-out text | `wikitext2` |",
        "| perplexity, dense model | `5.472` |",
        "| perplexity, this model | `6.750` |",
        "| calibration | `text.txt, 8 x 256 tokens` |",
        'model = AutoModelForCausalLM.from_pretrained("out")',
        f"Made with {PROJECT} (`{install_command()}`{WHERE}), which",
        REPORT["command"],
    ):
        assert line in text
    assert "/home/me" not in text
    wrote = model_card({**REPORT, "generated": {"sha256": "0", "shape": [32, 256]}}, "LlamaForCausalLM", ALONE, "out")
    assert "| text that the dense model wrote | `32 x 256 tokens` |" in wrote
    assert "import permtriton" not in text
    assert "import permtriton\nfrom transformers import AutoModel\n" in model_card(REPORT, "X", WITH_PERMTRITON, "out")


def test_names_are_no_markup():
    text = model_card({**REPORT, "model": "/x/<script>a|b`\n# c"}, "", ALONE, "out")
    assert "# `<script>a?b??# c`, pruned to 2:4" in text


def test_saving_and_exporting_write_cards_that_load_what_they_say(folders, tmp_path):
    needs = {}
    for name, folder in folders.items():
        for format in ("packed", "dense"):
            export(folder, tmp_path / f"{name}-{format}", format)
            needs[name, format] = "\nimport permtriton\n" in (tmp_path / f"{name}-{format}" / "README.md").read_text()
        needs[name] = "\nimport permtriton\n" in (folder / "README.md").read_text()
    assert needs == {
        "portable": False, ("portable", "packed"): True, ("portable", "dense"): False,
        "fused": True, ("fused", "packed"): True, ("fused", "dense"): True,
    }  # fmt: skip
    card = tmp_path / "portable-packed" / "README.md"
    assert "of dense" in card.read_text()
    card.write_text("mine")
    export(card.parent, tmp_path / "again", "dense")
    assert (tmp_path / "again" / "README.md").read_text() == "mine"


@pytest.mark.slow
def test_a_card_says_from_any_folder_what_the_model_was(tmp_path, monkeypatch):
    """It was a folder where the model was compiled; from elsewhere, its path might be a name on the hub."""
    monkeypatch.chdir(tmp_path)
    zoo.tiny_llama().save_pretrained("models/tiny")
    permtriton.compile("models/tiny", recipe="mask", data=zoo.tiny_ids(4, 16), output="out")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    export(tmp_path / "out", Path("packed"))
    text = Path("packed", "README.md").read_text()
    assert "base_model" not in front(text)
    assert "# `tiny`, pruned to 2:4" in text

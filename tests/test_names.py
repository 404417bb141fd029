"""Models whose tensors transformers renames on saving: what permtriton.json lists is what is on disk, and it loads."""

import json
from collections.abc import Callable

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedModel, conversion_mapping
from transformers.core_model_loading import WeightRenaming

import permtriton
from permtriton import NMPattern, config_from
from permtriton.checkpoint import packed, quantizer
from permtriton.checkpoint.export import export
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ModelError
from permtriton.model.modules import is_packed
from permtriton.model.nm_checks import check_weight

from . import off_path, zoo
from .folders import WEIGHTS
from .world import nothing_runs

QUICK = {"recipe": "heuristic,mask", "importance": "magnitude"}
IDS = zoo.token_ids(4, 16).clamp(max=80)  # beyond are tokens that stand for images
GROUPED = {**zoo.SIZES, "num_key_value_heads": zoo.KEY_VALUE_HEADS}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
VISION = {"depth": 1, "embed_dim": 32, "hidden_size": zoo.HIDDEN, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8}
SPECIAL = {"image_token_id": 88, "video_token_id": 87, "vision_start_token_id": 86, "vision_end_token_id": 85}
STATE_SPACE = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}


def _of(family: str, head: str, **options: object) -> PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(**options)
    return getattr(transformers, f"{family}{head}")._from_config(config)


RENAMED: dict[str, Callable[[], PreTrainedModel]] = {
    "llava": off_path.MODELS["llava"],
    "gemma3": off_path.MODELS["gemma3"],
    "qwen2_vl": lambda: _of(
        "Qwen2VL", "ForConditionalGeneration",
        text_config={**GROUPED, "rope_parameters": ROPE}, vision_config=VISION, **SPECIAL,
    ),
    "nemotron_h": lambda: _of(
        "NemotronH", "ForCausalLM", **GROUPED, **STATE_SPACE, head_dim=zoo.WIDE_HEAD_DIM, hybrid_override_pattern="M*-",
    ),
    "lfm3": lambda: _of("Lfm3", "ForCausalLM", **{**GROUPED, "num_hidden_layers": 1}),
    "nomic_bert": lambda: _of("NomicBert", "ForMaskedLM", **zoo.SIZES),
    "gte": lambda: _of("Gte", "ForMaskedLM", **zoo.SIZES),
    "jina_v3": lambda: _of("JinaEmbeddingsV3", "ForMaskedLM", **zoo.SIZES),
}  # fmt: skip
# How the name of a pruned weight begins on disk: as published, or, where transformers joins tensors, as in the model.
STORED = {
    "llava": "language_model.model.layers.0.",
    "gemma3": "language_model.model.layers.0.",
    "qwen2_vl": "model.layers.0.",
    "nemotron_h": "backbone.layers.0.",
    "lfm3": "model.layers.0.",
    "nomic_bert": "nomic_bert.layers.0.",
    "gte": "gte.layers.0.",
    "jina_v3": "roberta.layers.0.",
}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = RENAMED[name]()
    zoo.randomize(model)
    return model.eval()


def compiled(model: PreTrainedModel, layout: str = "portable") -> permtriton.CompiledModel:
    return compile_model(model, None, config_from({**QUICK, "layout": layout}), ids=IDS)


def outputs(folder, like: PreTrainedModel) -> list[torch.Tensor]:
    return zoo.outputs(type(like).from_pretrained(folder, dtype=like.dtype).eval(), IDS)


@pytest.mark.parametrize(("name", "layout"), [*((name, "portable") for name in RENAMED), ("nomic_bert", "fused")])
@pytest.mark.slow
def test_renamed_models_are_saved_exported_and_loaded(name, layout, tmp_path):
    result = compiled(build(name), layout)
    result.save_pretrained(tmp_path / "out")
    report = json.loads((tmp_path / "out" / "permtriton.json").read_text())
    assert report["verification"]["reloaded"] == "same outputs"
    pruned, tensors = report["pruned_weights"], load_file(tmp_path / "out" / WEIGHTS)
    assert len(pruned) == report["verification"]["pruned_weights"] == len(list(result.plan.linears()))
    assert layout == "fused" or any(stored.startswith(STORED[name]) for stored in pruned)
    assert layout == "portable" or pruned.keys() <= result.model.state_dict().keys()
    for stored, dim in pruned.items():
        weight = tensors[stored].view(tensors[stored].shape[-2:])  # fused: a gathered weight has one dimension more
        check_weight(stored, weight.movedim(dim, -1), NMPattern(2, 4))
    expected = zoo.outputs(result.model, IDS)
    export(tmp_path / "out", tmp_path / "packed")
    assert zoo.difference(expected, outputs(tmp_path / "packed", result.model)) == 0
    export(tmp_path / "packed", tmp_path / "dense", "dense")
    dense = load_file(tmp_path / "dense" / WEIGHTS)
    assert tensors.keys() == dense.keys()
    assert all(torch.equal(tensors[key], dense[key]) for key in tensors)


@pytest.mark.slow
def test_a_model_that_was_loaded_under_published_names_is_saved_under_them(tmp_path):
    model = build("llava")
    model.save_pretrained(tmp_path / "dense")
    loaded = type(model).from_pretrained(tmp_path / "dense").eval()
    compiled(loaded).save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out" / WEIGHTS).keys() == load_file(tmp_path / "dense" / WEIGHTS).keys()


@pytest.mark.slow
def test_what_stays_packed_on_a_gpu_is_saved_under_published_names_and_loads(tmp_path, monkeypatch):
    compiled(build("llava").bfloat16()).save_pretrained(tmp_path / "out")
    export(tmp_path / "out", tmp_path / "packed")
    monkeypatch.setattr(quantizer, "device_of", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(packed, "has_kernels", lambda device: device.type == "cuda")
    loaded = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "packed").eval()
    assert any(is_packed(module) for module in loaded.modules())
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / WEIGHTS).keys() == load_file(tmp_path / "packed" / WEIGHTS).keys()
    assert zoo.difference(zoo.outputs(loaded, IDS), outputs(tmp_path / "again", loaded)) == 0


@pytest.mark.slow
def test_names_that_would_be_loaded_into_other_weights_are_refused_before_any_work(monkeypatch):
    def mapping(*_, **__):
        return [WeightRenaming("q_proj", "k_proj")]

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", mapping)
    nothing_runs(monkeypatch)
    with pytest.raises(
        ModelError,
        match=r"reads .*layers\.0-1\..*q_proj.* as .*layers\.0-1\..*k_proj.*LlamaForCausalLM cannot be saved",
    ):
        compiled(zoo.build("llama"))

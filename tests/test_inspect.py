"""``permtriton inspect``: its JSON, tables and graphs, and what it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import fx
from transformers import BertConfig, LlamaConfig, MixtralConfig, Olmo2Config, PreTrainedConfig, PreTrainedModel

from permtriton.cli import console
from permtriton.cli.main import app
from permtriton.methods import planning
from permtriton.methods.recipe_config import CompileConfig
from permtriton.passes.plan import Plan

from . import zoo
from .desk import RUNNER, check_refusal

SIZES = {**zoo.SIZES, "num_key_value_heads": zoo.KEY_VALUE_HEADS}
CONFIGS: dict[str, tuple[type[PreTrainedConfig], str, dict[str, object]]] = {
    "llama": (LlamaConfig, "LlamaForCausalLM", SIZES),
    "olmo2": (Olmo2Config, "Olmo2ForCausalLM", SIZES),
    "bert": (BertConfig, "BertModel", zoo.SIZES),
    "mixtral": (MixtralConfig, "MixtralForCausalLM", {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "deep": (LlamaConfig, "LlamaForCausalLM", {**SIZES, "num_hidden_layers": 12}),
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> Path:
    """Folders with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("configs")
    for name, (config, architecture, sizes) in CONFIGS.items():
        config(**sizes, architectures=[architecture]).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _traced_once():
    """Caches traces, since most commands here inspect the same few models."""
    plan_model, known = planning.plan_model, {}

    def remembered(model: PreTrainedModel, config: CompileConfig) -> tuple[Plan, fx.GraphModule]:
        key = model.config.architectures[0], model.config.num_hidden_layers, config
        if key not in known:
            known[key] = plan_model(model, config)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "plan_model", remembered)
        yield


@pytest.fixture
def model(configs, monkeypatch) -> Path:
    monkeypatch.setattr(console.out, "width", 160)
    return configs / "llama"


def invoke(*arguments: object) -> str:
    result = RUNNER.invoke(app, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    """Runs a command that must fail with one line, exit code 2 and no output; returns the line."""
    result = RUNNER.invoke(app, ["inspect", *map(str, arguments)])
    assert isinstance(result.exception, SystemExit), f"a traceback: {result.exception!r}"
    check_refusal(result.exit_code, result.stderr, ())
    assert result.stdout == ""
    return result.stderr.splitlines()[-1]


def joined(text: str) -> str:
    """A table's text without its frame: wrapped cells are joined again, one line per row."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("│"):
            cells = [cell.strip() for cell in line.strip("│").split("│")]
            if rows and not cells[1] and not cells[2]:
                rows[-1] = [a + b for a, b in zip(rows[-1], cells, strict=True)]
            else:
                rows.append(cells)
    return "\n".join(" | ".join(row) for row in rows)


# -- tables and JSON ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_sites_say_what_runs(model):
    text = joined(invoke(model, "--layout", "fused"))
    order = "its own | in the norm model.layers.*.input_layernorm"
    assert f"self_attn.q_proj+k_proj+v_proj  (2x) | 3 | 64 | 2:4 | {order}" in text
    assert "self_attn.o_proj  (2x) | 1 | 64 | 2:4 | its own | nothing" in text
    free = joined(invoke(model, "--layout", "fused", "--o-proj", "free"))
    assert "self_attn.o_proj  (2x) | 1 | 64 | 2:4 | its own | a gather, 256 bytes per token in bfloat16" in free
    portable = joined(invoke(model))
    assert "in the norm" not in portable
    assert "gather" not in portable
    assert portable.count("| stream | nothing") == 2


def test_json_says_what_runs(model):
    plan = json.loads(invoke(model, "--json", "--layout", "fused", "--o-proj", "free"))
    layer, keys = "model.layers.0.", ("placement", "norm", "gathers", "bytes_per_token")
    first = {p["name"].removeprefix(layer): tuple(p[key] for key in keys) for p in plan["permutations"][:4]}
    assert first == {
        "self_attn.q_proj+k_proj+v_proj": ("in_norm", f"{layer}input_layernorm", 0, 0),
        "self_attn.o_proj": ("gather", None, 1, 4 * zoo.HIDDEN),
        "mlp.gate_proj+up_proj": ("in_norm", f"{layer}post_attention_layernorm", 0, 0),
        "mlp.down_proj": ("folded", None, 0, 0),
    }
    assert [site["placement"] for site in plan["sites"][:4]] == ["in_norm", "gather", "in_norm", "folded"]
    assert len(plan["permutations"]) == len(plan["sites"]) == 4 * zoo.LAYERS
    portable = json.loads(invoke(model, "--json"))
    assert {site["placement"] for site in portable["sites"]} == {"folded"}


@pytest.mark.parametrize("options", [(), ("--layout", "fused", "--o-proj", "free")])
@pytest.mark.slow
def test_a_deep_model_fits_on_a_screen(configs, model, options):
    """Layers that are alike are one row."""
    text = invoke(configs / "deep", *options)
    assert len(text.splitlines()) <= 50
    assert text.count("(12x)") >= 4
    first = [line.split(" | ")[0] for line in joined(text).splitlines()]
    assert len(first) >= 8
    assert not [cell for cell in first if re.search(r"layers\.\d+\.", cell)]


def test_what_would_be_pruned_is_summed_up(model):
    sizes = json.loads(invoke(model, "--json"))
    layer = 2 * zoo.HIDDEN**2 * (1 + zoo.KEY_VALUE_HEADS / zoo.SIZES["num_attention_heads"])
    pruned = zoo.LAYERS * int(layer + 3 * zoo.HIDDEN * zoo.SIZES["intermediate_size"])
    assert sizes["pruned_parameters"] == pruned
    assert sizes["dense_bytes"] == 4 * sizes["parameters"]
    assert sizes["dense_bytes"] - sizes["packed_bytes"] == 4 * pruned * (1 - 17 / 32), "of 32 bits, 16 and 1 are left"
    share = f"{pruned:,} of {sizes['parameters']:,} parameters ({pruned / sizes['parameters']:.1%}); "
    assert invoke(model).splitlines()[-1].startswith(f"to be pruned: {share}")


def test_experts_that_are_stacked_count(configs):
    sizes = json.loads(invoke(configs / "mixtral", "--json"))
    assert sizes["pruned_parameters"] > zoo.LAYERS * 5 * 3 * zoo.HIDDEN * zoo.SIZES["intermediate_size"]


def test_no_name_is_cut_inside_a_word(model, monkeypatch):
    whole = set(re.findall(r"[a-z_]+", invoke(model)))
    assert {"input_layernorm", "embed_tokens", "self_attn", "gate_proj"} <= whole
    for width in (50, 80):
        monkeypatch.setattr(console.out, "width", width)
        text = invoke(model)
        assert set(re.findall(r"[a-z_]+", text)) == whole
        assert max(map(len, text.splitlines()[:-1])) <= 90


def test_it_says_what_it_does_before_torch_is_imported():
    code = "import sys; sys.modules['torch'] = None\nfrom permtriton.cli.main import app\napp(['inspect', 'any'])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert said.splitlines()[0] == "reading the sizes of the model, not its weights"


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSALS = {
    "unknown layout": (("--layout", "fancy"), ["'fancy'", "portable, fused"]),
    "unknown o_proj": (("--layout", "fused", "--o-proj", "fancy"), ["'fancy'", "tied, free"]),
    "o_proj without fused": (("--o-proj", "free"), ["--o-proj", "--layout fused"]),
    "unknown sparsity": (("--sparsity", "4:2"), ["4:2"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(model, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    options, words = REFUSALS[case]
    line = refused(model, *options)
    assert [word for word in words if word not in line] == [], line
    assert list(tmp_path.iterdir()) == []

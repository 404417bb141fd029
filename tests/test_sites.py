"""The sites, spaces and producers that must be found in each architecture, written out."""

from dataclasses import dataclass, field

import pytest
import torch

from permtriton import NMPattern
from permtriton.passes.plan import Plan

from . import zoo

PATTERN = NMPattern(2, 4)
HEAD_SKIPPED = "does not feed the last hidden state (output head or pooler)"
TIED_SKIPPED = "output head, tied to the embedding"
OUTPUT_FROZEN = "it is an output of the model, whose order must stay"


@dataclass(frozen=True)
class Own:
    """A site with a space of its own, by names relative to the layer."""

    name: str
    channels: int
    segments: tuple[int, ...]
    producers: str
    copies: int = 1


@dataclass(frozen=True)
class Expected:
    """The plan of one architecture; every layer looks the same."""

    layers: str
    sites: tuple[str | Own, ...]  # a string is a site that reads the residual stream
    stream: str  # its producers in a layer
    outside: str  # its producers outside the layers
    readers: str = ""  # linears outside the plan that read it
    skipped: dict[str, str] = field(default_factory=dict)
    frozen: str = ""  # why the stream is


def with_bias(*linears: str) -> str:
    return " ".join(f"{linear}.weight[0] {linear}.bias[0]" for linear in linears)


LLAMA = Expected(
    layers="model.layers",
    sites=(
        "self_attn.q_proj+k_proj+v_proj",
        Own("self_attn.o_proj", 64, (16, 16), "self_attn.v_proj.weight[0]", copies=2),
        "mlp.gate_proj+up_proj",
        Own("mlp.down_proj", 112, (112,), "mlp.gate_proj.weight[0] mlp.up_proj.weight[0]"),
    ),
    stream="input_layernorm.weight[0] self_attn.o_proj.weight[0] post_attention_layernorm.weight[0] "
    "mlp.down_proj.weight[0]",
    outside="model.embed_tokens.weight[1] model.norm.weight[0]",
    readers="lm_head.weight[1]",
    skipped={"lm_head": HEAD_SKIPPED},
)


def like_llama(**changes: object) -> Expected:
    return Expected(**{**LLAMA.__dict__, **changes})


TIED = {"readers": "", "skipped": {"model.embed_tokens.weight": TIED_SKIPPED}}
WIDE_O = Own("self_attn.o_proj", 96, (24, 24), "self_attn.v_proj.weight[0]", copies=2)
BERT = Expected(
    layers="bert.encoder.layer",
    sites=(
        "attention.self.query+key+value",
        Own("attention.output.dense", 64, (16,) * 4, with_bias("attention.self.value")),
        "intermediate.dense",
        Own("output.dense", 112, (112,), with_bias("intermediate.dense")),
    ),
    stream=with_bias("attention.output.dense", "attention.output.LayerNorm", "output.dense", "output.LayerNorm"),
    outside="bert.embeddings.word_embeddings.weight[1] bert.embeddings.token_type_embeddings.weight[1] "
    "bert.embeddings.position_embeddings.weight[1] "
    + with_bias("bert.embeddings.LayerNorm", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    readers="cls.predictions.transform.dense.weight[1]",
    skipped={"bert.embeddings.word_embeddings.weight": TIED_SKIPPED, "cls.predictions.transform.dense": HEAD_SKIPPED},
)
EXPECTED = {
    "llama": LLAMA,
    "phi3": like_llama(
        sites=(
            "self_attn.qkv_proj",
            Own("self_attn.o_proj", 64, (16, 16), "self_attn.qkv_proj.weight[0]", copies=2),
            "mlp.gate_up_proj",
            Own("mlp.down_proj", 112, (112,), "mlp.gate_up_proj.weight[0]"),
        ),
    ),
    "gemma2": like_llama(
        sites=(LLAMA.sites[0], WIDE_O, *LLAMA.sites[2:]),
        stream=LLAMA.stream + " pre_feedforward_layernorm.weight[0] post_feedforward_layernorm.weight[0]",
        **TIED,
    ),
    "olmo2": like_llama(
        stream="self_attn.o_proj.weight[0] post_attention_layernorm.weight[0] mlp.down_proj.weight[0] "
        "post_feedforward_layernorm.weight[0]",
    ),
    "gpt2": Expected(  # Conv1D keeps its weight [in_features, out_features]
        layers="transformer.h",
        sites=(
            "attn.c_attn",
            Own("attn.c_proj", 64, (16,) * 4, "attn.c_attn.weight[1] attn.c_attn.bias[0]"),
            "mlp.c_fc",
            Own("mlp.c_proj", 112, (112,), "mlp.c_fc.weight[1] mlp.c_fc.bias[0]"),
        ),
        stream=with_bias("ln_1", "ln_2")
        + " attn.c_proj.weight[1] attn.c_proj.bias[0] mlp.c_proj.weight[1] mlp.c_proj.bias[0]",
        outside="transformer.wte.weight[1] transformer.wpe.weight[1] " + with_bias("transformer.ln_f"),
        skipped={"transformer.wte.weight": TIED_SKIPPED},
    ),
    "bert_mlm": BERT,
    "bert": Expected(
        layers="encoder.layer",
        sites=BERT.sites,
        stream=BERT.stream,
        outside="embeddings.word_embeddings.weight[1] embeddings.token_type_embeddings.weight[1] "
        "embeddings.position_embeddings.weight[1] " + with_bias("embeddings.LayerNorm"),
        readers="pooler.dense.weight[1]",
        skipped={"pooler.dense": HEAD_SKIPPED},
        frozen=OUTPUT_FROZEN,
    ),
}


every_name = pytest.mark.parametrize("name", zoo.TELLING)


def plan_of(name: str) -> Plan:
    return zoo.planned(name)[1]


def linears_of(name: str) -> tuple[str, ...]:
    """Splits a site's name into linears, which all have the depth of the last part."""
    first, *others = name.split("+")
    prefix = first.rsplit(".", 1 + others[-1].count("."))[0] if others else ""
    return (first, *(f"{prefix}.{other}" for other in others))


def in_every_layer(layers: str, names: str) -> set[str]:
    return {f"{layers}.{number}.{name}" for number in range(zoo.LAYERS) for name in names.split()}


def axes_of(plan: Plan, space_name: str, *, reads: bool) -> list[str]:
    space = next(space for space in plan.spaces if space.name == space_name)
    return [f"{axis.parameter}[{axis.dim}]" for axis in space.axes if axis.is_input == reads]


@every_name
def test_sites(name):
    expected, plan, rows = EXPECTED[name], plan_of(name), []
    for number in range(zoo.LAYERS):
        for site in expected.sites:
            own = isinstance(site, Own)
            full = f"{expected.layers}.{number}.{site.name if own else site}"
            channels, copies = (site.channels, site.copies) if own else (zoo.HIDDEN, 1)
            rows.append((full, linears_of(full), number, channels, copies, full if own else "stream"))
    assert [(s.name, s.linears, s.layer, s.channels, s.copies, s.space.name) for s in plan.sites] == rows
    assert [[s.layer for s in layer] for layer in plan.layers()] == [
        [n] * len(expected.sites) for n in range(zoo.LAYERS)
    ]
    assert plan.barriers == []


@every_name
def test_spaces(name):
    expected, plan = EXPECTED[name], plan_of(name)
    segments = {"stream": ((1,) * zoo.HIDDEN if expected.frozen else (zoo.HIDDEN,), expected.frozen)}
    for number in range(zoo.LAYERS):
        for site in expected.sites:
            if isinstance(site, Own):
                segments[f"{expected.layers}.{number}.{site.name}"] = (site.segments, "")
    assert {space.name: (space.segments, space.reason) for space in plan.spaces} == segments


@every_name
def test_producers_and_readers(name):
    expected, plan = EXPECTED[name], plan_of(name)
    column = 0 if name == "gpt2" else 1
    producers = {"stream": in_every_layer(expected.layers, expected.stream) | set(expected.outside.split())}
    readers = {"stream": set(expected.readers.split())}
    for site in plan.sites:
        readers.setdefault(site.space.name, set()).update(f"{linear}.weight[{column}]" for linear in site.linears)
    for number in range(zoo.LAYERS):
        for site in expected.sites:
            if isinstance(site, Own):
                own = {f"{expected.layers}.{number}.{producer}" for producer in site.producers.split()}
                producers[f"{expected.layers}.{number}.{site.name}"] = own
    for space in plan.spaces:
        written, read = (axes_of(plan, space.name, reads=reads) for reads in (False, True))
        assert set(written) == producers[space.name]
        assert set(read) == readers[space.name]
        assert len(set(written + read)) == len(written + read), "an axis listed twice would be folded twice"


@every_name
def test_skipped(name):
    assert plan_of(name).skipped == EXPECTED[name].skipped


@every_name
def test_hidden_state_is_the_stream(name):
    plan = plan_of(name)
    assert plan.hidden_site.space is plan.spaces[0]
    assert plan.hidden_site.space.name == "stream"
    assert torch.equal(plan.hidden_site.units, torch.arange(zoo.HIDDEN))


# -- where in a packed or shared parameter the channels are ------------------------------------------------------------


def positions(plan: Plan, space_name: str, parameter: str) -> dict[int, list[int]]:
    """Returns unit -> positions in the parameter's producing (or, for the space's own site, reading) dimension."""
    space = next(space for space in plan.spaces if space.name == space_name)
    axis = next(axis for axis in space.axes if axis.parameter == parameter)
    found: dict[int, list[int]] = {}
    for position, unit in enumerate(axis.units.tolist()):
        if unit >= 0:
            found.setdefault(unit, []).append(position)
    return found


def test_phi3_values_are_the_last_rows_of_the_packed_projection():
    layer, q_and_k = "model.layers.0", (zoo.HEADS + zoo.KEY_VALUE_HEADS) * zoo.HEAD_DIM
    found = positions(plan_of("phi3"), f"{layer}.self_attn.o_proj", f"{layer}.self_attn.qkv_proj.weight")
    assert found == {unit: [q_and_k + unit] for unit in range(zoo.KEY_VALUE_HEADS * zoo.HEAD_DIM)}


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_gpt2_values_are_the_last_third(kind):
    layer = "transformer.h.1.attn"
    found = positions(plan_of("gpt2"), f"{layer}.c_proj", f"{layer}.c_attn.{kind}")
    assert found == {unit: [2 * zoo.HIDDEN + unit] for unit in range(zoo.HIDDEN)}

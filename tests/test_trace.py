"""The traced graph: the model's own parameters, its outputs, and refusals."""

import logging

import pytest
import torch
from torch import fx, nn
from transformers import AutoModelForSeq2SeqLM, BartConfig

from permtriton import NMPattern, compile
from permtriton.errors import ModelError, VerificationError
from permtriton.passes.trace import OTHER_VALUES, export_program, trace, unlifted
from permtriton.passes.trace_inputs import TRACE_TOKENS

from . import off_path, zoo
from .rounding import assert_equal_but_for_rounding
from .zoo import find_plan


@pytest.fixture(
    scope="module",
    params=["llama_tied", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "bert_mlm"))],
)
def traced(request) -> tuple[nn.Module, fx.GraphModule, range]:
    model = zoo.build(request.param)
    return model, *trace(model)


def readers(graph_module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"]


def ids(seed: int = 0) -> torch.Tensor:
    return zoo.token_ids(1, TRACE_TOKENS, seed)


def test_the_graph_computes_what_the_model_does(traced):
    model, graph_module, outputs = traced
    with torch.no_grad():
        results = graph_module(ids())
    expected = zoo.outputs(model, ids())
    for position, value in zip(outputs, expected, strict=True):
        assert_equal_but_for_rounding(results[position], value, roundings=64)


def test_hidden_is_the_last_hidden_state(traced):
    model, graph_module, _ = traced
    with torch.no_grad():
        hidden = graph_module(ids())[-1]
        expected = model.base_model(input_ids=ids(), use_cache=False)[0]
    assert_equal_but_for_rounding(hidden, expected, roundings=64)


def test_parameters_are_the_models_own_and_read_by_one_node(traced):
    model, graph_module, _ = traced
    own = dict(model.named_parameters())
    found = dict(graph_module.named_parameters())
    assert set(found) <= set(own)
    assert all(found[name] is own[name] for name in found)
    assert len(readers(graph_module)) == len(set(readers(graph_module)))
    assert set(found) == set(readers(graph_module)) & set(own)


def test_the_only_placeholder_is_input_ids(traced):
    nodes = traced[1].graph.nodes
    assert [node.name for node in nodes if node.op == "placeholder"] == ["input_ids"]
    assert {node.op for node in nodes} == {"placeholder", "get_attr", "call_function", "output"}
    assert not [node for node in nodes if "_assert" in str(node.target)]
    assert all("val" in node.meta for node in nodes if node.op != "output")
    assert any("nn_module_stack" in node.meta for node in nodes)


def test_new_data_of_a_parameter_is_seen():
    model = zoo.build("gpt2")
    graph_module, _ = trace(model)
    before = zoo.outputs(model, ids())[0]
    parameter = model.get_input_embeddings().weight
    parameter.data = parameter.data * 2
    with torch.no_grad():
        after = graph_module(ids())[0]
    assert not torch.equal(after, before)
    assert_equal_but_for_rounding(after, zoo.outputs(model, ids())[0], roundings=64)


def test_tied_parameters_have_one_node_under_the_first_name():
    graph_module, _ = trace(zoo.build("llama_tied"))
    assert "lm_head.weight" not in readers(graph_module)
    node = next(n for n in graph_module.graph.nodes if n.target == "model.embed_tokens.weight")
    assert {str(user.target) for user in node.users} == {"aten.embedding.default", "aten.linear.default"}


def test_buffers_and_constants_are_attributes():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.tensor([1.0, 2.0]))
            self.register_buffer("unsaved", torch.tensor([3.0, 4.0]), persistent=False)

        def forward(self, x):
            return (x * self.kept + self.unsaved + torch.tensor([5.0, 6.0]),)

    net = Shifted()
    graph_module = unlifted(export_program(net, torch.zeros(2)), net)
    assert torch.equal(graph_module(torch.ones(2))[0], net(torch.ones(2))[0])
    assert {"kept", "unsaved"} < set(readers(graph_module))


@pytest.mark.slow
def test_both_halves_of_an_encoder_decoder_are_traced_and_the_encoders_state_is_no_output():
    sizes = {"vocab_size": zoo.VOCABULARY, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_hidden_layers": 1}
    with torch.device("meta"):
        graph_module, outputs = trace(
            AutoModelForSeq2SeqLM.from_config(BartConfig(**sizes, encoder_layers=1, decoder_layers=1)).eval()
        )
    shapes = {n.target: tuple(n.meta["val"].shape) for n in graph_module.graph.nodes if n.op == "placeholder"}
    assert shapes == {"input_ids": (1, 4), "decoder_input_ids": (1, 3)}
    assert len(outputs) == 1
    assert graph_module.graph.output_node().args[0][-1].meta["val"].shape == (1, 3, 16)


@pytest.mark.slow
def test_what_export_cannot_follow_is_refused_in_one_line(capfd):
    """torch.export prints the whole graph up to a choice that depends on values."""
    model = zoo.build("llama")
    model.model.norm.forward = lambda x: x if float(x.sum()) > 0 else -x
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be traced") as refused:
        trace(model)
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")
    assert not logging.root.manager.disable


@pytest.mark.slow
def test_all_rows_are_taken_where_a_mask_selects_some():
    model = zoo.build("llama")
    mlp = model.model.layers[0].mlp
    dense = mlp.forward

    def selected(x):
        mlp.down_proj.to(torch.float32)  # an exported module cannot be converted
        for (row,) in (x[0].sum(-1) > 0).nonzero():
            x = x.index_add(1, row[None], dense(x[:, row][:, None]))
        return x

    mlp.forward = selected
    graph_module, _ = trace(model)
    weight = next(node for node in graph_module.graph.nodes if node.target == "model.layers.0.mlp.down_proj.weight")
    assert len(weight.users) == TRACE_TOKENS
    assert OTHER_VALUES in graph_module.meta


@pytest.mark.slow
def test_a_channel_that_selects_rows_keeps_its_place():
    model = zoo.tiny_llama(num_hidden_layers=1)
    mlp = model.model.layers[0].mlp

    def selected(x):
        hidden = (mlp.gate_proj(x) * mlp.up_proj(x)).flatten(0, 1)
        if hidden.isfinite().all():  # so that torch.export needs answers
            rows = (hidden[:, 0] > 0).nonzero()[:, 0]
            hidden = hidden.index_add(0, rows, hidden[rows].relu())
        return mlp.down_proj(hidden).view_as(x)

    mlp.forward = selected
    spaces = {space.name: space for space in find_plan(model, NMPattern(2, 4)).spaces}
    assert spaces["model.layers.0.mlp.down_proj"].segments[0] == 1


def test_a_model_that_draws_random_numbers_is_refused():
    model = zoo.build("llama")
    model.model.norm.forward = lambda x: x + torch.rand_like(x)
    with pytest.raises(ModelError, match=r"draws random numbers when it runs \(aten.rand_like"):
        trace(model)


@pytest.mark.slow
def test_a_model_that_is_traced_as_something_else_is_refused_before_it_changes():
    """The attention of PaliGemma is masked in one way when it is traced, and in another when it runs."""
    model = off_path.build("paligemma")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(VerificationError, match=r"traces of this PaliGemma\w+: outputs differ by"):
        compile(model, data=zoo.token_ids(2, 12).clamp(max=off_path.IMAGE_TOKEN - 1), recipe="heuristic,mask")
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())

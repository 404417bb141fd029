"""Paths that a trace on token ids does not run stay correct: images, encoder states, long sequences."""

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import permtriton.passes.plan
from permtriton import NMPattern, config_from
from permtriton.driver.pipeline import compile_model
from permtriton.passes.plan import Plan
from permtriton.passes.untraced import untraced_reach

from . import off_path, zoo
from .folders import bits
from .zoo import find_plan, fold

PATTERN = NMPattern(2, 4)
PERMUTE_ONLY = {"recipe": "heuristic,mask", "importance": "magnitude"}


@torch.no_grad()
def output(model: PreTrainedModel, arguments: dict[str, Tensor]) -> list[Tensor]:
    return [model(**arguments, use_cache=False).logits]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("bart_decoder", "portable"),
        *(pytest.param(name, "portable", marks=pytest.mark.slow) for name in ("llava", "paligemma", "long_rope")),
        *(pytest.param(name, "fused", marks=pytest.mark.slow) for name in ("idefics3", "gpt2_cross", "bert_cross")),
    ],
)
def test_permuting_changes_no_output_off_the_traced_path(name, layout):
    arguments = off_path.arguments(name)
    dense = output(off_path.build(name), arguments)
    model = off_path.build(name)
    plan = find_plan(model, PATTERN, layout=layout)
    indices = zoo.random_indices(plan)
    assert len(indices) >= 2
    fold(model, plan, indices)
    assert zoo.difference(dense, output(model, arguments)) < 1e-4


@pytest.mark.parametrize("name", ["llava", "bart_decoder"])
@pytest.mark.slow
def test_the_stream_stays_and_the_reason_names_the_parameter(name):
    plan = find_plan(off_path.build(name), PATTERN)
    (stream,) = (space for space in plan.spaces if space.name == "stream")
    assert stream.reason.split(" ")[0] in plan.untraced
    assert "token ids alone do not reach" in stream.reason


def test_channels_that_stay_inside_a_layer_move_all_the_same():
    plan = find_plan(off_path.build("bart_decoder"), PATTERN)
    moving = {space.name for space in plan.spaces if not space.frozen}
    assert moving == {
        f"model.decoder.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.out_proj", "fc2")
    }


class Adapted(nn.Module):
    """A layer with an adapter that nothing calls, beside or inside the MLP."""

    def __init__(self, inside: bool, out_features: int) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        (self.mlp if inside else self).add_module("adapter", nn.Linear(4, out_features))


@pytest.mark.parametrize(
    ("inside", "out_features", "reached"),
    [(True, 16, True), (True, 32, True), (True, 24, False), (True, 8, False), (False, 16, False)],
)
def test_only_parameters_in_reach_and_of_a_multiple_of_the_width_count(inside, out_features, reached):
    model = nn.Sequential()
    model.add_module("layers", nn.ModuleList([Adapted(inside, out_features)]))
    space = permtriton.passes.plan.ChannelSpace("down", (16,), ())
    site = permtriton.passes.plan.Site("down", ("layers.0.mlp.down",), 16, torch.arange(16), space)
    untraced = [name for name, _ in model.named_parameters() if "adapter" in name]
    names = ["layers.0.mlp.up.weight", "layers.0.mlp.up.bias", "layers.0.mlp.down.weight"]
    assert bool(untraced_reach(model, untraced, names, [site])) == reached


@pytest.mark.slow
def test_an_untraced_reader_of_a_norm_keeps_the_norm_in_order():
    """GPT-2's cross-attention has a norm of its own, which the graph does not show."""
    plan = find_plan(off_path.build("gpt2_cross"), PATTERN, layout="fused")
    assert all(space.norm is None for space in plan.spaces)
    assert any(space.norm is not None for space in find_plan(zoo.build("gpt2"), PATTERN, layout="fused").spaces)


def contents(model: PreTrainedModel) -> dict[str, object]:
    """Every attribute, buffer, parameter and hook of every module, by value, the config, and torch's own state."""
    found: dict[str, object] = {
        "config": [config.to_dict() for config in (model.config, model.config.get_text_config())],
        "random": bits(torch.random.get_rng_state()).tolist(),
        "global": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()),
    }
    for name, module in model.named_modules():
        found[name] = type(module)
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = described(value)
    return found


def described(value: object) -> object:
    if isinstance(value, Tensor):
        layout = (value.dtype, value.shape, value.stride(), value.data_ptr())
        return (type(value), *layout, value.requires_grad, id(value.grad), vars(value), bits(value).tolist())
    if isinstance(value, dict):
        return {key: described(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [described(inner) for inner in value]
    return repr(value) if isinstance(value, int | float | str | bool | torch.dtype | None) else id(value)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt2", "fused"), *(pytest.param(name, "portable", marks=pytest.mark.slow) for name in ("mixtral", "paligemma"))],
)
def test_planning_leaves_the_model_as_it_is(name, layout):
    builders = {**zoo.ARCHITECTURES, **zoo.MIXTURES, **off_path.MODELS}
    torch.manual_seed(0)
    model = builders[name]().eval()
    model.train(layout == "fused")
    module = next(iter(model.children()))
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    next(model.parameters()).requires_grad_(False)
    before = contents(model)
    find_plan(model, PATTERN, layout=layout)
    after = contents(model)
    assert [key for key in {**before, **after} if before.get(key) != after.get(key)] == []


def in_order(plan: Plan, report: dict) -> bool:
    return report["hidden_states"]["permuted"] == (plan.hidden_site is not None and not plan.hidden_site.space.reason)


@pytest.mark.parametrize("layout", ["portable", "fused"])
@pytest.mark.slow
def test_the_report_says_in_which_order_hidden_states_come(layout):
    ids = zoo.token_ids()
    dense, model = zoo.build("llama"), zoo.build("llama")
    options = {**PERMUTE_ONLY, "layout": layout}
    compiled = compile_model(model, None, config_from(options), ids=ids)
    assert in_order(compiled.plan, compiled.report)
    hidden = compiled.report["hidden_states"]
    embedded = [m.get_input_embeddings()(ids) for m in (dense, model)]
    if hidden["permuted"]:
        assert not torch.equal(*embedded)
        assert torch.equal(embedded[0][..., hidden["index"]], embedded[1])
        assert torch.equal(embedded[0], embedded[1][..., hidden["undo"]])
    else:
        assert torch.equal(*embedded)

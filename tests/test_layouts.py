"""Layouts: which site folds, gathers in its norm or gathers itself, and that `portable` and `fused` agree."""

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.model.experts import unstacked_experts
from permtriton.passes.plan import Destination, Plan, Site, linear_module, weight_in_out

from . import folders, zoo
from .fused_sites import EXPECTED, plan_of
from .kernel_inputs import TWO_FOUR
from .zoo import find_plan, fold

KINDS = {**dict.fromkeys(("opt", "gpt_neox", "phi", "falcon", "gpt2"), "layer"), "gemma2": "rms_float"}
every_name = pytest.mark.parametrize("name", [*zoo.TELLING, "qwen2_moe"])


# -- which site goes where ---------------------------------------------------------------------------------------------


def running(site: Site, layers: str) -> str | int:
    if site.space.norm is not None:
        assert site.space.placement is Destination.IN_NORM
        return site.space.norm.module.removeprefix(f"{layers}.{site.layer}.")
    return len(site.linears) if site.space.placement is Destination.GATHER else "nothing"


@every_name
def test_where_each_site_goes(name):
    layers, expected = EXPECTED[name]
    plan = plan_of(name)
    assert [(site.name, running(site, layers)) for site in plan.sites] == [
        (f"{layers}.{layer}.{site}", runs) for layer in range(zoo.LAYERS) for site, runs in expected.items()
    ]
    assert [space.name for space in plan.spaces] == [site.name for site in plan.sites], "every site has its own"
    assert not any(space.frozen for space in plan.spaces)
    for site in plan.sites:
        if site.space.placement is not Destination.FOLDED:
            assert site.space.segments == (site.channels,), "free over all channels"
            assert torch.equal(site.units, torch.arange(site.channels))
            assert all(axis.is_input for axis in site.space.axes)
        if site.space.norm is not None:
            variant = site.space.norm.variant
            assert variant.kind == KINDS.get(name, "rms" if name != "gpt_oss" else "rms_float")
            assert variant.offset == (1.0 if name == "gemma2" else 0.0)


@every_name
@pytest.mark.slow
def test_free_gives_the_attention_output_its_own_gather(name):
    tied, free = plan_of(name), plan_of(name, "free")
    for before, after in zip(tied.sites, free.sites, strict=True):
        attends = len(before.space.segments) > 1 or before.copies > 1
        if not attends or name == "gpt2":  # its Conv1D cannot gather: it stays folded
            assert (after.space.placement, after.space.segments) == (before.space.placement, before.space.segments)
        else:
            assert (before.space.placement, after.space.placement) == (Destination.FOLDED, Destination.GATHER)
            assert after.space.segments == (after.channels,)


def test_the_attention_output_is_tied_across_the_query_heads_of_a_key_value_head():
    plan = plan_of("llama")
    (site,) = [site for site in plan.sites if site.name.endswith("1.self_attn.o_proj")]
    assert site.space.segments == (zoo.HEAD_DIM,) * zoo.KEY_VALUE_HEADS
    assert site.copies == zoo.HEADS // zoo.KEY_VALUE_HEADS
    index = site.expand(zoo.random_index(site.space))
    heads = index.view(zoo.HEADS, zoo.HEAD_DIM) - zoo.HEAD_DIM * torch.arange(zoo.HEADS).unsqueeze(1)
    assert bool(((heads >= 0) & (heads < zoo.HEAD_DIM)).all()), "inside heads"
    assert torch.equal(heads[0], heads[1])
    assert torch.equal(heads[2], heads[3])
    assert not torch.equal(heads[0], heads[2])


@every_name
def test_other_readers_of_a_norm_are_in_its_space(name):
    """A router reads the norm, too: its columns move with it."""
    for site in plan_of(name).sites:
        if site.space.norm is not None:
            own = {f"{linear}.weight" for linear in site.linears}
            others = {axis.parameter for axis in site.space.axes} - own
            routed = name in zoo.MIXTURES and ".mlp." in site.name
            gates = {f"model.layers.{site.layer}.mlp.gate.weight"} if routed else set()
            if name == "qwen2_moe" and gates:
                gates.add(f"model.layers.{site.layer}.mlp.shared_expert_gate.weight")
            assert others == gates


def mixtral_with_a_residual_from_the_norm() -> PreTrainedModel:
    model = zoo.build("mixtral")

    def forward(self: nn.Module, hidden_states: Tensor, **options: object) -> Tensor:
        attended = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)[0]
        hidden_states = self.post_attention_layernorm(hidden_states + attended)
        mixed = self.mlp(hidden_states)
        return hidden_states + (mixed[0] if isinstance(mixed, tuple) else mixed)

    for block in model.model.layers:
        block.forward = forward.__get__(block)
    return model


@pytest.mark.slow
def test_experts_that_cannot_gather_keep_their_order():
    model = mixtral_with_a_residual_from_the_norm()
    plan = find_plan(model, TWO_FOUR, layout="fused")
    site = next(site for site in plan.sites if "gate_up_proj" in site.name)
    assert site.space.reason.startswith("no norm before it can gather, and neither can model.layers.0.mlp.experts.0")
    assert any(space.placement is Destination.IN_NORM for space in plan.spaces), "the other norms still gather"
    before = zoo.outputs(model, zoo.token_ids())
    with unstacked_experts(model):
        fold(model, plan, zoo.random_indices(plan))
    assert zoo.difference(before, zoo.outputs(model, zoo.token_ids())) < 1e-4


# -- both layouts ------------------------------------------------------------------------------------------------------


def masked(model: PreTrainedModel, plan: Plan, indices: dict[str, Tensor]) -> PreTrainedModel:
    """Folds, then keeps the largest weights of each group."""
    fold(model, plan, indices)
    for _, name in plan.linears():
        folders.prune_weight(weight_in_out(linear_module(model, name)), 0)
    return model


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "olmo2", "gpt2"])
@pytest.mark.slow
def test_both_layouts_agree_where_their_permutations_are_equal(name):
    portable, fused = plan_of(name, "portable"), plan_of(name)
    indices = zoo.random_indices(portable)
    equal = {
        after.name: indices[before.space.name]
        if after.space.placement is Destination.FOLDED
        else before.expand(indices[before.space.name])
        for before, after in zip(portable.sites, fused.sites, strict=True)
    }
    folded, gathered = masked(zoo.build(name), portable, indices), masked(zoo.build(name), fused, equal)
    order = portable.hidden_order(indices)
    for _, linear in portable.linears():
        first, second = (weight_in_out(linear_module(model, linear)) for model in (folded, gathered))
        writes_stream = linear.rpartition(".")[2] in (
            "o_proj", "down_proj", "out_proj", "fc2", "dense", "dense_4h_to_h", "c_proj",
        )  # fmt: skip
        assert torch.equal(first, second[:, order] if writes_stream else second), linear
        assert bool((first != 0).unflatten(0, (-1, 4)).sum(1).eq(2).all()), linear
    ids = zoo.token_ids()
    assert zoo.difference(zoo.outputs(folded, ids), zoo.outputs(gathered, ids)) < 1e-4
    assert zoo.difference(zoo.outputs(zoo.build(name), ids), zoo.outputs(gathered, ids)) > 1e-2

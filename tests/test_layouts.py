"""Layouts: which site folds, gathers in its norm or gathers itself; and what `fused` compiles to."""

import functools
import json

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import permtriton
from permtriton import CompileConfig, CompiledModel, find_plan
from permtriton.errors import ModelError
from permtriton.experts import stacked_name, unstacked_experts
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.modules import PermutedLayerNorm, PermutedRMSNorm, SparseLinear
from permtriton.passes.fold import fold
from permtriton.permutation import identity
from permtriton.plan import Plan, Site, linear_module, weight_in_out
from permtriton.planning import hidden_order
from permtriton.report import at_run_time
from permtriton.sparsity import NMPattern

from . import zoo
from .graphs import planned

PATTERN = NMPattern(2, 4)
LEARN = {"epochs": 2, "batch_size": 4, "learning_rate": 0.1, "block_size": 16, "keep_epoch": "last"}
HEURISTIC = {"permutation": "heuristic"}


def built(name: str) -> PreTrainedModel:
    return zoo.build(name) if name in zoo.ARCHITECTURES else zoo.build_mixture(name)


def plan_of(name: str, layout: str = "fused") -> Plan:
    return planned(name, layout)[1]


# -- which site goes where ---------------------------------------------------------------------------------------------

# Site of each layer -> what runs: nothing (folded), the norm that gathers, or how many gathers. Last: `o` when free.
LLAMA_ATTENTION = {"self_attn.q_proj+k_proj+v_proj": "input_layernorm", "self_attn.o_proj": "nothing"}
LLAMA = {
    **LLAMA_ATTENTION,
    "mlp.gate_proj+up_proj": "post_attention_layernorm",
    "mlp.down_proj": "nothing",
}
BERT = {
    "attention.self.query+key+value": 3,
    "attention.output.dense": "nothing",
    "intermediate.dense": 1,
    "output.dense": "nothing",
}
EXPERT_NUMBERS = range(5)
EXPERTS = {
    **LLAMA_ATTENTION,
    "mlp.experts." + "+".join(f"{n}.gate_up_proj" for n in EXPERT_NUMBERS): "post_attention_layernorm",
    **{f"mlp.experts.{n}.down_proj": "nothing" for n in EXPERT_NUMBERS},
}
EXPECTED: dict[str, tuple[str, dict[str, str | int]]] = {
    "llama": ("model.layers", LLAMA),
    "llama_tied": ("model.layers", LLAMA),
    "llama_eager": ("model.layers", LLAMA),
    "mistral": ("model.layers", LLAMA),
    "qwen2": ("model.layers", LLAMA),
    "qwen3": ("model.layers", LLAMA),
    "phi3": (
        "model.layers",
        {
            "self_attn.qkv_proj": "input_layernorm",
            "self_attn.o_proj": "nothing",
            "mlp.gate_up_proj": "post_attention_layernorm",
            "mlp.down_proj": "nothing",
        },
    ),
    "gemma2": ("model.layers", {**LLAMA, "mlp.gate_proj+up_proj": "pre_feedforward_layernorm"}),
    "opt": (
        "model.decoder.layers",
        {
            "self_attn.q_proj+k_proj+v_proj": "self_attn_layer_norm",
            "self_attn.out_proj": "nothing",
            "fc1": "final_layer_norm",
            "fc2": "nothing",
        },
    ),
    "gpt_neox": (
        "gpt_neox.layers",
        {
            "attention.query_key_value": "input_layernorm",
            "attention.dense": "nothing",
            "mlp.dense_h_to_4h": "post_attention_layernorm",
            "mlp.dense_4h_to_h": "nothing",
        },
    ),
    "phi": (  # attention and MLP read the same norm
        "model.layers",
        {
            "self_attn.q_proj+self_attn.k_proj+self_attn.v_proj+mlp.fc1": "input_layernorm",
            "self_attn.dense": "nothing",
            "mlp.fc2": "nothing",
        },
    ),
    "falcon": (
        "transformer.h",
        {
            "self_attention.query_key_value+mlp.dense_h_to_4h": "input_layernorm",
            "self_attention.dense": "nothing",
            "mlp.dense_4h_to_h": "nothing",
        },
    ),
    "olmo2": (  # no norm before them: the residual stream itself is read
        "model.layers",
        {**LLAMA, "self_attn.q_proj+k_proj+v_proj": 3, "mlp.gate_proj+up_proj": 2},
    ),
    "gpt2": (
        "transformer.h",
        {"attn.c_attn": "ln_1", "attn.c_proj": "nothing", "mlp.c_fc": "ln_2", "mlp.c_proj": "nothing"},
    ),
    "bert_mlm": ("bert.encoder.layer", BERT),  # its norms write the residual stream, too
    "bert": ("encoder.layer", BERT),
    "mixtral": ("model.layers", EXPERTS),
    "qwen3_moe": ("model.layers", EXPERTS),
    "olmoe": ("model.layers", EXPERTS),
    "qwen2_moe": (
        "model.layers",
        {
            **LLAMA_ATTENTION,
            "mlp.shared_expert.gate_proj+shared_expert.up_proj+"
            + "+".join(f"experts.{n}.gate_up_proj" for n in EXPERT_NUMBERS): "post_attention_layernorm",
            "mlp.shared_expert.down_proj": "nothing",
            **{f"mlp.experts.{n}.down_proj": "nothing" for n in EXPERT_NUMBERS},
        },
    ),
    "gpt_oss": ("model.layers", LLAMA_ATTENTION),  # its experts are not understood
}
KINDS = {**dict.fromkeys(("opt", "gpt_neox", "phi", "falcon", "gpt2"), "layer"), "gemma2": "rms_float"}
every_name = pytest.mark.parametrize("name", list(EXPECTED))


def running(site: Site, layers: str) -> str | int:
    cost = at_run_time(site)
    if cost["runs"] == "in the norm":
        return cost["norm"].removeprefix(f"{layers}.{site.layer}.")
    return cost["gathers"] if cost["runs"] == "gather" else "nothing"


def test_every_architecture_is_written_out():
    assert set(EXPECTED) == {*zoo.ARCHITECTURES, *zoo.MIXTURES}


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
        assert site.space.at_run_time == (site.cost != "none")
        if site.cost != "none":
            assert site.space.segments == (site.channels,), "free over all channels"
            assert torch.equal(site.units, torch.arange(site.channels))
            assert site.space.producers == []
        if site.norm is not None:
            assert site.norm.kind == KINDS.get(name, "rms" if name != "gpt_oss" else "rms_float")
            assert site.norm.offset == (1.0 if name == "gemma2" else 0.0)


@every_name
def test_free_gives_the_attention_output_its_own_gather(name):
    tied, free = plan_of(name), plan_of(name, "free")
    for before, after in zip(tied.sites, free.sites, strict=True):
        attends = len(before.space.segments) > 1 or before.copies > 1
        if not attends or name in ("gpt2", "falcon"):  # theirs is no nn.Linear and gathers nothing: it stays folded
            assert (after.cost, after.space.segments) == (before.cost, before.space.segments)
        else:
            assert (before.cost, after.cost) == ("none", "gather")
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
        if site.norm is not None:
            own = {f"{linear}.weight" for linear in site.linears}
            others = {axis.parameter for axis in site.space.axes} - own
            routed = name in zoo.MIXTURES and name != "gpt_oss" and ".mlp." in site.name
            gates = {f"model.layers.{site.layer}.mlp.gate.weight"} if routed else set()
            if name == "qwen2_moe" and gates:
                gates.add(f"model.layers.{site.layer}.mlp.shared_expert_gate.weight")
            assert others == gates


def gpt2_with_a_residual_from_the_norm() -> PreTrainedModel:
    """GPT-2 in which the first norm's output is what the residual adds to: its Conv1D cannot gather."""
    model = zoo.build("gpt2")

    def forward(self: nn.Module, hidden_states: Tensor, *arguments: object, **options: object) -> Tensor:
        normed = self.ln_1(hidden_states)
        hidden_states = normed + self.attn(normed)[0]
        return hidden_states + self.mlp(self.ln_2(hidden_states))

    for block in model.transformer.h:
        block.forward = forward.__get__(block)
    return model


def test_a_conv1d_that_cannot_gather_keeps_its_order():
    plan = find_plan(gpt2_with_a_residual_from_the_norm(), PATTERN, layout="fused")
    by_name = {site.name: site for site in plan.sites}
    for layer in range(zoo.LAYERS):
        site = by_name[f"transformer.h.{layer}.attn.c_attn"]
        assert site.cost == "none"
        assert site.space.frozen == (
            f"no norm before it can gather, and neither can transformer.h.{layer}.attn.c_attn itself "
            "(a Conv1D, one of stacked experts, or a linear with hooks or a shared weight)"
        )
        assert by_name[f"transformer.h.{layer}.mlp.c_fc"].cost == "norm"


def test_a_conv1d_that_cannot_be_freed_says_so():
    plan = find_plan(zoo.build("gpt2"), PATTERN, layout="fused", o_proj="free")
    told = [line for line in plan.barriers if "stays within its heads" in line]
    assert len(told) == zoo.LAYERS
    assert "transformer.h.0.attn.c_proj" in told[0]
    assert find_plan(zoo.build("gpt2"), PATTERN, layout="fused").barriers == []


def mixtral_with_a_residual_from_the_norm() -> PreTrainedModel:
    model = zoo.build_mixture("mixtral")

    def forward(self: nn.Module, hidden_states: Tensor, **options: object) -> Tensor:
        attended = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)[0]
        hidden_states = self.post_attention_layernorm(hidden_states + attended)
        mixed = self.mlp(hidden_states)
        return hidden_states + (mixed[0] if isinstance(mixed, tuple) else mixed)

    for block in model.model.layers:
        block.forward = forward.__get__(block)
    return model


def test_experts_that_cannot_gather_keep_their_order():
    model = mixtral_with_a_residual_from_the_norm()
    plan = find_plan(model, PATTERN, layout="fused")
    site = next(site for site in plan.sites if "gate_up_proj" in site.name)
    assert site.space.frozen.startswith("no norm before it can gather, and neither can model.layers.0.mlp.experts.0")
    assert any(s.cost == "norm" for s in plan.sites), "the other norms still gather"
    before = zoo.outputs(model, zoo.token_ids())
    with unstacked_experts(model):
        fold(model, plan, zoo.random_indices(plan))
    assert zoo.difference(before, zoo.outputs(model, zoo.token_ids())) < 1e-4


# -- both layouts ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def masked(model: PreTrainedModel, plan: Plan, indices: dict[str, Tensor]) -> PreTrainedModel:
    """Folds, then keeps the largest weights of each group."""
    fold(model, plan, indices)
    for _, name in plan.linears():
        weight = weight_in_out(linear_module(model, name))
        weight.masked_fill_(~top_n_mask(weight.abs(), PATTERN.kept, PATTERN.group), 0)
    return model


@pytest.mark.parametrize(
    "name", ["llama", "llama_eager", "qwen3", "phi3", "gemma2", "opt", "gpt_neox", "phi", "falcon", "olmo2", "gpt2"]
)
def test_both_layouts_agree_where_their_permutations_are_equal(name):
    portable, fused = plan_of(name, "portable"), plan_of(name)
    indices = zoo.random_indices(portable)
    equal = {
        after.name: before.expand(indices[before.space.name]) if after.cost != "none" else indices[before.space.name]
        for before, after in zip(portable.sites, fused.sites, strict=True)
    }
    folded, gathered = masked(zoo.build(name), portable, indices), masked(zoo.build(name), fused, equal)
    order = hidden_order(portable, indices)
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


def test_layouts_differ_where_their_permutations_do():
    """What the comparison above would see: one index off, and the kept weights are others."""
    fused = plan_of("llama")
    indices = zoo.random_indices(fused)
    other = {**indices, fused.sites[0].name: identity(zoo.HIDDEN)}
    first, second = (masked(zoo.build("llama"), fused, order) for order in (indices, other))
    assert zoo.difference(zoo.outputs(first, zoo.token_ids()), zoo.outputs(second, zoo.token_ids())) > 1e-3


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiled(name: str, **options: object) -> CompiledModel:
    config = CompileConfig.from_options({"layout": "fused", **options})
    return permtriton.compile(built(name), None, config, ids=zoo.token_ids())


def in_order(name: str, result: CompiledModel) -> PreTrainedModel:
    """The dense model in the order of a compiled one: what it is before masks."""
    dense = built(name)
    moves = {space.name for space in result.plan.spaces if not space.frozen}
    with unstacked_experts(dense):
        fold(dense, result.plan, {space: index for space, index in result.indices.items() if space in moves})
    return dense


CASES = {
    "llama learned": ("llama", LEARN),
    "phi3 learned, free": ("phi3", {**LEARN, "o_proj": "free"}),
    "gpt2 learned": ("gpt2", LEARN),
    "olmo2": ("olmo2", HEURISTIC),
    "bert learned": ("bert", LEARN),
    "mixtral": ("mixtral", HEURISTIC),
    "gemma2": ("gemma2", HEURISTIC),
    "opt, free": ("opt", {**HEURISTIC, "o_proj": "free"}),
    "gpt_neox": ("gpt_neox", HEURISTIC),
    "qwen3, ria": ("qwen3", {**HEURISTIC, "importance": "ria"}),
    "qwen2_moe": ("qwen2_moe", HEURISTIC),
    "llama sparsegpt": ("llama", {**HEURISTIC, "weight_update": "sparsegpt", "o_proj": "free"}),
    "bert_mlm sparsegpt": ("bert_mlm", {**HEURISTIC, "weight_update": "sparsegpt"}),
    "gpt2 sparsegpt, obs": ("gpt2", {**HEURISTIC, "weight_update": "sparsegpt", "importance": "obs"}),
}


@functools.cache
def case_of(case: str) -> tuple[str, CompiledModel]:
    name, options = CASES[case]
    return name, compiled(name, **options)


every_case = pytest.mark.parametrize("case", list(CASES))


@every_case
def test_compiled_weights_have_the_pattern(case):
    _, result = case_of(case)
    with unstacked_experts(result.model):
        for _, linear in result.plan.linears():
            kept = (weight_in_out(linear_module(result.model, linear)) != 0).unflatten(0, (-1, 4)).sum(1)
            assert bool((kept == 2).all()), linear


@every_case
def test_compiled_modules_run_what_the_plan_says(case):
    name, result = case_of(case)
    for site in result.plan.sites:
        order = result.indices[site.space.name]
        if site.norm is not None:
            norm = result.model.get_submodule(site.norm.module)
            assert isinstance(norm, PermutedLayerNorm if site.norm.kind == "layer" else PermutedRMSNorm)
            assert torch.equal(norm.index.long(), order)
        for linear in site.linears:
            if stacked_name(result.model, linear) is not None:
                continue
            module = result.model.get_submodule(linear)
            if site.cost == "gather":
                assert isinstance(module, SparseLinear)
                assert torch.equal(module.gather.index.long(), order)
            else:
                assert getattr(module, "gather", None) is None
                assert isinstance(module, nn.Linear | Conv1D)
    assert type(result.model) is type(built(name))
    assert set(dict(result.model.named_parameters())) == set(dict(built(name).named_parameters()))


@every_case
def test_without_masks_it_is_the_dense_model(case):
    name, result = case_of(case)
    ids = zoo.token_ids(seed=2)
    dense = zoo.outputs(built(name), ids)
    ordered = in_order(name, result)
    assert zoo.difference(dense, zoo.outputs(ordered, ids)) < 1e-4
    assert zoo.difference(dense, zoo.outputs(result.model, ids)) > 1e-2
    assert result.report["fold_difference"] < 1e-4
    if "sparsegpt" not in case:
        with unstacked_experts(ordered), unstacked_experts(result.model):
            for _, linear in result.plan.linears():
                expected = weight_in_out(linear_module(ordered, linear))
                found = weight_in_out(linear_module(result.model, linear))
                assert torch.equal(found, torch.where(found != 0, expected, 0)), linear


@every_case
def test_something_moved_at_run_time(case):
    _, result = case_of(case)
    at_run_time_spaces = [space for space in result.plan.spaces if space.at_run_time]
    assert at_run_time_spaces
    for space in at_run_time_spaces:
        assert not torch.equal(result.indices[space.name], identity(space.units)), space.name


@every_case
def test_the_report_states_what_each_site_costs(case):
    name, result = case_of(case)
    assert [site["cost"] for site in result.report["sites"]] == [site.cost for site in result.plan.sites]
    layers, expected = EXPECTED[name]
    free = CASES[case][1].get("o_proj") == "free"
    for told, site in zip(result.report["spaces"], result.plan.sites, strict=True):
        runs = expected[site.name.removeprefix(f"{layers}.{site.layer}.")]
        if free and "o" in site.name.rpartition(".")[2] and runs == "nothing" and len(site.linears) == 1:
            runs = 1 if site.cost == "gather" else runs
        (cost,) = told["at_run_time"] or [{"runs": "nothing"}]
        if isinstance(runs, int):
            assert cost == {"runs": "gather", "gathers": runs, "bytes_per_token": runs * 2 * 2 * site.channels}
        elif runs == "nothing":
            assert cost == {"runs": "nothing"}
        else:
            norm = f"{layers}.{site.layer}.{runs}"
            assert cost == {"runs": "in the norm", "norm": norm, "bytes_per_token": 0}
    assert result.report["config"]["layout"] == "fused"
    json.dumps(result.report)


@every_case
def test_the_hidden_state_keeps_its_order(case):
    name, result = case_of(case)
    assert result.plan.hidden_space is None
    assert hidden_order(result.plan, result.indices) is None
    ids = zoo.token_ids(2, 6)
    with torch.no_grad():
        dense, ordered = (model.base_model(ids)[0] for model in (built(name), in_order(name, result)))
    torch.testing.assert_close(ordered, dense, rtol=1e-3, atol=1e-3)


def test_a_free_attention_output_is_said_to_gather():
    _, result = case_of("phi3 learned, free")
    costs = {s["name"].rpartition(".")[2]: s["cost"] for s in result.report["sites"]}
    assert costs == {"qkv_proj": "norm", "o_proj": "gather", "gate_up_proj": "norm", "down_proj": "none"}


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_no_permutation_leaves_the_modules_alone(name):
    result, dense = compiled(name, permutation="none"), built(name)
    assert [(n, type(module)) for n, module in result.model.named_modules()] == [
        (n, type(module)) for n, module in dense.named_modules()
    ]
    expected = dict(dense.named_parameters())
    for parameter, value in result.model.named_parameters():
        assert torch.equal(value, torch.where(value != 0, expected[parameter], 0)), parameter
    portable = permtriton.compile(
        built(name), None, CompileConfig.from_options({"permutation": "none"}), ids=zoo.token_ids()
    )
    for parameter, value in portable.model.named_parameters():
        assert torch.equal(value, result.model.get_parameter(parameter)), "no order, no difference between layouts"


def test_fused_moves_more_than_portable_where_the_stream_is_an_output():
    """BERT without a head keeps its stream in `portable`; `fused` gathers for every site."""
    portable, fused = plan_of("bert", "portable"), plan_of("bert")
    assert sum(not site.space.frozen for site in portable.sites) == 2 * zoo.LAYERS
    assert sum(not site.space.frozen for site in fused.sites) == 4 * zoo.LAYERS


def test_learning_in_fused_moves_every_space():
    _, result = case_of("llama learned")
    heuristic = compiled("llama", **HEURISTIC)
    for space in result.plan.spaces:
        assert not torch.equal(result.indices[space.name], heuristic.indices[space.name]), space.name


# -- running it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama learned", "gpt2 learned", "phi3 learned, free", "mixtral"])
def test_generation_with_a_cache(case):
    name, result = case_of(case)
    prompt = zoo.token_ids(2, 6)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    cached = result.model.generate(prompt, **options)
    assert torch.equal(cached, result.model.generate(prompt, use_cache=False, **options))
    assert cached.shape == (2, 14)
    dense = built(name).generate(prompt, **options)
    assert torch.equal(in_order(name, result).generate(prompt, **options), dense), "without masks, the dense model's"
    assert not torch.equal(cached, dense)


@torch.no_grad()
def test_batches_with_padding():
    _, result = case_of("llama learned")
    prompt = zoo.token_ids(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), prompt], 1)
    attention = (padded != 0).long()
    both = torch.cat([padded, zoo.token_ids(1, 9, seed=3)])
    attention = torch.cat([attention, torch.ones(1, 9, dtype=torch.int64)])
    alone = result.model(input_ids=prompt).logits[0, -1]
    together = result.model(input_ids=both, attention_mask=attention).logits[0, -1]
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama learned", "olmo2"])
def test_torch_compile_in_one_graph(case):
    _, result = case_of(case)
    ids = zoo.token_ids(2, 12)
    eager = result.model(input_ids=ids, use_cache=False).logits
    torch._dynamo.reset()
    one = torch.compile(result.model, fullgraph=True, backend="aot_eager")(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(one, eager, rtol=1e-4, atol=1e-4)


def test_a_norm_that_runs_twice_is_not_fused():
    """ALBERT's layers are one, and so are their norms; whatever its plan is, it computes what it did."""
    from transformers import AlbertConfig, AlbertModel

    model = AlbertModel(AlbertConfig(**zoo.SIZES, embedding_size=32)).eval()
    zoo.randomize(model)
    plan = find_plan(model, PATTERN, layout="fused")
    assert all(site.norm is None for site in plan.sites)
    before = zoo.outputs(model, zoo.token_ids())
    fold(model, plan, zoo.random_indices(plan))
    assert zoo.difference(before, zoo.outputs(model, zoo.token_ids())) < 1e-4


def test_a_saved_fused_model_needs_permtriton(tmp_path):
    """A plain checkpoint cannot hold a gather; what is saved either says so or loads to the same outputs."""
    _, result = case_of("llama learned")
    path = result.save(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "permtriton"
    assert len(config["quantization_config"]["norms"]) == 2 * zoo.LAYERS


def test_an_indivisible_site_is_refused_in_fused_too():
    with pytest.raises(ModelError, match="--skip-indivisible"):
        find_plan(zoo.build("llama", intermediate_size=110), PATTERN, layout="fused")


def test_a_fused_model_is_not_compiled_again():
    model = zoo.build("llama")
    config = CompileConfig.from_options({"permutation": "heuristic", "layout": "fused"})
    compiled = permtriton.compile(model, None, config, ids=zoo.token_ids())
    with pytest.raises(ModelError, match=r"compiled already.*input_layernorm.*original model"):
        permtriton.compile(compiled.model, None, config, ids=zoo.token_ids())


def test_the_models_own_save_pretrained_keeps_its_order(tmp_path):
    model = zoo.build("llama")
    config = CompileConfig.from_options({"permutation": "heuristic", "layout": "fused"})
    compiled = permtriton.compile(model, None, config, ids=zoo.token_ids())
    expected = zoo.outputs(compiled.model, zoo.token_ids())
    compiled.model.save_pretrained(tmp_path / "saved")
    reloaded = type(model).from_pretrained(tmp_path / "saved").eval()
    assert all(torch.equal(a, b) for a, b in zip(expected, zoo.outputs(reloaded, zoo.token_ids()), strict=True))

"""Experts as linears: the same function, the plan that follows from it, and the original module back at the end."""

import copy
import functools

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

import permtriton
from permtriton import CompileConfig, NMPattern, experts, find_plan
from permtriton.calibration import channel_norms, hessians
from permtriton.config import LearnConfig
from permtriton.errors import VerificationError
from permtriton.experts import (
    Routing,
    UnstackedExperts,
    restack_experts,
    stacked_name,
    unstack_experts,
    unstacked_experts,
)
from permtriton.forward import last_hidden_state
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.passes import verify
from permtriton.passes.fold import fold
from permtriton.passes.verify import check_weight
from permtriton.plan import Plan, linear_module
from permtriton.progress import NoProgress

from . import zoo

PATTERN = NMPattern(2, 4)
EXPERTS = 5
NAMES = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
PLAIN = ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe"]
plain = pytest.mark.parametrize("name", PLAIN)


@functools.cache
def _plan(name: str) -> Plan:
    model = zoo.build_mixture(name)
    unstack_experts(model)
    return find_plan(model, PATTERN)


def unstacked(name: str):
    """A model with its experts as linears, and its plan; the trace is made once for all tests."""
    model = zoo.build_mixture(name)
    unstack_experts(model)
    return model, copy.deepcopy(_plan(name))


class Stack(nn.Module):
    """Experts as transformers stores them, in a class of nobody's."""

    def __init__(self, experts=3, hidden=8, intermediate=12, scale=1.0):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, intermediate))
        self.act_fn, self.scale = ACT2FN["silu"], scale

    def forward(self, hidden_states, top_k_index, top_k_weights):
        rows = []
        for token, index, weights in zip(hidden_states, top_k_index, top_k_weights, strict=True):
            gate, up = (self.gate_up_proj[index] @ token).chunk(2, -1)
            states = self.act_fn(gate) * up
            rows.append(self.scale * weights @ torch.einsum("ehi,ei->eh", self.down_proj[index], states))
        return torch.stack(rows)


class Holder(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts


# -- the same function -------------------------------------------------------------------------------------------------


@plain
@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [("eager", torch.float64, 1e-9), ("eager", torch.float32, 1e-5), ("grouped_mm", torch.float32, 1e-5)],
)
def test_outputs_stay(name, implementation, dtype, tolerance):
    ids = zoo.token_ids(3)
    model = zoo.build_mixture(name, experts_implementation=implementation).to(dtype)
    before = zoo.outputs(model, ids)
    assert unstack_experts(model).names == NAMES
    assert sum(isinstance(module, UnstackedExperts) for module in model.modules()) == 2
    assert zoo.difference(before, zoo.outputs(model, ids)) <= tolerance


def test_the_exported_graph_computes_the_same():
    """Every expert on every token there, only the chosen ones in eager mode."""
    model, _ = unstacked("mixtral")
    ids = zoo.token_ids(1)
    model.config.use_cache = False
    exported = torch.export.export(model, (ids,), strict=False).module()
    with torch.no_grad():
        found = list(exported(ids).values())
    assert zoo.difference(zoo.outputs(model, ids), found) <= 1e-5


def test_experts_of_other_devices_are_left_out():
    """Expert parallelism routes to numbers past the end."""
    holder = Holder(Stack())
    unstack_experts(holder)
    tokens, index, weights = torch.randn(2, 8), torch.tensor([[0, 3], [3, 3]]), torch.rand(2, 2)
    with torch.no_grad():
        found = holder.experts(tokens, index, weights)
        alone = holder.experts(tokens, torch.tensor([[0], [1]]), torch.stack([weights[:1, 0], torch.zeros(1)]))
    assert torch.equal(found, alone)
    assert bool(found[0].any())
    assert not bool(found[1].any())


def test_weights_are_shared_and_nothing_is_copied():
    model = zoo.build_mixture("mixtral")
    stacked = {name: p.untyped_storage().data_ptr() for name, p in model.named_parameters() if p.ndim == 3}
    total = sum(p.numel() for p in model.parameters())
    original = model.get_submodule(NAMES[0])
    unstack_experts(model)
    assert sum(p.untyped_storage().size() for p in original.parameters()) == 0, "when the linears let go, it is free"
    assert sum(p.numel() for p in model.parameters()) == total
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            at = stacked[stacked_name(model, name.removesuffix(".weight"))[0]]
            assert parameter.untyped_storage().data_ptr() == at
    restack_experts(model)
    assert stacked == {name: p.untyped_storage().data_ptr() for name, p in model.named_parameters() if p.ndim == 3}


# -- the plan ----------------------------------------------------------------------------------------------------------


@plain
def test_each_expert_has_its_own_permutation(name):
    _, plan = unstacked(name)
    for owner in NAMES:
        for number in range(EXPERTS):
            (site,) = (s for s in plan.sites if s.linears == (f"{owner}.{number}.down_proj",))
            assert site.space.segments == (site.channels,)
            assert not site.space.frozen
            assert plan.sites_of(site.space) == [site]
            assert {(axis.parameter, axis.dim) for axis in site.space.axes} == {
                (f"{owner}.{number}.gate_up_proj.weight", 0),
                (f"{owner}.{number}.down_proj.weight", 1),
            }


@plain
def test_the_experts_and_the_router_read_the_stream(name):
    _, plan = unstacked(name)
    readers = {axis.parameter for space in plan.spaces if space.name == "stream" for axis in space.axes if axis.reads}
    for owner in NAMES:
        first = {f"{owner}.{number}.gate_up_proj" for number in range(EXPERTS)}
        (site,) = (s for s in plan.sites if first & set(s.linears))
        assert first <= set(site.linears)
        assert site.space.name == "stream"
        router = owner.replace("experts", "gate") + ".weight"
        assert router in readers
        assert "not of a linear layer" in plan.skipped[router]
        assert {f"{linear}.weight" for linear in first} <= readers


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_nothing_is_frozen(name):
    _, plan = unstacked(name)
    assert [space.frozen for space in plan.spaces if space.frozen] == []


def test_the_plan_needs_no_weights():
    with torch.device("meta"):
        model = zoo.MIXTURES["qwen3_moe"]().eval()
    with unstacked_experts(model) as found:
        assert found.names == NAMES
        plan = find_plan(model, PATTERN)
    assert [(s.name, s.space.name) for s in plan.sites] == [(s.name, s.space.name) for s in _plan("qwen3_moe").sites]
    assert all(p.is_meta for p in model.parameters())
    assert model.get_parameter(f"{NAMES[0]}.gate_up_proj").shape == (EXPERTS, 96, zoo.HIDDEN)


@plain
def test_folding_leaves_the_outputs(name):
    model, plan = unstacked(name)
    ids, indices = zoo.token_ids(3), zoo.random_indices(plan)
    assert len(indices) > 2 * EXPERTS
    before = zoo.outputs(model, ids)
    fold(model, plan, indices)
    assert zoo.difference(before, zoo.outputs(model, ids)) <= 1e-4
    restack_experts(model)
    assert zoo.difference(before, zoo.outputs(model, ids)) <= 1e-4


# -- the original back -------------------------------------------------------------------------------------------------


def test_restacking_restores_the_original_modules():
    model = zoo.build_mixture("mixtral")
    modules = [model.get_submodule(owner) for owner in NAMES]
    parameters = dict(model.named_parameters())
    values = copy.deepcopy(model.state_dict())
    unstack_experts(model)
    restack_experts(model)
    assert all(model.get_submodule(owner) is module for owner, module in zip(NAMES, modules, strict=True))
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(values) == list(model.state_dict())
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("storage", ["in place", "new"])
def test_restacking_keeps_what_changed(storage):
    """Learning gives weights a new storage, masks and folds write into the one they have."""
    model, _ = unstacked("mixtral")
    ids = zoo.token_ids(2)
    dense = zoo.outputs(model, ids)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("3.gate_up_proj.weight") or name.endswith("1.down_proj.weight"):
                if storage == "new":
                    parameter.data = parameter.data.t().contiguous().t()
                parameter.mul_(0.5)
    before = zoo.outputs(model, ids)
    assert zoo.difference(dense, before) > 1e-3
    restack_experts(model)
    assert all(p.is_contiguous() for p in model.parameters())
    assert zoo.difference(before, zoo.outputs(model, ids)) <= 1e-5


def test_pruned_linears_make_a_pruned_stack():
    model, plan = unstacked("qwen3_moe")
    with torch.no_grad():
        for _, name in plan.linears():
            weight = linear_module(model, name).weight
            weight.masked_fill_(~top_n_mask(weight.abs().t().float(), 2, 4).t(), 0).add_(0.0)
    restack_experts(model)
    seen = {name: stacked_name(model, name) for _, name in plan.linears()}
    stacks = {stack[0] for stack in seen.values() if stack}
    assert stacks == {f"{owner}.{projection}" for owner in NAMES for projection in ("gate_up_proj", "down_proj")}
    for name in stacks:
        weight = model.get_parameter(name).detach()
        assert weight.ndim == 3
        assert float((weight == 0).float().mean()) == 0.5
        check_weight(name, weight.flatten(0, 1), PATTERN)


class _Interrupted:
    """Calls a function of `experts`, but raises in place of, or just after, one of the calls."""

    def __init__(self, monkeypatch, name, number, after=False):
        self._function, self._left, self._after = getattr(experts, name), number, after
        monkeypatch.setattr(experts, name, self)

    def __call__(self, *args):
        self._left -= 1
        if self._left == 0 and not self._after:
            raise KeyboardInterrupt
        result = self._function(*args)
        if self._left == 0:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize(
    ("name", "number", "after"),
    [
        ("_mismatch", 2, False),
        ("_release", 1, False),
        ("_release", 1, True),
        ("_release", 2, True),
        ("_place", 1, False),
        ("_place", 1, True),
        ("_place", 2, True),
        ("unstack_experts", 1, True),
    ],
)
def test_an_interrupt_while_unstacking_leaves_the_model(monkeypatch, name, number, after):
    model, ids = zoo.build_mixture("mixtral"), zoo.token_ids(2)
    modules, parameters, before = list(model.modules()), dict(model.named_parameters()), zoo.outputs(model, ids)
    values = copy.deepcopy(model.state_dict())
    with monkeypatch.context() as patch:
        _Interrupted(patch, name, number, after)
        with pytest.raises(KeyboardInterrupt), unstacked_experts(model):
            pytest.fail("it was not interrupted")
    assert list(model.modules()) == modules
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())
    assert zoo.difference(before, zoo.outputs(model, ids)) == 0
    assert unstack_experts(model).names == NAMES, "and it may be tried again"


@pytest.mark.parametrize(
    ("name", "number"), [("_stack", 1), ("_stack", 2), ("_stack", 4), ("_place", 1), ("_place", 2)]
)
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_while_restacking_loses_nothing(monkeypatch, name, number, after):
    model, _ = unstacked("mixtral")
    ids = zoo.token_ids(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter * 1.01
    before = zoo.outputs(model, ids)
    with monkeypatch.context() as patch:
        _Interrupted(patch, name, number, after)
        with pytest.raises(KeyboardInterrupt):
            restack_experts(model)
    assert zoo.difference(before, zoo.outputs(model, ids)) <= 1e-5
    restack_experts(model)
    assert not any(isinstance(module, UnstackedExperts) for module in model.modules())
    assert zoo.difference(before, zoo.outputs(model, ids)) <= 1e-5


def test_a_model_that_is_a_stack_itself_stays():
    stack = Stack()
    assert unstack_experts(stack).names == ()
    assert stack.gate_up_proj.numel() > 0


def test_restacking_copies_one_layer_at_a_time(monkeypatch):
    """Learning leaves every linear with a storage of its own; two models' worth of experts may not fit."""
    layers = 4
    model = nn.ModuleList(Holder(Stack()) for _ in range(layers))
    stacks = [parameter for holder in model for parameter in holder.experts.parameters()]
    unstack_experts(model)
    linears = [parameter for name, parameter in model.named_parameters()]
    for parameter in linears:
        parameter.data = parameter.data.clone()
    total, held, stack = sum(p.nbytes for p in linears), [], torch.stack

    def stacked(weights):
        result = stack(weights)
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in (*linears, *stacks, result)}
        held.append(sum(storages.values()))
        return result

    monkeypatch.setattr(torch, "stack", stacked)
    restack_experts(model)
    assert len(held) == 2 * layers
    assert max(held) <= total * (1 + 1 / layers)
    assert sum(p.untyped_storage().nbytes() for p in linears) == 0


def test_one_table_of_tolerances():
    assert verify.TOLERANCE is experts.TOLERANCE


def test_an_error_inside_leaves_the_original_modules():
    model = zoo.build_mixture("mixtral")
    with pytest.raises(ZeroDivisionError), unstacked_experts(model):
        raise ZeroDivisionError
    assert not any(isinstance(module, UnstackedExperts) for module in model.modules())


def test_inside_another_unstacking_nothing_happens():
    model = zoo.build_mixture("mixtral")
    with unstacked_experts(model):
        with unstacked_experts(model) as inner:
            assert inner.names == ()
        assert isinstance(model.get_submodule(NAMES[0]), UnstackedExperts)
    assert not isinstance(model.get_submodule(NAMES[0]), UnstackedExperts)


def test_a_module_that_two_layers_share_stays_shared():
    stack = Stack()
    model = nn.ModuleList([Holder(stack), Holder(stack)])
    unstack_experts(model)
    assert model[0].experts is model[1].experts
    assert isinstance(model[0].experts, UnstackedExperts)
    restack_experts(model)
    assert model[0].experts is stack
    assert model[1].experts is stack


def test_names():
    model = zoo.build_mixture("mixtral")
    linear = f"{NAMES[1]}.3.gate_up_proj"
    for _ in range(2):
        assert stacked_name(model, linear) == (f"{NAMES[1]}.gate_up_proj", 3)
        assert stacked_name(model, "model.layers.1.self_attn.q_proj") is None
        assert stacked_name(model, "model.layers.1.mlp.down_proj") is None
        assert stacked_name(model, "nowhere.0.down_proj") is None
        unstack_experts(model)
    assert stacked_name(zoo.build("llama"), "model.layers.0.mlp.down_proj") is None


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_transposed_experts_with_biases_stay_and_are_told():
    model = zoo.build_mixture("gpt_oss")
    modules = list(model.modules())
    found = unstack_experts(model)
    assert found.names == ()
    assert list(model.modules()) == modules
    reason = found.refused[f"{NAMES[0]}.gate_up_proj"]
    assert "GptOssExperts" in reason
    assert "transposed" in reason
    assert "biases" in reason
    assert "interleaved" in reason
    assert len(found.refused) == 4


def _with(**changes):
    stack = Stack()
    for name, value in changes.items():
        setattr(stack, name, value)
    return stack


class _OtherCall(Stack):
    def forward(self, x, routing):
        return x


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Stack(scale=2.0), "other outputs"),
        (lambda: _with(down_proj=nn.Parameter(torch.randn(3, 12, 8))), "do not fit together"),
        (lambda: _with(down_proj=nn.Parameter(torch.randn(4, 8, 12))), "do not fit together"),
        (lambda: _with(down_proj_bias=nn.Parameter(torch.randn(3, 8))), "it holds"),
        (lambda: _with(act_fn=None), "act_fn"),
        (lambda: _with(has_gate=False), "no gate"),
        (lambda: _with(is_transposed=True), "transposed"),
        (lambda: _OtherCall(), "called in another way"),
        (lambda: _with(gate_up_proj=nn.Parameter(torch.zeros(3, 24, 8, dtype=torch.int8), False)), "torch.int8"),
    ],
)
def test_what_does_not_match_is_refused(make, reason):
    holder = Holder(make())
    before = holder.experts
    found = unstack_experts(holder)
    assert found.names == ()
    assert holder.experts is before
    assert reason in found.refused["experts.gate_up_proj"]
    assert unstack_experts(Holder(Stack())).names == ("experts",), "and the plain one is not"


def test_other_3d_weights_are_no_experts():
    found = unstack_experts(nn.Sequential(nn.Conv1d(4, 4, 3), nn.MultiheadAttention(8, 2)))
    assert found.names == ()
    assert found.refused == {}


# -- routing -----------------------------------------------------------------------------------------------------------


@plain
def test_replayed_routing_leaves_only_rounding(name):
    """In bfloat16 a token may go elsewhere when the same sums are taken in another order."""
    model = zoo.build_mixture(name).bfloat16()
    ids, routing = zoo.token_ids(8), Routing(model)
    with routing.recorded():
        before = zoo.outputs(model, ids)
    unstack_experts(model)
    with routing.replayed():
        after = zoo.outputs(model, ids)
    assert zoo.difference(before, after) <= 0.1
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_replaying_sends_tokens_where_they_went():
    holder = Holder(Stack())
    routing, tokens = Routing(holder), torch.randn(8, 8)
    index, weights = torch.tensor([[0, 1]] * 8), torch.rand(8, 2)
    other = torch.cat([torch.tensor([[2, 1]]), index[1:]])
    with torch.no_grad():
        with routing.recorded():
            expected = holder.experts(tokens, index, weights)
        unstack_experts(holder)
        assert not torch.allclose(holder.experts(tokens, other, weights)[0], expected[0], rtol=1e-3)
        with routing.replayed():
            assert torch.allclose(holder.experts(tokens, other, weights), expected, rtol=1e-4, atol=1e-4)


def test_another_router_is_found_out():
    model, _ = unstacked("mixtral")
    ids, routing = zoo.token_ids(4), Routing(model)
    with routing.recorded():
        zoo.outputs(model, ids)
    router = model.get_parameter("model.layers.1.mlp.gate.weight")
    router.data = router.data.roll(1, dims=1)
    with pytest.raises(VerificationError, match="choices of experts"), routing.replayed():
        zoo.outputs(model, ids)


# -- statistics --------------------------------------------------------------------------------------------------------


class _Heard(NoProgress):
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)


def starve(model, number: int) -> None:
    """Keeps the router of the first layer from sending tokens to an expert."""
    gate = model.get_submodule("model.layers.0.mlp.gate")
    gate.register_forward_hook(
        lambda _m, _i, output: (*output[:2], torch.where(output[2] == number, (number + 1) % EXPERTS, output[2]))
    )


def test_statistics_are_of_what_each_expert_reads():
    model, plan = unstacked("mixtral")
    ids = zoo.token_ids(4)
    seen = {}
    experts = model.get_submodule(NAMES[0])
    experts.register_forward_pre_hook(lambda _m, inputs: seen.update(all=inputs[0], index=inputs[1]))
    experts[0]["down_proj"].register_forward_pre_hook(lambda _m, inputs: seen.update(first=inputs[0]))
    norms = channel_norms(model, plan.sites, ids, 4, NoProgress())
    layer = plan.layers()[0]
    found = hessians(model, layer, ids, 4, lambda *_: None)
    last_hidden_state(model, ids)
    assert 0 < seen["first"].shape[0] < seen["all"].shape[0] == ids.numel()
    for site in layer:
        inputs = {f"{NAMES[0]}.0.gate_up_proj": "all", f"{NAMES[0]}.0.down_proj": "first"}.get(site.linears[0])
        if inputs:
            expected = seen[inputs].detach()
            assert torch.allclose(found[site.name], expected.T @ expected, rtol=1e-4, atol=1e-4)
            assert torch.allclose(norms[site.name], (expected.square().sum(0) / 4).sqrt(), rtol=1e-4)


def test_a_pass_ends_where_every_site_was_seen():
    model, plan = unstacked("mixtral")
    starve(model, 2)
    reached = []
    model.get_submodule("model.layers.1").register_forward_pre_hook(lambda *_: reached.append(1))
    hessians(model, plan.layers()[0], zoo.token_ids(2), 2, lambda *_: None)
    assert reached == []


@pytest.mark.parametrize("number", [0, 2])
def test_an_expert_that_no_token_reaches_is_scored_by_size(number):
    model, plan = unstacked("mixtral")
    starve(model, number)
    ids, told = zoo.token_ids(4), _Heard()
    norms = channel_norms(model, plan.sites, ids, 4, told)
    found = hessians(model, plan.layers()[0], ids, 4, lambda *_: None)
    name = f"{NAMES[0]}.{number}.down_proj"
    assert bool((norms[name] == 1).all())
    assert torch.equal(found[name], torch.eye(zoo.INTERMEDIATE))
    assert [text.split(":")[0] for text in told.said] == [name]
    others = [n for n in found if n != name]
    assert all(bool((norms[n] != 1).any()) and not torch.equal(found[n], torch.eye(len(found[n]))) for n in others)


def test_an_expert_that_no_token_reaches_is_pruned_by_size_with_an_update():
    model, _ = unstacked("mixtral")
    starve(model, 2)
    name = f"{NAMES[0]}.2.down_proj"
    config = CompileConfig(importance="wanda", permutation="none", weight_update="sparsegpt")
    dense = linear_module(model, name).weight.detach().clone()
    permtriton.compile(model, config=config, ids=zoo.token_ids(4))
    expected = dense * top_n_mask(dense.abs().t(), 2, 4).t()
    assert torch.allclose(linear_module(model, name).weight, expected, atol=1e-6)


# -- the pipeline ------------------------------------------------------------------------------------------------------

RECIPES = {
    "heuristic": CompileConfig(importance="ria", permutation="heuristic"),
    "learned": CompileConfig(
        importance="wanda", permutation="learned", learn=LearnConfig(epochs=1, batch_size=4, block_size=16)
    ),
    "sparsegpt": CompileConfig(importance="obs", permutation="heuristic", weight_update="sparsegpt"),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_whole_pipeline(name, recipe):
    model, ids = zoo.build_mixture(name), zoo.token_ids(8)
    with unstacked_experts(model) as found:
        compiled = permtriton.compile(model, config=RECIPES[recipe], ids=ids)
        before = zoo.outputs(model, ids)
    assert found.names == NAMES
    assert zoo.difference(before, zoo.outputs(model, ids)) <= 1e-4
    moved = {space["name"] for space in compiled.report["spaces"] if space["moved"]}
    assert sum(".experts." in space for space in moved) >= EXPERTS
    assert "stream" in moved
    for owner in NAMES:
        for projection in ("gate_up_proj", "down_proj"):
            check_weight(owner, model.get_parameter(f"{owner}.{projection}").detach().flatten(0, 1), PATTERN)

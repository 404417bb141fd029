"""The residual stream that a linear writes into, and the module that reads it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.architectures import tiny
from permtriton import NMPattern
from permtriton.data.samples import Samples
from permtriton.methods.measure.statistics import output_change, watch_inputs
from permtriton.model.experts import unstacked_experts
from permtriton.passes.graph import WEIGHT_PRODUCTS, module_path
from permtriton.passes.plan import Plan, linear_module
from permtriton.passes.residual import residual_finder
from permtriton.passes.trace import export_program, unlifted
from permtriton.running.layer_walk import from_model

from . import zoo
from .zoo import find_plan

WIDTH = 12


class Pair(nn.Module):
    """Computes with the output of its own linear."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


class Block(nn.Module):
    """A norm, two linears, and what a test makes of them."""

    def __init__(self, forward: Callable[["Block", Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.aside = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.1)
        self.pair = Pair()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def branch(block: Block, x: Tensor) -> Tensor:
    return block.down(block.up(block.norm(x)).relu())


FOUND = {
    "before a norm": (lambda b, x: x + branch(b, x), "norm"),
    "the other way round": (lambda b, x: branch(b, x) + x, "norm"),
    "through a dropout": (lambda b, x: x + b.drop(branch(b, x)), "norm"),
    "in another shape": (lambda b, x: x.flatten(0, 1) + branch(b, x.flatten(0, 1)), "norm"),
    "cast": (lambda b, x: x + b.down(b.up(b.norm(x.to(torch.float32)))), "norm"),
    "read by a linear, before a norm at the end": (lambda b, x: b.norm(x + b.down(b.up(x).relu())), "up"),
    "the first of two readers": (lambda b, x: x + b.down(b.norm(x) * b.other(x)), "norm"),
    "scaled": (lambda b, x: x + b.scale * branch(b, x), ""),
    "with a factor": (lambda b, x: torch.add(x, branch(b, x), alpha=2), ""),
    "after a norm": (lambda b, x: x + b.other(branch(b, x)), "norm", "other"),
    "after a norm and a number": (lambda b, x: x + 0.5 * b.other(branch(b, x)), "norm", "other", 0.5),
    "after a number": (lambda b, x: x + branch(b, x) * 0.25, "norm", "", 0.25),
    "after a norm that something else reads": (lambda b, x: x + b.other(y := branch(b, x)) + y, ""),
    "after a norm of two branches": (lambda b, x: x + b.other(branch(b, x) + b.aside(b.norm(x))), ""),
    "after a norm, scaled": (lambda b, x: x + b.scale * b.other(branch(b, x)), ""),
    "with the branch beside it": (lambda b, x: x + (branch(b, x) + b.aside(b.norm(x))), ""),
    "nothing is added": (lambda b, x: branch(b, x), ""),
    "read twice": (lambda b, x: x + (y := branch(b, x)) + y.relu(), ""),
    "one row for all": (lambda b, x: x[:, :1] + branch(b, x[:, :1] + x), ""),
    "other rows": (lambda b, x: x + branch(b, x).transpose(0, 1).transpose(0, 1), ""),
    "a later reader": (lambda b, x: (y := b.down(x.relu())) + b.norm(x + y) + x, ""),
    "a constant": (lambda b, x: branch(b, x) + 1.0, ""),
    "a norm that runs twice": (lambda b, x: x + b.down(b.norm(b.up(b.norm(x)))), ""),
    "what a module made after its submodules": (lambda b, x: (y := b.pair(x)) + b.down(y), ""),
    "a parameter": (lambda b, x: branch(b, x) + b.scale, ""),
}


@pytest.mark.parametrize("case", FOUND)
@pytest.mark.slow
def test_what_the_output_is_added_to(case):
    forward, reader, *more = FOUND[case]
    norm, factor = (more + ["", 1.0][len(more) :])[:2]
    block = nn.Sequential(Block(forward)).eval()
    graph = unlifted(export_program(block, torch.randn(2, 5, WIDTH)), block).graph
    product = next(n for n in graph.nodes if n.target in WEIGHT_PRODUCTS and module_path(n) == "0.down")
    find = residual_finder(graph, block)
    found = find(product, "0")
    assert (found is not None) == bool(reader)
    if found:
        found_norm = found.norm.module if found.norm else ""
        assert (found.reader, found_norm, found.factor) == (f"0.{reader}", norm and f"0.{norm}", factor)
    assert find(product, "1") is None


@pytest.mark.parametrize(
    ("name", "writers"),
    [
        ("llama", {"self_attn.o_proj": "input_layernorm", "mlp.down_proj": "post_attention_layernorm"}),
        ("bert", {"attention.output.dense": "attention.self.query", "output.dense": "intermediate.dense"}),
        ("gemma2", {"self_attn.o_proj": "input_layernorm", "mlp.down_proj": "pre_feedforward_layernorm"}),
    ],
)
def test_architectures(name, writers):
    plan = zoo.planned(name)[1]
    for paths in {frozenset(site.layer_paths) for site in plan.sites}:
        (layer,) = paths
        sites = [site for site in plan.sites if site.layer_paths == paths and site.residual]
        found = {site.name.removeprefix(f"{layer}."): site.residual.reader.removeprefix(f"{layer}.") for site in sites}
        assert found == writers


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_what_the_stream_lacks_is_asked_of_the_output_before_its_norm(name):
    """A small change that is asked for at all channels is what the norm then makes of the output's."""
    model, plan = zoo.planned(name)
    site = next(each for each in plan.sites if each.name.endswith("0.mlp.down_proj"))
    assert bool(site.residual.norm) == (name == "gemma2")
    norm = model.get_submodule(site.residual.norm.module) if site.residual.norm else nn.Identity()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(7, site.channels, generator=generator)
    output = linear_module(model, site.linears[0])(inputs).detach()
    lacking = 1e-3 * torch.randn(output.shape, generator=generator)
    wanted = output_change(model, site, lacking, inputs)
    with torch.no_grad():
        change = norm(output + wanted) - norm(output)
    # All of it, but for the share along the output, which a norm takes away, and for what small gains leave out.
    assert float((change - lacking).norm() / lacking.norm()) < 0.5
    assert float((change * lacking).sum() / change.norm() / lacking.norm()) > 0.95


class Additions(TorchDispatchMode):
    """Notes which of the linears' outputs are added to what was seen as their residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, tuple[Tensor, Tensor]] = {}  # of the last call, until it is confirmed
        self.confirmed: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and isinstance(args[1], Tensor):
            rows = [each.flatten(0, -2) for each in args if each.ndim > 1]
            for name, pair in list(self.waiting.items()):
                if any(same(rows, order) for order in (pair, pair[::-1])):
                    self.confirmed[name] += 1
                    del self.waiting[name]
        return func(*args, **(kwargs or {}))


def same(first: list[Tensor], second: tuple[Tensor, Tensor]) -> bool:
    return len(first) == 2 and all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def unconfirmed(model: nn.Module, plan: Plan, samples: Samples) -> set[str]:
    """Runs a model, and returns the sites with a call whose output was not added to the stream that was seen of it."""
    additions, residuals, calls, handles = Additions(), {}, Counter(), []
    writers = {site.linears[0]: site.name for site in plan.sites if site.residual}
    for linear, name in writers.items():

        def note(_module, _inputs, output, name=name):
            site = next(each for each in plan.sites if each.name == name)
            norm = model.get_submodule(site.residual.norm.module) if site.residual.norm else nn.Identity()
            calls[name] += 1
            output = norm(output) if site.residual.factor == 1 else norm(output) * site.residual.factor
            additions.waiting[name] = (residuals[name], output.flatten(0, -2).clone())

        handles.append(linear_module(model, linear).register_forward_hook(note))

    def consume(site, _inputs, residual):
        if site.residual:
            residuals[site.name] = residual.flatten(0, -2).clone()

    layer = replace(from_model(model, plan.sites, samples, len(samples)), may_stop_early=False)
    with additions:
        watch_inputs(model, layer, consume, lambda *_: None)
    for handle in handles:
        handle.remove()
    assert set(calls) == set(writers.values())
    return {name for name in calls if additions.confirmed[name] != calls[name]}


# Luke adds to what a module with submodules computes; PegasusX runs a linear twice.
@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("LukeForMaskedLM", "PegasusXForConditionalGeneration", "T5ForConditionalGeneration")
        ),
    ],
)
def test_outputs_are_added_to_what_the_module_read(name):
    model = tiny.build(name).eval()
    with unstacked_experts(model):
        plan = find_plan(model, NMPattern(2, 4), skip_indivisible=True)
        assert any(site.residual for site in plan.sites)
        assert not unconfirmed(model, plan, Samples.of(tiny.inputs(model, samples=3)))


def test_a_linear_that_several_layers_run():
    """Each layer has a norm of its own, so that one module does not show what the linear's outputs are added to."""
    model = zoo.build("gpt2")
    blocks = model.transformer.h
    blocks[1].mlp = blocks[0].mlp
    plan = find_plan(model, NMPattern(2, 4))
    found = {site.name: site.residual.reader for site in plan.sites if site.residual}
    assert found == {f"transformer.h.{layer}.attn.c_proj": f"transformer.h.{layer}.ln_1" for layer in (0, 1)}
    assert not unconfirmed(model, plan, Samples.of(zoo.token_ids(3, 6)))


@pytest.mark.slow
def test_a_norm_that_is_called_by_keyword():
    model = zoo.build("llama")
    plan = find_plan(model, NMPattern(2, 4))
    for layer in model.model.layers:
        norm = layer.input_layernorm
        layer.input_layernorm = type("Caller", (nn.Module,), {"forward": lambda self, x: self.norm(hidden_states=x)})()
        layer.input_layernorm.norm = norm
    for site in plan.sites:
        if site.residual:
            reader = site.residual.reader.replace("input_layernorm", "input_layernorm.norm")
            site.residual = replace(site.residual, reader=reader)
    assert not unconfirmed(model, plan, Samples.of(zoo.token_ids(3, 6)))

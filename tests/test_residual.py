"""The residual stream that a linear writes into, and the module that reads it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.architectures import tiny
from permtriton import NMPattern, find_plan
from permtriton.data.samples import Samples
from permtriton.methods.statistics import watch_inputs
from permtriton.model.experts import unstacked_experts
from permtriton.model.plan import Plan, linear_module
from permtriton.model.trace import export, unlifted
from permtriton.passes.graph import WEIGHT_PRODUCTS, module_path
from permtriton.passes.residual import residual_readers
from permtriton.running.layer_inputs import from_model

from . import zoo
from .test_zoo import KNOWN, SAMPLE

WIDTH = 12


class Block(nn.Module):
    """A norm, two linears, and what a test makes of them."""

    def __init__(self, forward: Callable[["Block", Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.aside = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.1)
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
    "after a norm": (lambda b, x: x + b.other(branch(b, x)), ""),
    "with the branch beside it": (lambda b, x: x + (branch(b, x) + b.aside(b.norm(x))), ""),
    "nothing is added": (lambda b, x: branch(b, x), ""),
    "read twice": (lambda b, x: x + (y := branch(b, x)) + y.relu(), ""),
    "one row for all": (lambda b, x: x[:, :1] + branch(b, x[:, :1] + x), ""),
    "other rows": (lambda b, x: x + branch(b, x).transpose(0, 1).transpose(0, 1), ""),
    "a later reader": (lambda b, x: (y := b.down(x.relu())) + b.norm(x + y) + x, ""),
    "a constant": (lambda b, x: branch(b, x) + 1.0, ""),
    "a parameter": (lambda b, x: branch(b, x) + b.scale, ""),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_the_output_is_added_to(case):
    forward, expected = FOUND[case]
    block = nn.Sequential(Block(forward)).eval()
    graph = unlifted(export(block, torch.randn(2, 5, WIDTH)), block).graph
    product = next(n for n in graph.nodes if n.target in WEIGHT_PRODUCTS and module_path(n) == "0.down")
    assert residual_readers(graph)(product) == (expected and f"0.{expected}")


@pytest.mark.parametrize(
    ("name", "writers"),
    [
        ("llama", {"self_attn.o_proj": "input_layernorm", "mlp.down_proj": "post_attention_layernorm"}),
        ("gpt2", {"attn.c_proj": "ln_1", "mlp.c_proj": "ln_2"}),
        ("bert", {"attention.output.dense": "attention.self.query", "output.dense": "intermediate.dense"}),
        ("gemma2", {}),  # a norm of its own after each branch
        ("gpt_neox", {"mlp.dense_4h_to_h": "post_attention_dropout"}),  # attention and MLP are summed first
    ],
)
def test_architectures(name, writers):
    plan = zoo.planned(name)[1]
    found = {site.name.split(".", 3)[-1]: site.residual.split(".", 3)[-1] for site in plan.sites if site.residual}
    assert {name.removeprefix("0.").removeprefix("1."): found[name] for name in found} == writers


class Additions(TorchDispatchMode):
    """Notes which of the linears' outputs are added to what was seen as their residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, tuple[Tensor, Tensor]] = {}
        self.confirmed: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and isinstance(args[1], Tensor):
            rows = [each.flatten(0, -2) for each in args if each.ndim > 1]
            for name, pair in self.waiting.items():
                if any(same(rows, order) for order in (pair, pair[::-1])):
                    self.confirmed.add(name)
        return func(*args, **(kwargs or {}))


def same(first: list[Tensor], second: tuple[Tensor, Tensor]) -> bool:
    return len(first) == 2 and all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def unconfirmed(model: nn.Module, plan: Plan, samples: Samples) -> set[str]:
    """Runs a model, and returns the sites whose output was not added to the residual stream that was seen of them."""
    additions, residuals, handles = Additions(), {}, []
    writers = {site.linears[0]: site.name for site in plan.sites if site.residual}
    for linear, name in writers.items():

        def note(_module, _inputs, output, name=name):
            additions.waiting[name] = (residuals[name], output.flatten(0, -2).clone())

        handles.append(linear_module(model, linear).register_forward_hook(note))

    def consume(site, _inputs, residual):
        if site.residual:
            residuals[site.name] = residual.clone()

    layer = replace(from_model(model, plan.sites, samples, len(samples)), may_end=False)
    with additions:
        watch_inputs(model, layer, consume, lambda *_: None)
    for handle in handles:
        handle.remove()
    return set(writers.values()) - additions.confirmed


@pytest.mark.parametrize("name", [name for name in SAMPLE if "refused" not in KNOWN[name]["portable"]])
@pytest.mark.slow(but=["LlamaForCausalLM", "BartForConditionalGeneration", "MobileBertForMaskedLM"])
def test_outputs_are_added_to_what_the_module_read(name):
    model = tiny.build(name).eval()
    with unstacked_experts(model):
        plan = find_plan(model, NMPattern(2, 4), skip_indivisible=True)
        assert not unconfirmed(model, plan, Samples.of(tiny.inputs(model, samples=3)))


def test_another_module_is_not_confirmed():
    """A norm in the middle of the block reads another state of the stream."""
    model = zoo.build("llama")
    plan = find_plan(model, NMPattern(2, 4))
    writer = next(site for site in plan.sites if site.name.endswith("1.mlp.down_proj"))
    writer.residual = "model.layers.1.input_layernorm"
    assert unconfirmed(model, plan, Samples.of(zoo.token_ids(3, 6))) == {writer.name}

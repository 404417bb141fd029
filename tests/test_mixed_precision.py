"""Where a device multiplies bfloat16 faster, wide linears of float32 do so while they are trained or write text.

While weights are fitted, factors are rounded where a device does that faster; an order follows from exact products.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton import CompileConfig, config_from
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.methods.measure.statistics import hessians
from permtriton.methods.planning import plan_model
from permtriton.methods.train.distill import split_held_out
from permtriton.running.backward import checkpointed
from permtriton.running.layer_walk import from_model
from permtriton.running.mixed_precision import AMX, FEW, NARROW, exact_products, mixed_precision, rounded_products

from . import zoo
from .rounding import assert_equal_but_for_rounding
from .test_statistics import seen
from .updating import Pruned

ORDER = "heuristic,mask"
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm}


class Products(TorchDispatchMode):
    """Counts matrix products by the dtype of their factors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, function, types, positional=(), named=None):
        if function.overloadpacket in PRODUCTS:
            dtype = positional[-1].dtype
            self.counts[dtype] = self.counts.get(dtype, 0) + 1
        return function(*positional, **(named or {}))


@pytest.fixture(autouse=True)
def _unit(monkeypatch):
    """A processor that multiplies bfloat16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)


def linear_of(kind: type[nn.Module], bias: bool = True) -> nn.Module:
    """Returns a wide linear with random weights."""
    torch.manual_seed(0)
    if kind is Conv1D:
        linear = Conv1D(NARROW + 64, NARROW)
        nn.init.normal_(linear.bias)
        return linear
    return kind(NARROW, NARROW + 64, bias=bias)


@pytest.mark.parametrize(("kind", "bias"), [(nn.Linear, True), (nn.Linear, False), (Conv1D, True)])
def test_products_are_those_of_rounded_factors(kind, bias):
    linear, inputs = linear_of(kind, bias), torch.randn(2, FEW, NARROW)
    weight = linear.weight if kind is Conv1D else linear.weight.t()
    expected = (inputs.bfloat16() @ weight.bfloat16()).float() + (linear.bias if bias else 0)
    before = linear(inputs)
    with mixed_precision(linear), Products() as products:
        rounded = linear(inputs)
    assert products.counts == {torch.bfloat16: 1}
    assert rounded.dtype == torch.float32
    assert_equal_but_for_rounding(rounded, expected, dtype=torch.bfloat16)
    assert torch.equal(linear(inputs), before), "outside, nothing has changed"


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_gradients_are_those_of_float32_but_for_rounding(kind):
    exact = linear_of(kind)
    rounded = copy.deepcopy(exact)
    inputs, given = torch.randn(FEW, NARROW), torch.randn(FEW, NARROW + 64)
    gradients = []
    for linear in (exact, rounded):
        own = inputs.clone().requires_grad_()
        with mixed_precision(rounded):
            linear(own).backward(given)
        gradients.append([own.grad, linear.weight.grad, linear.bias.grad])
    for there, here in zip(*gradients, strict=True):
        assert here.dtype == torch.float32
        assert (here - there).norm() < 1e-2 * there.norm()
    assert not torch.equal(gradients[0][1], gradients[1][1])


class Own(nn.Linear):
    """A linear that computes something else."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * 2


@pytest.mark.parametrize("name", ["narrow", "of another class", "bfloat16", "float64"])
def test_what_gains_nothing_stays_as_it_is(name):
    torch.manual_seed(0)
    linear = {
        "narrow": nn.Linear(NARROW, NARROW - 1),
        "of another class": Own(NARROW, NARROW),
        "bfloat16": nn.Linear(NARROW, NARROW, dtype=torch.bfloat16),
        "float64": nn.Linear(NARROW, NARROW, dtype=torch.float64),
    }[name]
    inputs = torch.randn(FEW, NARROW, dtype=linear.weight.dtype)
    before = linear(inputs)
    with mixed_precision(linear):
        assert torch.equal(linear(inputs), before)


def test_a_processor_without_the_unit_multiplies_float32(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    linear, inputs = linear_of(nn.Linear), torch.randn(FEW, NARROW)
    before = linear(inputs)
    with mixed_precision(linear):
        assert torch.equal(linear(inputs), before)


def test_layers_that_are_computed_again_are_the_same():
    linear, inputs = linear_of(nn.Linear), torch.randn(FEW, NARROW, requires_grad=True)
    layer, gradients = nn.Sequential(linear), []
    for layers, products in (([], 3), ([layer], 4)):
        with checkpointed(layers), mixed_precision(layer), Products() as counted:
            layer(inputs).square().sum().backward()
        assert counted.counts == {torch.bfloat16: products}
        gradients.append(linear.weight.grad)
        linear.weight.grad = None
    assert torch.equal(*gradients)


def wide() -> PreTrainedModel:
    sizes = {"hidden_size": NARROW, "intermediate_size": NARROW, "max_position_embeddings": FEW}
    return zoo.tiny_llama(num_hidden_layers=1, **sizes)


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.slow
def test_steps_multiply_as_the_config_says_and_measure_in_float32(mixed):
    pruned = Pruned(wide(), ids=zoo.tiny_ids(10, FEW))
    with Products() as products:
        pruned.loss()
    assert set(products.counts) == {torch.float32}
    with Products() as products:
        result = pruned.distill(mixed_precision=mixed)
    assert (torch.bfloat16 in products.counts) == mixed
    assert pruned.loss(split_held_out(10, 0)[1]) == pytest.approx(result.history[result.kept].held_out, rel=1e-4)


def test_a_forward_that_someone_else_replaced_is_called():
    linear, calls = linear_of(nn.Linear), []
    linear.forward = lambda inputs: calls.append(inputs) or inputs
    with mixed_precision(linear):
        linear(torch.randn(FEW, NARROW))
    assert len(calls) == 1


@pytest.mark.parametrize("shape", [(FEW - 1, NARROW), (NARROW,), (0, NARROW)])
def test_few_rows_are_multiplied_in_float32(shape):
    linear, inputs = linear_of(nn.Linear), torch.randn(shape)
    before = linear(inputs)
    with mixed_precision(linear):
        assert torch.equal(linear(inputs), before)


@pytest.mark.parametrize(("kind", "bias"), [(nn.Linear, True), (nn.Linear, False), (Conv1D, True)])
def test_fixed_weights_are_rounded_once(kind, bias):
    linear, inputs = linear_of(kind, bias), torch.randn(FEW, NARROW)
    with mixed_precision(linear):
        expected = linear(inputs)
    with mixed_precision(linear, fixed=True):
        fixed, few = linear(inputs), linear(inputs[:1])
        with torch.no_grad():
            linear.weight.zero_()
        assert torch.equal(linear(inputs), fixed)
        assert torch.equal(linear(inputs[:1]), few)
    assert_equal_but_for_rounding(fixed, expected, dtype=torch.bfloat16)


class Precisions(TorchDispatchMode):
    """Notes how float32 matrix products round."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, positional=(), named=None):
        if function.overloadpacket in PRODUCTS:
            self.seen.append(torch.get_float32_matmul_precision())
        return function(*positional, **(named or {}))


@pytest.fixture
def _amx(monkeypatch):
    """A processor that multiplies rounded factors faster."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {AMX: True}, raising=False)


@pytest.mark.usefixtures("_amx")
@pytest.mark.parametrize(("recipe", "mixed"), [(ORDER, True), ("sparsegpt", True), ("refit", True), ("refit", False)])
@pytest.mark.slow
def test_fits_round_as_the_config_says_and_orders_never(recipe, mixed):
    options = {"heuristic_row_weights": "fisher"} if recipe == ORDER else {}
    config = config_from({"mixed_precision": mixed, "importance": "obs", **options}, recipe)
    with Precisions() as products:
        compile_model(wide(), None, config, ids=Samples.of(zoo.tiny_ids(4, FEW)))
    assert set(products.seen) == ({"medium", "highest"} if mixed and recipe != ORDER else {"highest"})
    assert products.seen[-1] == torch.get_float32_matmul_precision() == "highest", "what is proved is exact"


@pytest.mark.usefixtures("_amx")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_hessians_round_only_factors_that_lose_nothing(dtype):
    model, ids = wide().to(dtype), zoo.tiny_ids(2, FEW)
    plan = plan_model(model, CompileConfig())[0]
    with Precisions() as products:
        found = hessians(model, from_model(model, plan.sites, Samples.of(ids), len(ids)), lambda *_: None)
    assert ("medium" in products.seen) == (dtype == torch.bfloat16)
    for name, inputs in seen(model, plan, ids).items():
        expected = inputs.T @ inputs
        torch.testing.assert_close(found[name].double(), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.usefixtures("_amx")
@pytest.mark.parametrize("change", ["narrow", "another processor"])
def test_products_that_gain_nothing_are_not_rounded(change, monkeypatch):
    linear = nn.Linear(NARROW, NARROW - (change == "narrow"))
    if change == "another processor":
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    with rounded_products(linear, CompileConfig()):
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("_amx")
def test_what_is_compared_is_exact():
    linear, factor = linear_of(nn.Linear), torch.full((NARROW, NARROW), 1 + 2**-12)
    with rounded_products(linear, CompileConfig()):
        assert torch.get_float32_matmul_precision() == "medium"
        with exact_products():
            assert (factor @ factor).min() >= NARROW * (1 + 2**-12)
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("trained", [False, True])
def test_a_head_that_is_not_trained_is_rounded_once(trained):
    """A trained one follows its weight."""
    model = zoo.build("llama", hidden_size=NARROW, vocab_size=NARROW)
    head, inputs = model.lm_head.requires_grad_(trained), torch.randn(FEW, NARROW, requires_grad=True)
    with mixed_precision(model):
        before = head(inputs)
        with torch.no_grad():
            head.weight.mul_(2)
        after = head(inputs)
        assert torch.equal(after, 2 * before if trained else before)  # the same call, and doubling is exact
        after.sum().backward()
    expected = head.weight.detach().bfloat16().sum(0).float() / (1 if trained else 2)
    assert_equal_but_for_rounding(inputs.grad, expected.expand_as(inputs), dtype=torch.bfloat16)

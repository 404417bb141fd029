"""What the helper makes of a function: its schema, its reference, its GPU kernel, and its gradient."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from permtriton.errors import ModelError
from permtriton.kernels import operator as module
from permtriton.kernels.norm_permute import NormVariant
from permtriton.kernels.operator import operator
from permtriton.model.modules import ChannelGather, PermutedRMSNorm


@dataclass(frozen=True)
class Affine:
    factor: Tensor
    shift: float


def _refuse_integers(x: Tensor, *_) -> None:
    if not x.is_floating_point():
        raise ModelError("integers")


CALLS = []


def _gradient(grad: Tensor, by: Affine, y: Tensor):
    def of_factor() -> Tensor:
        CALLS.append("factor")
        return (grad * (y - by.shift) / by.factor).sum()

    return {"x": grad * by.factor, "by_factor": of_factor}


@operator(
    lambda x, by, times: (x.new_empty(x.shape), x.new_empty(x.shape)),
    check=_refuse_integers,
    gradient=_gradient,
    keeps=("by", 1),
)
def try_affine(x: Tensor, by: Affine, times: int = 1) -> tuple[Tensor, Tensor]:
    """Returns the result ``times``-fold, and once."""
    y = x * by.factor + by.shift
    return y * times, y.clone()


def test_a_dataclass_becomes_its_fields():
    assert str(torch.ops.permtriton.try_affine.default._schema) == (
        "permtriton::try_affine(Tensor x, Tensor by_factor, float by_shift, SymInt times=1) -> (Tensor, Tensor)"
    )
    x, by = torch.randn(3), Affine(torch.tensor(2.0), 0.5)
    for found, times in ((try_affine(x, by), 1), (try_affine(x, by, 3), 3), (try_affine(x, times=3, by=by), 3)):
        assert torch.equal(found[0], (2 * x + 0.5) * times)
    assert torch.equal(torch.ops.permtriton.try_affine(x, by.factor, 0.5, times=4)[0], (2 * x + 0.5) * 4)
    assert try_affine.__doc__.startswith("Returns the result")


@pytest.mark.slow
def test_opcheck_and_one_graph():
    x, factor = torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    torch.library.opcheck(torch.ops.permtriton.try_affine.default, (x, factor, 0.5))
    compiled = torch.compile(lambda x: try_affine(x * 2, Affine(factor, 0.5))[0] + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), try_affine(x * 2, Affine(factor, 0.5))[0] + 1)


def test_a_call_that_torch_need_not_see_goes_to_the_launcher(monkeypatch):
    """Not while gradients are wanted, under a mode, of a subclass, or where a dataclass holds tensors."""
    monkeypatch.setattr(module, "triton", object())
    monkeypatch.setattr(module, "_has_kernels", lambda device: True)
    monkeypatch.setattr(module, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    launched = []

    @operator(lambda x, times: x.new_empty(x.shape), launcher=lambda x, times: launched.append(x) or x,
              gradient=lambda grad: {"x": grad}, keeps=())  # fmt: skip
    def try_direct(x: Tensor, times: int = 2) -> Tensor:
        return x * times

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    x = torch.ones(2)
    assert try_direct(x, 2) is try_direct(x) is x
    assert try_direct(torch.nn.Parameter(x, requires_grad=False), 2).numel() == 2
    assert len(launched) == 3
    assert torch.equal(try_direct(x, times=2), 2 * x)
    assert try_direct(torch.ones(2, requires_grad=True), 2).requires_grad
    with Mode():
        try_direct(x, 2)
    assert len(launched) == 3


def test_only_gradients_that_are_needed_are_computed():
    CALLS.clear()
    x, factor = torch.randn(3, requires_grad=True), torch.tensor(2.0)
    try_affine(x, Affine(factor, 0.5))[0].sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert CALLS == []
    try_affine(x, Affine(factor.requires_grad_(), 0.5))[0].sum().backward()
    torch.testing.assert_close(factor.grad, x.detach().sum())


def test_arguments_are_checked_on_every_way():
    by = Affine(torch.tensor(2.0), 0.5)
    for device in ("cpu", "meta"):
        with pytest.raises(ModelError, match="integers"):
            try_affine(torch.ones(3, dtype=torch.int64, device=device), by)


@pytest.fixture
def kernels(monkeypatch) -> dict:
    """What operators register with torch while a test runs, by kind of device, as if Triton were there."""
    found = {}

    class Made:
        def register_fake(self, function) -> None: ...

        def register_kernel(self, kind: str):
            return lambda function: found.update({kind: function})

    monkeypatch.setattr(torch.library, "custom_op", lambda *_, **__: Made())
    monkeypatch.setattr(module, "triton", object())
    return found


def test_the_launcher_runs_on_the_gpu_of_its_arguments_if_it_supports_them(kernels, monkeypatch):
    """Triton launches on the current device."""
    current = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *_) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", Device)
    new_enough = [True]
    monkeypatch.setattr(module, "_has_kernels", lambda device: device.type == "meta" and new_enough[0])

    def try_launch(x: Tensor, number: int) -> tuple[str, list]:
        return "reference", list(current)

    operator(
        try_launch, launcher=lambda x, number: (number, list(current)),
        supports=lambda x, number: number > 0,
    )(try_launch)  # fmt: skip
    x, meta = torch.empty(2, device="meta"), torch.device("meta")
    assert kernels["cuda"](x, 3) == (3, [meta])
    assert kernels["cuda"](x, 0) == kernels["cuda"](x[:0], 3) == ("reference", [meta])
    with pytest.raises(ModelError, match="try_launch: tensors on meta and cpu: move them to one device"):
        kernels["cuda"](x, torch.empty(2))
    new_enough[0] = False
    assert kernels["cuda"](x, 3) == ("reference", [meta])
    assert current == []
    kernels.clear()
    monkeypatch.setattr(module, "triton", None)
    operator(try_launch, launcher=try_launch)(try_launch)
    assert kernels == {}


def test_tensors_in_a_dataclass_say_which_gpu_it_is(kernels, monkeypatch):
    """Also where no parameter is itself a tensor, and where two dataclasses are on different devices."""
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(module, "_has_kernels", lambda device: True)

    def try_parts(left: Affine, right: Affine) -> float:
        return 0.0

    operator(try_parts, launcher=lambda left, right: left.shift + right.shift)(try_parts)
    here, there = torch.ones(1, device="meta"), torch.ones(1)
    assert kernels["cuda"](here, 1.0, here, 2.0) == 3.0
    with pytest.raises(ModelError, match="try_parts: tensors on meta and cpu"):
        kernels["cuda"](here, 1.0, there, 2.0)


@pytest.mark.parametrize("onnx", [False, True])
def test_a_graph_for_onnx_has_operators_of_torch_alone(monkeypatch, onnx):
    """ONNX knows no others, so that a folder of layout fused could not be written."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: onnx)
    variant = NormVariant("rms", 1e-6, 0.0)
    norm = PermutedRMSNorm(nn.Parameter(torch.rand(8)), None, torch.randperm(8), variant)
    model = nn.Sequential(norm, ChannelGather(torch.randperm(8)))
    graph = torch.export.export(model, (torch.rand(2, 8),)).graph
    assert any("permtriton" in str(node.target) for node in graph.nodes) != onnx

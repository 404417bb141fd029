"""Every operator keeps torch's rules: schema, fake results, autograd, and what torch.compile makes of it."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import nm_mask, nm_mask_backward
from permtriton.kernels.norm_permute import NormVariant, norm_permute
from permtriton.kernels.packing import pack, unpack
from permtriton.kernels.permute import permute
from permtriton.kernels.placement_gradient import placement_gradient
from permtriton.kernels.quantize import FLOAT8
from permtriton.kernels.sparse_linear import sparse_linear
from permtriton.kernels.sparse_linear_fp8 import sparse_linear_fp8
from permtriton.kernels.sparsegpt_block import sparsegpt_block
from permtriton.kernels.swap_gains import RankOneCurvature
from permtriton.kernels.tools.cases import cases_for
from permtriton.util.sparsity import NMPattern

from .kernel_inputs import block_index, factors_of

OTHER = NMPattern(3, 5)
LEAVES = {"permute": (0,), "norm_permute": (0, 1, 2), "sinkhorn": (0,), "sparse_linear": (0, 3)}

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


class Calls(TorchDispatchMode):
    """Notes the calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "permtriton":
            self.made.append((func, [one.detach() if isinstance(one, Tensor) else one for one in args]))
        return func(*args, **(kwargs or {}))


def of_cases(dtype: torch.dtype) -> list:
    """The calls of all operators that the kernels' cases make, on small shapes."""
    with Calls() as calls:
        for case in cases_for([(8, 16)], [3], dtype):
            case.run(*case.make(torch.device("cpu")))
    return calls.made


def of_other_inputs() -> list:
    """Calls with other patterns, dimensions, index dtypes, kinds of norms and forms of importance."""
    x, index = torch.rand(2, 3, 15), torch.randperm(15)
    packed = pack(torch.zeros(5, 15).index_fill(1, torch.tensor([0, 2, 6, 11]), 1.5), OTHER)
    weight, bias = torch.rand(15), torch.rand(15)
    with Calls() as calls:
        unpack(*packed, 15, OTHER)
        sparse_linear(x, *packed, torch.zeros(5), index.int(), 15, OTHER)
        in_fp8 = packed[0].to(FLOAT8), packed[1], torch.ones(5)
        sparse_linear_fp8(x, *in_fp8, torch.zeros(5), index.int(), 15, OTHER)
        permute(torch.rand(4, 5), torch.arange(4).byte(), -2)
        for kind, shift in (("rms", None), ("rms_float", None), ("layer", None), ("layer", bias)):
            norm_permute(x, weight, shift, index.byte(), NormVariant(kind, 1e-5, 1.0))
        for form in ("power 1", "power 2", "row and column"):
            factors = factors_of(form, 3, 12, torch.float32)
            nm_mask(torch.rand(3, 12), factors, block_index([8, 4]), [8, 4], NMPattern(2, 4))
        torch.ops.permtriton.assignment(torch.rand(0, 4, 4))
        torch.ops.permtriton.distances(torch.rand(2, 4, 5), torch.rand(2, 4, 5))
        torch.ops.permtriton.sinkhorn(torch.rand(0, 4, 4), 0.5, 0)
    return calls.made


def strided(value: object) -> object:
    """Returns the same numbers with another layout in memory."""
    return value.mT.contiguous().mT if isinstance(value, Tensor) and value.dim() > 1 else value


@pytest.mark.slow
def test_every_operator_passes_opcheck():
    for operator, arguments in of_cases(torch.float32):
        in_fp8 = any(isinstance(one, Tensor) and one.dtype == FLOAT8 for one in arguments)
        checks = CHECKS[in_fp8:]  # torch's check of the schema computes with the arguments, which float8 lacks
        torch.library.opcheck(operator, tuple(map(strided, arguments)), test_utils=checks)
        leaves = LEAVES.get(operator.overloadpacket.__name__, ())
        given = [
            one.clone().requires_grad_() if number in leaves and isinstance(one, Tensor) and one.numel() else one
            for number, one in enumerate(arguments)
        ]
        torch.library.opcheck(operator, tuple(given), test_utils=checks)


def test_every_operator_is_called():
    called = {operator.overloadpacket.__name__ for operator, _ in [*of_cases(torch.float32), *of_other_inputs()]}
    known = (name.split(".")[0].partition("::") for name in torch._C._dispatch_get_all_op_names())
    ours = {name for namespace, _, name in known if namespace == "permtriton" and not name.startswith("try_")}
    assert ours - called == set()


def test_empty_inputs_have_empty_results_or_zeros():
    """They run the references on every device."""
    ops, empty = torch.ops.permtriton, torch.zeros(0, 8, 8)
    assert ops.assignment(empty).shape == (0, 8)
    soft, *scales = ops.sinkhorn(empty, 0.5, 3)
    assert ops.sinkhorn_backward(soft, empty, *scales, 0.5).shape == soft.shape == (0, 8, 8)
    for shape in ((0, 5), (2, 0, 5), (3, 0)):
        assert permute(torch.empty(shape), torch.arange(shape[-1])).shape == shape
    pruned, errors = sparsegpt_block(torch.empty(8, 0), torch.eye(8), None, NMPattern(2, 4))
    assert pruned.shape == errors.shape == (8, 0)
    order = ImportanceFactors(1, torch.ones(8)), torch.arange(8)
    weight, flat = torch.empty(0, 8), RankOneCurvature(torch.empty(0), torch.ones(8))
    assert nm_mask(weight, *order, [8], NMPattern(2, 4)).shape == (0, 8)
    for gradient in (
        nm_mask_backward(weight, weight, *order, [8], 4),
        placement_gradient(weight, weight, *order, [8], NMPattern(2, 4), flat),
    ):
        assert torch.equal(gradient, torch.zeros(64))

"""The linear layer with a packed weight, and which way it takes on a GPU."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from permtriton.errors import ModelError
from permtriton.kernels import autotune, cusparselt, launch
from permtriton.kernels import sparse_linear as sparse_linear_file
from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.launch import Config
from permtriton.kernels.packing import pack
from permtriton.kernels.sparse_linear import CUSPARSELT, DENSE, MMA, routed, sparse_linear
from permtriton.util.sparsity import NMPattern

from .kernel_inputs import DTYPES, PATTERNS, TWO_FOUR, index_of, rng, sparse
from .rounding import assert_equal_but_for_rounding


@pytest.mark.parametrize(
    ("pattern", "dtype", "lead"),
    [
        *((pattern, torch.bfloat16, (2, 5)) for pattern in PATTERNS),
        *((TWO_FOUR, dtype, (2, 5)) for dtype in DTYPES[1:]),
        (TWO_FOUR, torch.float32, (0,)),
    ],
)
def test_equals_the_dense_linear_bit_for_bit(pattern, dtype, lead):
    """On a CPU it is the same call, with the weight unpacked."""
    weight = sparse(7, 3, pattern, dtype)
    channels = weight.shape[1]
    x, bias = torch.randn(*lead, channels, generator=rng(3)).to(dtype), torch.randn(7, generator=rng(4)).to(dtype)
    packed, index = pack(weight, pattern), index_of(channels)
    for b, i in ((None, None), (bias, None), (None, index), (bias, index.short())):
        ordered = x if i is None else x[..., i.long()]
        assert torch.equal(sparse_linear(x, *packed, b, i, channels, pattern), linear(ordered, weight, b))


def test_gradcheck():
    weight, index = sparse(5, 3, TWO_FOUR, torch.float64), index_of(12).byte()
    packed = pack(weight, TWO_FOUR)
    x = torch.randn(2, 3, 12, generator=rng(1), dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, generator=rng(2), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v, b: sparse_linear(v, *packed, b, index, 12, TWO_FOUR), (x, bias))
    assert torch.autograd.gradcheck(lambda v: sparse_linear(v, *packed, None, None, 12, TWO_FOUR), (x[0, 0],))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.slow
def test_compiles_without_a_break(dynamic):
    (values, positions), index = pack(sparse(5, 3, TWO_FOUR), TWO_FOUR), index_of(12)

    def run(x: Tensor) -> Tensor:
        return sparse_linear(x * 2, values, positions, None, index, 12, TWO_FOUR).cos()

    leaves = [torch.ones(3, 12, requires_grad=True) for _ in range(2)]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results = [compiled(leaves[0]), run(leaves[1])]
    for result in results:
        result.square().sum().backward()
    assert torch.equal(*results)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("x", torch.ones(2, 15), r"\[2, 15\].*expected \[\.\.\., 16\]"),
        ("x", torch.ones(2, 16).bfloat16(), "bfloat16 input"),
        ("positions", torch.zeros(4, 3, dtype=torch.uint8), "packed values of"),
    ],
)
def test_what_does_not_fit_is_refused(name, tensor, named):
    values, positions = pack(sparse(4, 4, TWO_FOUR), TWO_FOUR)
    arguments = {"x": torch.ones(2, 16), "values": values, "positions": positions, "bias": None, "index": None}
    with pytest.raises(ModelError, match=named):
        sparse_linear(**{**arguments, name: tensor}, in_features=16, pattern=TWO_FOUR)


# -- which way it takes on a GPU: the launchers replaced, the rest as it is -------------------------------------------


class Routes:
    """Stand-ins for the operators that only a GPU has; each records its name and returns the product."""

    def __init__(self, monkeypatch, weight: Tensor) -> None:
        self.weight, self.taken, self.requested = weight, [], []
        monkeypatch.setattr(autotune, "_STATE", autotune._State(choices={}))  # every call is decided anew
        monkeypatch.setattr(mma, "chosen", lambda *_: self.right)
        monkeypatch.setattr(cusparselt, "product", self.product)
        monkeypatch.setattr(sparse_linear_file, "unpack", self.unpack)
        monkeypatch.setattr(sparse_linear_file, "config_for", self.config_for)
        self.prefer, self.right = None, SimpleNamespace(launch=self.by_mma)

    def config_for(self, op, configs, shape, dtype):
        self.requested.append((op, [config.constants["ROUTE"] for config in configs], shape, dtype))
        return next((config for config in configs if config.constants["ROUTE"] == self.prefer), configs[0])

    def by_mma(self, x, values, positions, bias):
        self.taken.append(MMA)
        return linear(x, self.weight, bias)

    def product(self, x_TC, compressed, bias, out_features):
        self.taken.append(CUSPARSELT)
        assert x_TC.dim() == 2
        assert x_TC.is_contiguous()
        return linear(x_TC, self.weight, bias)

    def unpack(self, *_):
        self.taken.append(DENSE)
        return self.weight


@pytest.mark.parametrize(
    ("dtype", "tokens", "compressed", "possible"),
    [
        (torch.bfloat16, 1, True, [MMA, CUSPARSELT, DENSE]),
        (torch.bfloat16, 64, True, [MMA, CUSPARSELT, DENSE]),
        (torch.bfloat16, 65, True, [CUSPARSELT, MMA, DENSE]),
        (torch.bfloat16, 129, True, [CUSPARSELT, MMA, DENSE]),
        (torch.bfloat16, 257, True, [CUSPARSELT, DENSE]),
        (torch.bfloat16, 2, False, [MMA, DENSE]),
        (torch.bfloat16, 256, False, [MMA, DENSE]),
        (torch.bfloat16, 257, False, [DENSE]),
        (torch.float32, 16, False, [DENSE]),
        (torch.bfloat16, 0, True, [DENSE]),
    ],
)
def test_every_possible_route_gives_the_product(dtype, tokens, compressed, possible, monkeypatch):
    """The first one here is the default; the table is read only if there is a choice."""
    weight, index, bias = sparse(64, 8, TWO_FOUR, dtype), index_of(32), torch.randn(64, generator=rng(2)).to(dtype)
    packed, x = pack(weight, TWO_FOUR), torch.randn(tokens, 1, 32, generator=rng(3)).to(dtype)
    form = weight.new_zeros(64 * 32 * 9 // 16) if compressed else None
    routes = Routes(monkeypatch, weight)
    for routes.prefer in [None, *possible]:
        routes.taken.clear()
        y = routed(x, *packed, bias, index, 32, TWO_FOUR, form)
        torch.testing.assert_close(y, linear(x[..., index], weight, bias))
        assert routes.taken == [possible[0] if routes.prefer is None else routes.prefer]
    expected = ("sparse_linear_route", possible, (tokens, 64, 32), dtype)
    assert set(map(str, routes.requested)) == ({str(expected)} if len(possible) > 1 else set())


def test_a_kernel_that_is_not_right_leaves_the_choice_to_the_others(monkeypatch):
    weight = sparse(64, 8, TWO_FOUR, torch.bfloat16)
    routes, x = Routes(monkeypatch, weight), torch.ones(16, 32).bfloat16()
    routes.right = None
    with autotune.choices() as ran:
        routed(x, *pack(weight, TWO_FOUR), None, None, 32, TWO_FOUR, None)
    assert routes.taken == [DENSE]
    assert ran["route 16x64x32"] == "dense"


def test_other_patterns_are_unpacked(monkeypatch):
    weight = sparse(16, 4, NMPattern(4, 8), torch.bfloat16)
    routes = Routes(monkeypatch, weight)
    routed(torch.ones(1, 32).bfloat16(), *pack(weight, NMPattern(4, 8)), None, None, 32, NMPattern(4, 8), None)
    assert routes.taken == [DENSE]


@pytest.mark.parametrize(("tokens", "padded"), [(1, 8), (8, 8), (77, 80)])
@pytest.mark.parametrize("row", [18, 22], ids=["9/16", "padded"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_cusparselt_gets_whole_tiles_of_tokens(tokens, padded, row, with_bias, monkeypatch):
    weight = sparse(32, 8, TWO_FOUR, torch.bfloat16)
    bias = torch.randn(32, generator=rng(1)).bfloat16() if with_bias else None

    def multiply(compressed, dense_CT, bias, transpose_result, alg_id, split_k, split_k_mode):
        assert transpose_result
        assert (alg_id, split_k, split_k_mode) == (0, 1, -1)
        assert (compressed.shape, dense_CT.shape) == ((32, row), (32, padded))
        return linear(dense_CT.t(), weight, bias)

    monkeypatch.setattr(torch, "_cslt_sparse_mm", multiply)
    x = torch.randn(tokens, 32, generator=rng(2)).bfloat16()
    y = cusparselt.product(x, weight.new_zeros(32 * row), bias, 32)
    assert y.is_contiguous()
    assert_equal_but_for_rounding(y, linear(x, weight, bias))


@pytest.mark.parametrize(
    ("dtype", "shape", "device", "there", "fits"),
    [
        (torch.bfloat16, (32, 48), "cuda", True, True),
        (torch.float16, (32, 48), "cuda", True, True),
        (torch.float32, (32, 48), "cuda", True, False),
        (torch.bfloat16, (24, 48), "cuda", True, False),
        (torch.bfloat16, (32, 48), "cuda:1", True, True),
        (torch.bfloat16, (32, 48), "cpu", True, False),
        (torch.bfloat16, (32, 48), "cuda", False, False),
        (torch.bfloat16, (0, 48), "cuda", True, False),
    ],
)
def test_what_cusparselt_takes(dtype, shape, device, there, fits, monkeypatch):
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: there)
    monkeypatch.setattr(cusparselt, "has_kernels", lambda device: device.type == "cuda")
    assert cusparselt.supports(dtype, *shape, torch.device(device)) is fits


def test_a_route_is_decided_once(monkeypatch):
    """For each shape, and again where a choice is forced, or files of winners are read again."""
    routes = Routes(monkeypatch, weight := sparse(64, 8, TWO_FOUR, torch.bfloat16))
    monkeypatch.setattr(autotune, "_STATE", autotune._State())
    packed = pack(weight, TWO_FOUR)

    def run(tokens: int) -> int:
        routed(torch.ones(tokens, 32).bfloat16(), *packed, None, None, 32, TWO_FOUR, None)
        return len(routes.requested)

    assert [run(2), run(2), run(3)] == [1, 1, 2]
    routes.prefer = DENSE
    with autotune.forced({"another": Config({})}):
        assert run(2) == 3
        assert routes.taken[-1] == DENSE
    assert run(2) == 3
    autotune._STATE.forget()
    assert run(2) == 4
    assert routes.taken == [MMA, MMA, MMA, DENSE, MMA, DENSE]


def test_most_of_five_searches_choose_cusparselts_algorithm_once_per_shape(monkeypatch, tmp_path):
    """It is kept for the next process. While a graph is captured, no search could run."""
    searches, used, capturing = [], [], [True]

    class Library:
        @staticmethod
        def mm_search(*arguments):
            searches.append(arguments)
            return 7 + (len(searches) in (1, 4)), 2, 1, 40  # the first and the fourth find another one

    def multiply(compressed, dense_CT, bias, transpose_result, alg_id, split_k, split_k_mode):
        used.append(alg_id)
        return dense_CT.t()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(autotune, "_STATE", autotune._State())
    monkeypatch.setattr(torch, "_cslt_sparse_mm", multiply)
    monkeypatch.setattr(torch._C, "_cusparselt", Library, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    run = partial(cusparselt.product, compressed=torch.zeros(32 * 18).bfloat16(), bias=None, out_features=32)
    with pytest.warns(UserWarning, match="for 16x32x32 was not searched before this CUDA graph"):
        run(torch.ones(16, 32).bfloat16())
    capturing[0] = False
    for tokens in (16, 15, 9):
        run(torch.ones(tokens, 32).bfloat16())
    monkeypatch.setattr(autotune, "_STATE", autotune._State())
    run(torch.ones(16, 32).bfloat16())
    assert used == [0, 7, 7, 7, 7]
    run(torch.ones(16, 32).half())  # whose search can end in a process without a GPU
    assert used[5:] == [0]
    assert len(searches) == 5
    assert cusparselt.product(
        torch.ones(16, 32).bfloat16(),
        torch.zeros(32 * 18).bfloat16(),
        None,
        32,
        Config({"ALGORITHM": 3, "SPLIT_K": 1, "SPLIT_K_MODE": -1}),
    ).shape == (16, 32)
    assert used[6:] == [3]


def test_cusparselt_serves_the_gpu_that_a_thread_used_first(monkeypatch):
    """A rank of a group works on any GPU; on a second one in the same thread, the user is told what is slow."""
    monkeypatch.setattr(cusparselt, "_THREAD", threading.local())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch.warn_once.cache_clear()
    first, second = torch.device("cuda", 1), torch.device("cuda", 0)
    assert cusparselt.serves(first)
    assert cusparselt.serves(second)
    cusparselt._used_on(SimpleNamespace(is_cuda=True, device=first))
    cusparselt._used_on(SimpleNamespace(is_cuda=True, device=second))
    assert cusparselt.serves(torch.device("cuda"))
    with pytest.warns(UserWarning, match="here on GPU 1: on GPU 0, .* start a process for each GPU"):
        assert not cusparselt.serves(second)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cusparselt.serves, second).result()


@pytest.mark.parametrize(
    ("device", "capability", "hip", "runs"),
    [("cuda", (9, 0), None, True), ("cuda", (8, 0), None, True), ("cuda", (7, 5), None, False),
     ("cuda", (9, 4), "6.4", False), ("cpu", (9, 0), None, False)],
)  # fmt: skip
@pytest.mark.skipif(launch.triton is None, reason="triton is not installed")
def test_where_kernels_run(device, capability, hip, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert launch.has_kernels(torch.device(device)) is runs

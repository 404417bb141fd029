"""What each kernel is measured on: inputs, a call, the truth it is checked against, and the least it must move.

Tuning and benchmarks share these, so that a configuration is chosen by the very call that is reported.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from permtriton.kernels import cusparselt
from permtriton.kernels.assignment import assignment, assignment_reference
from permtriton.kernels.nm_mask import nm_mask, nm_mask_backward_reference, nm_mask_reference
from permtriton.kernels.norm_permute import norm_permute, norm_reference
from permtriton.kernels.packing import pack, unpack, unpack_reference
from permtriton.kernels.permute import permute, permute_reference
from permtriton.kernels.sinkhorn import sinkhorn_backward_reference, sinkhorn_reference
from permtriton.kernels.sparse_linear import sparse_linear
from permtriton.kernels.sparse_linear_triton import takes
from permtriton.kernels.timing import relative_error

BLOCK = 64
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One call of one kernel.

    Attributes:
        op: the kernel, and "backward" where it is that.
        shape: for people.
        dtype: of the data moved.
        make: seed -> inputs, on the device that it was made for.
        run: the call.
        reference: the same from the same inputs, in plain torch.
        error: (what came out, what should have) -> how far apart; 0 is equal.
        limit: of the error.
        bytes: that the call must move at the least, each input read once and each output written once.
        flops: that it must do, 0 where memory decides.
        tables: of configurations that it reads on a GPU, by name; the op's own where none are given.
    """

    op: str
    shape: str
    dtype: torch.dtype
    make: Callable[[int], Inputs]
    run: Callable[..., Any]
    reference: Callable[..., Any]
    error: Callable[[Any, Any], float]
    limit: float
    bytes: int
    flops: int = 0
    tables: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Returns op, shape and dtype."""
        return f"{self.op} {self.shape} {str(self.dtype).removeprefix('torch.')}"

    def check(self, seed: int = 0) -> str | None:
        """Runs it once on fresh inputs, its outputs poisoned first; returns what is wrong, or None."""
        inputs = self.make(seed)
        with torch.no_grad():
            with _poisoned():
                out = self.run(*inputs)
            found = self.error(out, self.reference(*inputs))
        return None if found <= self.limit else f"error {found:.3g}, {self.limit:.3g} is allowed"


def permute_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device, in_blocks: bool = True) -> Case:
    """A gather of channels inside blocks of 64, or anywhere."""

    def make(seed: int) -> Inputs:
        generator = _generator(seed, device)
        return _normal((rows, channels), dtype, generator), _small(_order(channels, in_blocks, generator))

    where = "in blocks" if in_blocks else "global"
    moved = 2 * rows * channels * dtype.itemsize
    return Case("permute", f"{rows}x{channels} {where}", dtype, make, permute, permute_reference, _unequal, 0, moved)


def norm_permute_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device, kind: str = "rms") -> Case:
    """RMSNorm, or LayerNorm, that writes a permuted order."""

    def make(seed: int) -> Inputs:
        generator = _generator(seed, device)
        weight = _normal((channels,), dtype, generator)
        bias = _normal((channels,), dtype, generator) if kind == "layer" else None
        return _normal((rows, channels), dtype, generator), weight, bias, _small(_order(channels, False, generator))

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
        return norm_permute(x, weight, bias, index, 1e-5, 0.0, kind)

    def reference(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
        wide = (x.double(), weight.double(), None if bias is None else bias.double())
        return norm_reference(*wide, 1e-5, 0.0, kind, index.long(), torch.float64)

    moved = 2 * rows * channels * dtype.itemsize
    return Case(
        f"norm_permute ({kind})", f"{rows}x{channels}", dtype, make, run, reference, relative_error, _rounding(dtype),
        moved, tables=("norm_permute",),
    )  # fmt: skip


def norm_permute_backward_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Case:
    """RMSNorm forward and backward, with the gradients of input and weight: 5 of the input's bytes."""

    def make(seed: int) -> Inputs:
        generator = _generator(seed, device)
        x, weight = (_normal(shape, dtype, generator).requires_grad_() for shape in ((rows, channels), (channels,)))
        return x, weight, _small(_order(channels, False, generator)), _normal((rows, channels), dtype, generator)

    @torch.enable_grad()
    def run(x: Tensor, weight: Tensor, index: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(norm_permute(x, weight, None, index, 1e-5, 0.0, "rms"), (x, weight), grad)

    @torch.enable_grad()
    def reference(x: Tensor, weight: Tensor, index: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
        y = norm_reference(wide[0], wide[1], None, 1e-5, 0.0, "rms", index.long(), torch.float64)
        return torch.autograd.grad(y, wide, grad.double())

    def error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
        return max(map(relative_error, found, expected))

    moved = 5 * rows * channels * dtype.itemsize
    return Case(
        "norm_permute forward + backward", f"{rows}x{channels}", dtype, make, run, reference, error, _rounding(dtype),
        moved, tables=("norm_permute", "norm_permute_backward"),
    )  # fmt: skip


def sinkhorn_case(blocks: int, size: int, device: torch.device, rounds: int = 5) -> Case:
    """The relaxation of a step's permutations."""

    def make(seed: int) -> Inputs:
        return (_logits(blocks, size, _generator(seed, device)),)

    def run(logits: Tensor) -> Tensor:
        return torch.ops.permtriton.sinkhorn(logits, 0.5, rounds)[0]

    def reference(logits: Tensor) -> Tensor:
        return sinkhorn_reference(logits.double(), 0.5, rounds)[0]

    moved = 2 * blocks * size * size * 4
    return Case("sinkhorn", f"{blocks}x{size}x{size}", torch.float32, make, run, reference, relative_error, 1e-4, moved)


def sinkhorn_backward_case(blocks: int, size: int, device: torch.device, rounds: int = 5) -> Case:
    """Its backward pass: gradient and logits read, gradient written, the scales read."""

    def make(seed: int) -> Inputs:
        generator = _generator(seed, device)
        logits = _logits(blocks, size, generator)
        _, rows, columns = sinkhorn_reference(logits, 0.5, rounds)
        return _normal((blocks, size, size), torch.float32, generator), logits, rows, columns

    def run(grad: Tensor, logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return torch.ops.permtriton.sinkhorn_backward(grad, logits, rows, columns, 0.5)

    def reference(grad: Tensor, logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        _, wide_rows, wide_columns = sinkhorn_reference(logits.double(), 0.5, rounds)
        return sinkhorn_backward_reference(grad.double(), logits.double(), wide_rows, wide_columns, 0.5)

    moved = (3 * size + 2 * rounds) * blocks * size * 4
    return Case(
        "sinkhorn backward", f"{blocks}x{size}x{size}", torch.float32, make, run, reference, relative_error, 1e-3, moved
    )


def assignment_case(blocks: int, size: int, device: torch.device) -> Case:
    """Hard permutations of soft ones, as in a learning step; right where every block's total is the largest one."""

    def make(seed: int) -> Inputs:
        return (sinkhorn_reference(_logits(blocks, size, _generator(seed, device)), 0.5, 5)[0].float(),)

    def total(score: Tensor, index: Tensor) -> Tensor:
        return score.double().gather(1, index.long().unsqueeze(1)).sum((1, 2))

    def error(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
        (score, index), (_, best) = found, expected
        inside = bool((index.long().sort(1).values == torch.arange(size, device=index.device)).all())
        return float((total(score, best) - total(score, index)).abs().max()) if inside else float("inf")

    return Case(
        "assignment", f"{blocks}x{size}x{size}", torch.float32, make, lambda score: (score, assignment(score)),
        lambda score: (score, assignment_reference(score)), error, 1e-4, blocks * size * (size * 4 + 4),
    )  # fmt: skip


def nm_mask_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The masked weight of a linear, stored input-major as in learning, 2:4, Wanda."""

    def run(weight: Tensor, scale: Tensor, index: Tensor, sizes: list[int], _grad: Tensor) -> Tensor:
        return nm_mask(weight, scale, None, None, 1, index, scale.new_empty(0), sizes, 2, 4, True)

    def reference(weight: Tensor, scale: Tensor, index: Tensor, sizes: list[int], _grad: Tensor) -> Tensor:
        return nm_mask_reference(weight, scale, None, None, 1, index, sizes, 2, 4)

    moved = 2 * out_features * in_features * dtype.itemsize
    make = _mask_inputs(out_features, in_features, dtype, device)
    # A score that another rounding ties with its neighbour may choose otherwise; a handful in 45 million do.
    return Case("nm_mask", f"{out_features}x{in_features}", dtype, make, run, reference, relative_error, 1e-3, moved)


def nm_mask_backward_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The gradient of the soft permutation."""

    def run(weight: Tensor, scale: Tensor, index: Tensor, sizes: list[int], grad: Tensor) -> Tensor:
        return torch.ops.permtriton.nm_mask_backward(grad, weight, scale, None, None, 1, index, sizes, 4, True)

    def reference(weight: Tensor, scale: Tensor, index: Tensor, sizes: list[int], grad: Tensor) -> Tensor:
        return nm_mask_backward_reference(
            grad.double(), weight.double(), scale.double(), None, None, 1, index, sizes, 4, True
        )

    moved = 2 * out_features * in_features * dtype.itemsize + in_features * BLOCK * 4
    flops = 2 * 2 * out_features * in_features * BLOCK
    make = _mask_inputs(out_features, in_features, dtype, device)
    return Case(
        "nm_mask backward", f"{out_features}x{in_features}", dtype, make, run, reference, relative_error, 2e-2, moved,
        flops,
    )  # fmt: skip


def unpack_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """A packed 2:4 weight made dense."""

    def make(seed: int) -> Inputs:
        return pack(two_of_four((out_features, in_features), dtype, _generator(seed, device)), 2, 4)

    def run(values: Tensor, positions: Tensor) -> Tensor:
        return unpack(values, positions, in_features, 2, 4)

    def reference(values: Tensor, positions: Tensor) -> Tensor:
        return unpack_reference(values, positions, in_features, 2, 4)

    weights = out_features * in_features
    moved = weights * dtype.itemsize * 3 // 2 + weights // 8
    return Case("packing", f"{out_features}x{in_features}", dtype, make, run, reference, _unequal, 0, moved)


def sparse_linear_case(
    tokens: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device, gather: bool = False
) -> Case:
    """A linear with a packed 2:4 weight, with a gather of its input where asked; each route that the GPU has."""

    def make(seed: int) -> Inputs:
        generator = _generator(seed, device)
        weight = two_of_four((out_features, in_features), dtype, generator)
        index = _small(_order(in_features, True, generator)) if gather else None
        there = cusparselt.supports(dtype, out_features, in_features, device)
        compressed = cusparselt.compress(weight) if there else None
        return _normal((tokens, in_features), dtype, generator), *pack(weight, 2, 4), index, compressed

    def run(x: Tensor, values: Tensor, positions: Tensor, index: Tensor | None, compressed: Tensor | None) -> Tensor:
        return sparse_linear(x, values, positions, None, index, in_features, 2, 4, compressed)

    def reference(x: Tensor, values: Tensor, positions: Tensor, index: Tensor | None, _: Tensor | None) -> Tensor:
        x = x if index is None else permute_reference(x, index)
        return x.double() @ unpack_reference(values, positions, in_features, 2, 4).double().t()

    weights = out_features * in_features
    packed = weights * dtype.itemsize // 2 + weights // 8
    moved = packed + tokens * (in_features + out_features) * dtype.itemsize
    return Case(
        "sparse_linear" + (" with gather" if gather else ""), f"{tokens} tokens {out_features}x{in_features}", dtype,
        make, run, reference, relative_error, _rounding(dtype), moved, tokens * weights,  # of the kept half
        tables=_sparse_linear_tables(tokens, in_features, dtype),
    )  # fmt: skip


def _sparse_linear_tables(tokens: int, in_features: int, dtype: torch.dtype) -> tuple[str, ...]:
    if not takes(tokens, dtype, in_features, 2, 4):
        return ("sparse_linear_route",)
    return ("sparse_linear_vector" if tokens == 1 else "sparse_linear", "sparse_linear_route")


def two_of_four(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Returns a random 2:4 weight."""
    return larger_half(_normal(shape, dtype, generator).mul_(shape[1] ** -0.5))


def larger_half(weight: Tensor) -> Tensor:
    """Returns a weight ``[O, C]`` with the smaller half of every four consecutive channels set to 0.0."""
    grouped = weight.unflatten(1, (-1, 4))
    dropped = grouped.abs().topk(2, dim=2, largest=False, sorted=False).indices
    return grouped.scatter(2, dropped, 0.0).flatten(1)


@contextmanager
def _poisoned() -> Iterator[None]:
    """Fills memory that is allocated and not written with NaN, or the largest whole number."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switches: Any = torch.utils.deterministic
    filled, switches.fill_uninitialized_memory = switches.fill_uninitialized_memory, True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        switches.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _mask_inputs(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> Callable[[int], Inputs]:
    sizes = [BLOCK] * (in_features // BLOCK) + ([in_features % BLOCK] if in_features % BLOCK else [])

    def make(seed: int) -> Inputs:
        generator = _generator(seed, device)
        weight = _normal((in_features, out_features), dtype, generator).t()
        scale = torch.rand(in_features, generator=generator, device=device) + 0.5
        grad = _normal((in_features, out_features), dtype, generator).t()
        return weight, scale, _order(in_features, True, generator), sizes, grad

    return make


def _generator(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _normal(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=generator.device, dtype=dtype)


def _logits(blocks: int, size: int, generator: torch.Generator) -> Tensor:
    return torch.eye(size, device=generator.device) + 0.5 * _normal((blocks, size, size), torch.float32, generator)


def _order(channels: int, in_blocks: bool, generator: torch.Generator) -> Tensor:
    """A permutation, inside blocks of 64 or anywhere."""
    noise = torch.rand(channels, generator=generator, device=generator.device)
    if in_blocks:
        noise += torch.arange(channels, device=generator.device) // BLOCK
    return noise.argsort()


def _small(index: Tensor) -> Tensor:
    """The index as the run-time modules hold it."""
    return index.to(torch.int16 if index.shape[0] <= 1 << 15 else torch.int32)


def _unequal(out: Tensor, expected: Tensor) -> float:
    return float((out != expected).sum()) if out.shape == expected.shape else float("inf")


def _rounding(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-4, torch.float16: 2e-3}.get(dtype, 1e-2)

"""Calls on which a kernel is checked, tuned and measured: inputs, call, reference, and the least bytes it must move.

Tuning and benchmarks use the same cases, those of `permtriton.kernels.tools.cases`, so that a configuration is chosen
by the call whose time is reported.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from permtriton.kernels.launch import Config
from permtriton.util.permutation import index_dtype
from permtriton.util.sparsity import NMPattern

BLOCK = 64
PATTERN = NMPattern(2, 4)
Arguments = tuple[Any, ...]
Shapes = Sequence[tuple[int, int]]  # output and input features of linears


def relative_error(out: Tensor | tuple[Tensor, ...], expected: Any) -> float:
    """Returns ``|out - expected| / |expected|`` in float64: the larger of the values by 2-norm and by maximum norm.

    The maximum norm shows a single wrong row among thousands. Infinite if ``out`` holds a NaN or has another shape than
    ``expected``. Of several results, the largest error.
    """
    if isinstance(out, tuple):
        return max(map(relative_error, out, expected))
    if out.shape != expected.shape:
        return math.inf
    if not out.numel():
        return 0.0
    difference, expected = out.double() - expected.double(), expected.double()
    errors = []
    for order in (2, math.inf):
        error, scale = (float(torch.linalg.vector_norm(values, order)) for values in (difference, expected))
        errors.append(error / scale if scale else error)
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


@dataclass(frozen=True)
class Case:
    """One call of one kernel."""

    op: str  # kernel, and "backward" if it is the backward pass
    shape: str  # shape, for people
    dtype: torch.dtype  # dtype of the data moved
    inputs: Callable[["Random"], Arguments]  # random numbers of a device -> inputs, on that device
    run: Callable[..., Any]  # the call
    reference: Callable[..., Any]  # the expected result from the same inputs, in plain torch
    limit: float  # largest error allowed
    bytes: int  # fewest bytes that the call can move: each input read once and each output written once
    # the configuration tables that the call reads on a GPU, by name
    tables: Mapping[str, Sequence[Config]] = field(default_factory=dict)
    flops: int = 0  # operations that the call must do; 0 if memory decides the time
    error: Callable[[Any, Any], float] = relative_error  # (result, expected result) -> distance; 0 if equal

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {str(self.dtype).removeprefix('torch.')}"

    def make(self, device: torch.device, seed: int = 0) -> Arguments:
        return self.inputs(Random(seed, device))

    def check(self, device: torch.device, seed: int = 0) -> str | None:
        """Runs the call once on fresh inputs with poisoned outputs; returns what is wrong, or None."""
        inputs = self.make(device, seed)
        with torch.no_grad():
            with _poisoned():
                out = self.run(*inputs)
            error = self.error(out, self.reference(*inputs))
        return None if error <= self.limit else f"error {error:.3g}, at most {self.limit:.3g} is allowed"


class Random:
    """Random inputs on a device; on the meta device only their shapes."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype)

    def uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.generator, device=self.device)

    def near_identity(self, blocks: int, size: int) -> Tensor:
        """Returns float32 logits ``[blocks, size, size]`` near the identity."""
        return torch.eye(size, device=self.device) + 0.5 * self.normal(blocks, size, size)

    def order(self, channels: int, in_blocks: bool) -> Tensor:
        """Returns a random permutation, inside blocks of 64 if ``in_blocks``, or else of all channels."""
        noise = self.uniform(channels)
        if in_blocks:
            noise += torch.arange(channels, device=self.device) // BLOCK
        return noise.argsort()

    def stored_order(self, channels: int, in_blocks: bool) -> Tensor:
        """Returns a permutation as `order` does, in the dtype in which modules store it."""
        return self.order(channels, in_blocks).to(index_dtype(channels))

    def two_of_four(self, out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
        """Returns a random weight ``[out_features, in_features]``, pruned to 2:4 by magnitude."""
        return larger_half(self.normal(out_features, in_features, dtype=dtype).mul_(in_features**-0.5))


def larger_half(weight: Tensor) -> Tensor:
    """Returns a weight ``[O, C]`` with the smaller half of every four consecutive channels set to 0.0."""
    grouped = weight.unflatten(1, (-1, 4))
    dropped = grouped.abs().topk(2, dim=2, largest=False, sorted=False).indices
    return grouped.scatter(2, dropped, 0.0).flatten(1)


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls ``function`` with float tensors, also those in dataclasses, widened to float64."""

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{part.name: widened(getattr(value, part.name)) for part in fields(value)})
        return value

    return lambda *inputs: function(*map(widened, inputs))


@contextmanager
def _poisoned() -> Iterator[None]:
    """Within the context, fills new memory with NaN, or the largest integer, so that what is not written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # a mode in which torch fills new memory by default
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def unequal(out: Tensor, expected: Tensor) -> float:
    """Returns the number of unequal elements; infinity if the shapes differ."""
    return float((out != expected).sum()) if out.shape == expected.shape else float("inf")


def rounding(dtype: torch.dtype) -> float:
    """Returns the relative error allowed for a dtype."""
    return {torch.float32: 1e-4, torch.float16: 2e-3}.get(dtype, 1e-2)

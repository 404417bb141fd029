"""The modules that run permuted and N:M weights: ordinary ``nn.Module``s with state dicts.

An index is a buffer in the smallest of uint8, int16 and int32 that holds its entries; the convention is that of
`permtriton.permutation`. (Indexing a tensor with uint8 would read it as a mask: the operators convert.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from permtriton.errors import ModelError
from permtriton.kernels import cusparselt
from permtriton.kernels.norm_permute import NormVariant, norm_permute
from permtriton.kernels.packing import pack, packed_shapes, unpack
from permtriton.kernels.permute import INDEX_DTYPES, permute
from permtriton.kernels.sparse_linear import sparse_linear
from permtriton.permutation import compose, is_permutation
from permtriton.sparsity import NMPattern


def index_dtype(channels: int) -> torch.dtype:
    """Returns the smallest of uint8, int16 and int32 that holds ``channels - 1``."""
    for dtype in (torch.uint8, torch.int16):
        if channels - 1 <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32


def check_index(index: Tensor, channels: int, name: str) -> None:
    """Refuses what is no permutation of ``channels`` channels. On the meta device only shape and dtype are known.

    Raises:
        ModelError: with ``name``, what was found and what was expected.
    """
    if index.dtype not in INDEX_DTYPES or index.shape != (channels,):
        raise ModelError(
            f"{name}: an index of {index.dtype} and shape {list(index.shape)}: expected whole numbers [{channels}]"
        )
    if not index.is_meta and not is_permutation(index.long()):
        raise ModelError(f"{name}: the index is no permutation: expected each of 0 to {channels - 1} exactly once")


class ChannelGather(nn.Module):
    """Brings channels into another order: ``y[..., j] = x[..., index[j]]``.

    Attributes:
        index: buffer ``[C]``.
    """

    index: Tensor

    def __init__(self, index: Tensor) -> None:
        """Takes an index ``[C]`` of any integer dtype; on the meta device its values are not checked.

        Raises:
            ModelError: ``index`` is no permutation.
        """
        super().__init__()
        _register_index(self, index, index.numel())

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``[..., C]`` of the same dtype."""
        return permute(x, self.index)

    def compose(self, index: Tensor) -> None:
        """Applies a further index ``[C]`` after the present one."""
        _compose(self, index)

    def extra_repr(self) -> str:
        return f"channels={self.index.numel()}"


class _PermutedNorm(nn.Module):
    """What both norms share; ``weight`` and ``bias`` stay in the order of the input, the index acts on the output."""

    index: Tensor
    bias: nn.Parameter | None

    def __init__(self, weight: Tensor, bias: Tensor | None, index: Tensor, variant: NormVariant) -> None:
        super().__init__()
        self.variant = variant
        self.weight = _parameter(weight)
        self.register_parameter("bias", None if bias is None else _parameter(bias))
        _register_index(self, index, weight.numel())

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns ``norm(hidden_states)[..., index]``, shaped as the input ``[..., C]``."""
        kind, eps, offset = self.variant.kind, self.variant.eps, self.variant.offset
        return norm_permute(hidden_states, self.weight, self.bias, self.index, eps, offset, kind)

    def compose(self, index: Tensor) -> None:
        """Applies a further index ``[C]`` after the present one."""
        _compose(self, index)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, kind={self.variant.kind}, eps={self.variant.eps}, offset={self.variant.offset}"


class PermutedRMSNorm(_PermutedNorm):
    """An RMS norm whose output is in the order of an index.

    Attributes:
        weight: parameter ``[C]``, in the order of the input.
        index: buffer ``[C]``.
        variant: kind "rms" or "rms_float", eps and offset.
    """

    def __init__(self, weight: Tensor, eps: float, index: Tensor, offset: float = 0.0, kind: str = "rms") -> None:
        """Shares ``weight`` where it is a Parameter.

        Raises:
            ModelError: ``index`` is no permutation of the weight's channels.
        """
        super().__init__(weight, None, index, NormVariant(kind, eps, offset))


class PermutedLayerNorm(_PermutedNorm):
    """A layer norm whose output is in the order of an index.

    Attributes:
        weight: parameter ``[C]``, in the order of the input.
        bias: parameter ``[C]`` or None, in the order of the input.
        index: buffer ``[C]``.
        variant: kind "layer", eps and offset.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, index: Tensor, offset: float = 0.0) -> None:
        """Shares ``weight`` and ``bias`` where they are Parameters.

        Raises:
            ModelError: ``index`` is no permutation of the weight's channels.
        """
        super().__init__(weight, bias, index, NormVariant("layer", eps, offset))


class SparseLinear(nn.Linear):
    """A linear layer with an N:M weight, dense with zeros or packed, and optionally a gather of its input.

    Dense it is an ``nn.Linear`` in every respect. Packed, ``weight`` is None, and the buffers ``weight_values`` and
    ``weight_positions`` hold the weight as described in `permtriton.kernels.packing`; ``weight_compressed``, no part of
    the state dict, is the form that a GPU multiplies many tokens with, see `compress`.

    Attributes:
        gather: applied to the input first, or None. The weight's columns are in the order behind it.
        pattern: the N:M pattern of the packed state; None while dense.
    """

    weight_values: Tensor
    weight_positions: Tensor
    weight_compressed: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        gather: ChannelGather | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if gather is not None:
            check_index(gather.index, in_features, "SparseLinear")
        self.gather = gather
        self.pattern: NMPattern | None = None
        self._compresses = False

    @classmethod
    def from_linear(cls, linear: nn.Linear, gather_index: Tensor | None = None) -> "SparseLinear":
        """Returns a layer that shares the Parameter objects of ``linear``.

        Args:
            linear: its weight's columns are in the order of its input, or of ``x[..., gather_index]``.
            gather_index: ``[in_features]``, or None.

        Raises:
            ModelError: ``gather_index`` is no permutation of the input channels, or the weight is parametrized.
        """
        if parametrize.is_parametrized(linear, "weight"):
            raise ModelError("a linear with a parametrized weight cannot be shared: remove the parametrization first")
        gather = None if gather_index is None else ChannelGather(_beside(linear.weight, gather_index))
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta", gather=gather)
        made.weight, made.bias = linear.weight, linear.bias
        return made.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``[..., out_features]``."""
        if self.pattern is None:
            return super().forward(x if self.gather is None else self.gather(x))
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(self.weight_values.dtype)  # as autocast does before a dense product
        index = None if self.gather is None else self.gather.index
        kept, group = self.pattern.kept, self.pattern.group
        packed = (self.weight_values, self.weight_positions)
        return sparse_linear(x, *packed, self.bias, index, self.in_features, kept, group, self.weight_compressed)

    def pack(self, pattern: NMPattern) -> "SparseLinear":
        """Goes into the packed state; `unpack` gives the same weight bit for bit. Optimizers must not hold the weight.

        Raises:
            ModelError: the weight does not have the pattern, holds -0.0 or what is not finite, or is parametrized.
        """
        self._refuse_packed()
        return self.set_packed(*pack(self.weight.detach(), pattern.kept, pattern.group), pattern)

    def prepare_packed(self, pattern: NMPattern) -> "SparseLinear":
        """Goes into the packed state with empty buffers, for a state dict to fill; on the meta device too.

        Raises:
            ModelError: the input channels are no multiple of the group.
        """
        self._refuse_packed()
        shapes = packed_shapes(self.out_features, self.in_features, pattern.kept, pattern.group)
        values = self.weight.new_empty(shapes[0], requires_grad=False)
        return self.set_packed(values, torch.empty(shapes[1], dtype=torch.uint8, device=values.device), pattern)

    def set_packed(self, values: Tensor, positions: Tensor, pattern: NMPattern) -> "SparseLinear":
        """Goes into the packed state with a weight that was packed elsewhere, whose content is trusted."""
        # None, not absent: model code asks `linear.weight` for its dtype only where it is a tensor.
        self.register_parameter("weight", None)
        self.register_buffer("weight_values", values)
        self.register_buffer("weight_positions", positions)
        self.register_buffer("weight_compressed", None, persistent=False)
        self.pattern = pattern
        return self

    def compress(self) -> "SparseLinear":
        """Adds to a packed 2:4 weight the form that cuSPARSELt multiplies, where it is there, now and after every move.

        Both forms hold the kept values: where they lie in the same order they share memory, and the layer takes 10/16
        of the dense weight's in place of 9/16. In a group with fewer nonzero weights the order may differ; then both
        are kept, and the layer takes 18/16.
        """
        if self.pattern != NMPattern(2, 4):
            return self
        self._compresses = True
        values, device = self.weight_values, self.weight_values.device
        if not cusparselt.supports(values.dtype, self.out_features, self.in_features, device):
            return self
        weight = unpack(values, self.weight_positions, self.in_features, 2, 4)
        self.weight_compressed = compressed = cusparselt.compress(weight)
        shared = compressed[: values.numel()].view_as(values)
        if torch.equal(shared, values):
            self.weight_values = shared
        return self

    def unpack(self) -> "SparseLinear":
        """Goes back to the dense state, with a new Parameter; does nothing where it is dense."""
        if self.pattern is None:
            return self
        kept, group = self.pattern.kept, self.pattern.group
        weight = unpack(self.weight_values, self.weight_positions, self.in_features, kept, group)
        del self.weight_values, self.weight_positions, self.weight_compressed
        self.weight, self.pattern, self._compresses = nn.Parameter(weight), None, False
        return self

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.pattern is None else f", packed={self.pattern}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SparseLinear":
        """Moves and casts; the compressed form is made anew where anything changed: a cast would spoil its metadata."""
        if self.pattern is None or not self._compresses:
            return super()._apply(fn, recurse)
        before, compressed, self.weight_compressed = self.weight_values, self.weight_compressed, None
        super()._apply(fn, recurse)
        if self.weight_values is before:
            self.weight_compressed = compressed
            return self
        return self.compress()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.pattern is not None and self._compresses:
            self.weight_compressed = None
            self.compress()

    def _refuse_packed(self) -> None:
        if self.pattern is not None:
            raise ModelError(f"a linear that is packed at {self.pattern} already: unpack it first")
        if parametrize.is_parametrized(self, "weight"):
            raise ModelError("a linear with a parametrized weight cannot be packed: remove the parametrization first")


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts ``module`` in the place ``name`` of ``model``, and wherever else the module of that place is shared.

    Raises:
        ModelError: the model has no module ``name``, or ``name`` is the model itself.
    """
    if not name:
        raise ModelError("the whole model cannot be replaced in itself: expected the name of a module inside it")
    try:
        old = model.get_submodule(name)
    except AttributeError as error:
        raise ModelError(f"the model has no module {name!r}: {error}") from error
    for parent in model.modules():
        for child, found in parent._modules.items():
            if found is old:
                parent._modules[child] = module


def from_norm(module: nn.Module, variant: NormVariant, index: Tensor) -> PermutedRMSNorm | PermutedLayerNorm:
    """Returns the norm that computes ``module(x)[..., index]`` and shares its Parameter objects.

    Args:
        module: a norm with a parameter ``weight`` and maybe ``bias``.
        variant: what `match_norm` found.
        index: ``[C]``, a permutation.

    Raises:
        ModelError: ``index`` is no permutation of the norm's channels.
    """
    weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
    made: PermutedRMSNorm | PermutedLayerNorm
    if variant.kind == "layer":
        made = PermutedLayerNorm(weight, bias, variant.eps, _beside(weight, index), variant.offset)
    else:
        made = PermutedRMSNorm(weight, variant.eps, _beside(weight, index), variant.offset, variant.kind)
    return made.train(module.training)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)


def _beside(weight: Tensor, index: Tensor) -> Tensor:
    """Returns the index on the weight's device, unless that is the meta device, which would lose it."""
    return index if weight.is_meta else index.to(weight.device)


def _register_index(module: nn.Module, index: Tensor, channels: int) -> None:
    check_index(index, channels, type(module).__name__)
    module.register_buffer("index", index.detach().to(index_dtype(channels), copy=True))


def _compose(module: ChannelGather | _PermutedNorm, index: Tensor) -> None:
    check_index(index, module.index.numel(), type(module).__name__)
    composed = compose(module.index.long(), index.to(module.index.device).long())
    module.index = composed.to(module.index.dtype)

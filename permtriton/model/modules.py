"""The modules that run permuted and N:M weights: ordinary ``nn.Module``s with state dicts.

An index is a buffer of uint8 or int32 (`index_dtype`); its convention is that of `permtriton.util.permutation`. The
operators convert it, because torch takes a uint8 index for a mask.
"""

from collections.abc import Callable
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from permtriton.errors import ModelError
from permtriton.kernels import cusparselt
from permtriton.kernels.norm_permute import NormVariant, norm_permute
from permtriton.kernels.packing import pack, unpack
from permtriton.kernels.permute import INDEX_DTYPES, permute
from permtriton.kernels.sparse_linear import sparse_linear
from permtriton.kernels.sparse_linear_fp8 import pack_fp8, sparse_linear_fp8, unpack_fp8
from permtriton.util.permutation import compose, index_dtype, is_permutation
from permtriton.util.sparsity import NMPattern

LINEAR_MODULES = (nn.Linear, Conv1D)  # classes of the linears that are pruned


def check_index(index: Tensor, channels: int, name: str) -> None:
    """Refuses an index that is no permutation of ``channels`` channels; on the meta device, by shape and dtype only."""
    if index.dtype not in INDEX_DTYPES or index.shape != (channels,):
        raise ModelError(
            f"{name}: the index has dtype {index.dtype} and shape {list(index.shape)}: expected integers [{channels}]"
        )
    if not index.is_meta and not is_permutation(index.long()):
        raise ModelError(f"{name}: the index is not a permutation: expected each of 0 to {channels - 1} exactly once")


class _Permuting(nn.Module):
    """A module whose weight may have an additional first dimension in a checkpoint, which marks that it permutes."""

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        # In `from_pretrained` the quantizer removes the dimension; a Trainer that resumes loads tensors as stored.
        stored, weight = state_dict.get(f"{prefix}weight"), self.weight
        permutes = is_permuted(self)
        if permutes and isinstance(weight, Tensor) and stored is not None and stored.shape == (1, *weight.shape):
            state_dict[f"{prefix}weight"] = stored.squeeze(0)
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Indexed(nn.Module):
    """A module with an index, as a buffer ``index`` ``[C]``."""

    index: Tensor

    def _register_index(self, index: Tensor, channels: int) -> None:
        check_index(index, channels, type(self).__name__)
        self.register_buffer("index", index.detach().to(index_dtype(channels), copy=True))

    def compose(self, index: Tensor) -> None:
        """Applies a further index ``[C]`` after the present one."""
        check_index(index, self.index.numel(), type(self).__name__)
        composed = compose(self.index.long(), index.to(self.index.device).long())
        self.index = composed.to(self.index.dtype)


class ChannelGather(_Indexed):
    """Permutes channels: ``y[..., j] = x[..., index[j]]``."""

    def __init__(self, index: Tensor) -> None:
        """Copies an index ``[C]`` of any integer dtype; on the meta device its values are not checked."""
        super().__init__()
        self._register_index(index, index.numel())

    def forward(self, x: Tensor) -> Tensor:
        return permute(x, self.index)

    def extra_repr(self) -> str:
        return f"channels={self.index.numel()}"


class PermutedNorm(_Permuting, _Indexed):
    """A norm that writes its output in the order of an index.

    ``weight`` and ``bias``, ``[C]``, are in the order of the input. The subclasses tell its two kinds apart.
    """

    bias: Any

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, index: Tensor, variant: NormVariant) -> None:
        """Registers ``weight`` and ``bias`` themselves, without a copy."""
        nn.Module.__init__(self)
        self.variant, self.weight = variant, weight
        # as other code expects of a layer norm of torch
        self.normalized_shape, self.eps, self.elementwise_affine = tuple(weight.shape), variant.eps, True
        self.register_parameter("bias", bias)
        self._register_index(index, weight.numel())

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns ``norm(hidden_states)[..., index]``, with the shape of the input, ``[..., C]``."""
        return norm_permute(hidden_states, self.weight, self.bias, self.index, self.variant)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, kind={self.variant.kind}, eps={self.variant.eps}, offset={self.variant.offset}"


class PermutedRMSNorm(PermutedNorm):
    """An RMS norm (kind "rms" or "rms_float")."""


class PermutedLayerNorm(PermutedNorm, nn.LayerNorm):
    """A layer norm; a subclass of torch's for ``isinstance`` tests."""


class GatheredLinear(_Permuting, nn.Linear):
    """A linear layer that may gather its input first; without a gather it does what ``nn.Linear`` does.

    Attributes:
        gather: gather of the input, or None. The weight's columns are in the order of the gather's output.
    """

    def __init__(self, *args: Any, gather: ChannelGather | None = None, **options: Any) -> None:
        """Takes the arguments of ``nn.Linear``, and a gather."""
        super().__init__(*args, **options)
        if gather is not None:
            check_index(gather.index, self.in_features, type(self).__name__)
        self.gather = gather

    @classmethod
    def from_linear(cls, linear: nn.Linear, gather_index: Tensor | None = None) -> Self:
        """Returns a layer that shares the Parameter objects of ``linear``, and its gather if it has one.

        Args:
            linear: linear whose columns are in the order of ``x[..., gather_index]``, or of ``x`` without an index.
            gather_index: index of a new gather ``[in_features]``, or None.
        """
        gather = linear.gather if isinstance(linear, GatheredLinear) else None
        if gather_index is not None:
            assert gather is None, "a linear that gathers already takes a composed index"
            gather = ChannelGather(_on_device_of(linear.weight, gather_index))
        layer = cls(linear.in_features, linear.out_features, bias=False, device="meta", gather=gather)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(as_multiplied(self, x))


def as_multiplied(linear: nn.Module, x: Tensor) -> Tensor:
    """Returns a linear's input ``[..., in_features]``, in the order of the weight's columns if the linear gathers."""
    return linear.gather(x) if isinstance(linear, GatheredLinear) and linear.gather is not None else x


class SparseLinear(GatheredLinear):
    """A linear layer whose N:M weight may be packed.

    In the packed state ``weight`` is an empty buffer, and the buffers ``weight_values`` and ``weight_positions`` hold
    the weight as described in `permtriton.kernels.packing`. ``weight_compressed``, which is not in the state dict, is
    the form of the weight in which cuSPARSELt multiplies many tokens, or None; see `compress`.

    Attributes:
        gather: gather of the input, or None; see `GatheredLinear`.
        pattern: N:M pattern of the packed weight; None in the dense state.
    """

    weight_values: Tensor
    weight_positions: Tensor
    weight_compressed: Tensor | None
    pattern: NMPattern | None = None
    _compresses = False
    # buffers of the packed weight; functions that pack a weight into them and unpack it
    _parts: tuple[str, ...] = ("weight_values", "weight_positions")
    _pack: Callable[..., tuple[Tensor, ...]] = staticmethod(pack)
    _unpack: Callable[..., Tensor] = staticmethod(unpack)

    @property
    def packed(self) -> Any:
        """The buffers of the packed weight, as arguments of the kernels."""
        return tuple(getattr(self, name) for name in self._parts)

    def forward(self, x: Tensor) -> Tensor:
        if self.pattern is None:
            return super().forward(x)
        return self.packed_product(x, self.bias, None if self.gather is None else self.gather.index)

    def packed_product(self, x: Tensor, bias: Tensor | None, index: Tensor | None) -> Tensor:
        """Returns ``x[..., index] W^T + bias`` in the packed state."""
        assert self.pattern is not None
        values, positions = self.packed
        if torch.is_autocast_enabled(x.device.type) or x.dtype.itemsize < values.dtype.itemsize:
            x = x.to(values.dtype)  # as autocast does before a dense product, and T5 in float16 before its float32 `wo`
        compressed = self.weight_compressed
        return sparse_linear(x, values, positions, bias, index, self.in_features, self.pattern, compressed)

    def pack(self, pattern: NMPattern) -> Self:
        """Packs a weight that is N:M; `unpack` restores the same weight bit for bit.

        The weight is then no Parameter any more, so no optimizer may hold it.
        """
        if self.pattern is not None:
            raise ModelError(f"this linear is packed at {self.pattern} already: unpack it first")
        return self.set_packed(pattern, *self._pack(self.weight.detach(), pattern))

    def set_packed(self, pattern: NMPattern, *parts: Tensor) -> Self:
        """Changes to the packed state with the parts of a weight that is packed already; they are not checked."""
        dtype = self.weight.dtype
        del self.weight
        # An empty buffer, because models and PEFT read the weight's dtype and device.
        self.register_buffer("weight", parts[0].new_empty(0, dtype=dtype), persistent=False)
        for name, part in zip(self._parts, parts, strict=True):
            self.register_buffer(name, part)
        self.register_buffer("weight_compressed", None, persistent=False)
        self.pattern = pattern
        return self

    def compress(self) -> Self:
        """Adds cuSPARSELt's form to a packed 2:4 weight where cuSPARSELt supports it, now and after every move or cast.

        Both forms hold the kept values. If both hold them in the same order, they share memory, and the layer takes
        10/16 of the dense weight's memory instead of 9/16. The order may differ in a group with fewer than 2 nonzero
        weights; then both forms are stored, and the layer takes 18/16.
        """
        if self.pattern != NMPattern(2, 4):
            return self
        self._compresses = True
        values, device = self.weight_values, self.weight_values.device
        if not cusparselt.supports(values.dtype, self.out_features, self.in_features, device):
            return self
        self.weight_compressed = compressed = cusparselt.compress(self._unpacked())
        shared = compressed[: values.numel()].view_as(values)
        if torch.equal(shared, values):
            self.weight_values = shared
        return self

    def unpack(self) -> Self:
        """Changes back to the dense state, with a new Parameter; does nothing in the dense state."""
        if self.pattern is None:
            return self
        weight = self._unpacked().to(self.weight.dtype)
        for name in [*self._buffers]:
            delattr(self, name)
        self.weight, self.pattern, self._compresses = nn.Parameter(weight), None, False
        return self

    def _unpacked(self) -> Tensor:
        return self._unpack(*self.packed, self.in_features, self.pattern)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.pattern is None else f", packed={self.pattern}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts the layer. If this replaces the values, the compressed form is made again.

        A cast of the compressed form itself would destroy its metadata.
        """
        if not self._compresses:
            return super()._apply(fn, recurse)
        before, compressed, self.weight_compressed = self.weight_values, self.weight_compressed, None
        super()._apply(fn, recurse)
        if self.weight_values is before:
            self.weight_compressed = compressed
            return self
        return self.compress()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self._compresses:
            self.weight_compressed = None
            self.compress()


class SparseLinearFp8(SparseLinear):
    """A linear layer whose N:M weight is packed in FP8, and whose input is quantized per token, on any device.

    ``weight_values`` is float8 e4m3 and the buffer ``weight_scale`` float32 ``[out_features]``, as
    `permtriton.kernels.sparse_linear_fp8` takes them; neither is cast with the model. `pack` rounds the weight to FP8.
    """

    weight_scale: Tensor
    _parts = ("weight_values", "weight_positions", "weight_scale")
    _pack = staticmethod(pack_fp8)
    _unpack = staticmethod(unpack_fp8)

    def packed_product(self, x: Tensor, bias: Tensor | None, index: Tensor | None) -> Tensor:
        """Returns ``x[..., index] W^T + bias`` in the packed state, in the dtype of ``x``."""
        bias = None if bias is None else bias.to(x.dtype)
        assert self.pattern is not None
        values, positions, scale = self.packed
        return sparse_linear_fp8(x, values, positions, scale, bias, index, self.in_features, self.pattern)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the layer; a cast does not change the packed weight."""
        if self.pattern is None:
            return super()._apply(fn, recurse)
        values, scale = self.weight_values, self.weight_scale
        self.weight_values, self.weight_scale = values.view(torch.uint8), scale.view(torch.int32)
        super()._apply(fn, recurse)
        self.weight_values = self.weight_values.view(values.dtype)
        self.weight_scale = self.weight_scale.view(scale.dtype)
        return self


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the module ``name`` of ``model`` by ``module``, under every name that the model has for it."""
    old = model.get_submodule(name)
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = module


def is_permuted(module: nn.Module) -> bool:
    return isinstance(module, PermutedNorm) or (isinstance(module, GatheredLinear) and module.gather is not None)


def is_packed(module: nn.Module) -> TypeGuard[SparseLinear]:
    return isinstance(module, SparseLinear) and module.pattern is not None


def from_norm(module: nn.Module, variant: NormVariant, index: Tensor) -> PermutedNorm:
    """Returns the norm that computes ``module(x)[..., index]`` and shares its Parameter objects."""
    weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
    kind: type[PermutedNorm] = PermutedLayerNorm if variant.kind == "layer" else PermutedRMSNorm
    return kind(weight, bias, _on_device_of(weight, index), variant).train(module.training)


def _on_device_of(weight: Tensor, index: Tensor) -> Tensor:
    """Returns the index on the weight's device, unless this is the meta device, on which an index loses its values."""
    return index if weight.is_meta else index.to(weight.device)

"""The model with N:M masks on its pruned linears, computed in the order that is being learned (eq. 8-9).

The stored weights do not change: each pruned linear sees its weight through a mask that follows the permutations.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton.config import CompileConfig
from permtriton.errors import CalibrationError
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import nm_mask
from permtriton.model.forward import replaced_forwards
from permtriton.model.plan import Plan, layer_modules, linear_module
from permtriton.permutation import identity
from permtriton.prune.relaxation import Relaxation, SiteBlocks
from permtriton.sparsity import NMPattern


class _MaskedWeight(nn.Module):
    """The parametrization of a pruned linear's weight.

    Args:
        importance: Importance of the weight.
        sizes: Sizes of the site's blocks, in channel order.
        pattern: N:M pattern.
        group_scale: Whether the backward softmax divides scores by the mean of their group.
        in_out: Whether the weight is stored ``[in_features, out_features]``, as by Conv1D.

    Attributes:
        index: int64 ``[in_features]``, the hard permutation; initially the identity.
        soft: The flat soft blocks that ``index`` was assigned from; empty where there is no backward pass.
    """

    def __init__(
        self, importance: ImportanceFactors, sizes: Sequence[int], pattern: NMPattern, group_scale: bool, in_out: bool
    ) -> None:
        super().__init__()
        self._importance, self._sizes, self._pattern = importance, list(sizes), pattern
        self._group_scale, self._in_out = group_scale, in_out
        self.index = identity(importance.scale.numel()).to(importance.scale.device)
        self.soft = importance.scale.new_empty(0)

    def forward(self, weight: Tensor) -> Tensor:
        oriented = weight.t() if self._in_out else weight
        masked = nm_mask(
            oriented, self._importance, self.index, self.soft, self._sizes, self._pattern, self._group_scale
        )
        return masked.t() if self._in_out else masked


class Masks:
    """The masks of all pruned linears whose order learns, set together at every step.

    Args:
        entries: Per site, its blocks and the masked weights of its linears.
    """

    def __init__(self, entries: Sequence[tuple[SiteBlocks, Sequence[_MaskedWeight]]]) -> None:
        self._entries = list(entries)
        self._soft: Sequence[Tensor] = ()
        self._leaves: list[tuple[SiteBlocks, Tensor]] = []  # per site, its soft blocks detached from the logits
        self._channels = [blocks.units.numel() for blocks, _ in entries]
        self._units = torch.cat([blocks.units for blocks, _ in entries])
        channels = [torch.arange(count, device=self._units.device) for count in self._channels]
        self._shifts = torch.cat(channels) - self._units  # constant per block, so its channels move as its units do

    @torch.no_grad()
    def set(self, index: Tensor, soft: Sequence[Tensor] | None) -> None:
        """Makes the masks of every site follow a hard permutation.

        Args:
            index: int64 ``[units of all spaces]``, as `Relaxation.assign` returns it.
            soft: The soft permutations that ``index`` was assigned from, to which `backward` sends gradients; None
                where there is no backward pass.
        """
        self._soft, self._leaves = soft or (), []
        orders = (index[self._units] + self._shifts).split(self._channels)
        leaf = torch.empty(0, device=index.device)
        for (blocks, weights), order in zip(self._entries, orders, strict=True):
            if soft is not None:
                leaf = blocks.flat(soft).detach().requires_grad_()
                self._leaves.append((blocks, leaf))
            for weight in weights:
                weight.index, weight.soft = order, leaf

    def backward(self, scale: float) -> None:
        """Propagates the gradients that the soft blocks have accumulated since `set` to the logits.

        Args:
            scale: Factor by which the loss was multiplied; the gradients are divided by it.

        Raises:
            CalibrationError: The gradients are all zero, or not finite: nothing would be learned.
        """
        grads = [torch.zeros_like(matrices) for matrices in self._soft]
        for blocks, leaf in reversed(self._leaves):
            if leaf.grad is not None:
                blocks.add_gradient(leaf.grad, grads)
        largest = float(torch.stack([grad.div_(scale).abs().amax() for grad in grads]).amax())
        if not 0 < largest < math.inf:
            raise CalibrationError(
                f"the largest gradient of the permutations is {largest}: nothing can be learned in this dtype; try "
                "--dtype float32 or bfloat16"
            )
        torch.autograd.backward(self._soft, grads)


@contextmanager
def masked_model(
    model: PreTrainedModel,
    plan: Plan,
    importances: Mapping[str, ImportanceFactors],
    relaxation: Relaxation,
    config: CompileConfig,
) -> Iterator[Masks]:
    """Inside the context, masks every pruned linear, freezes the model and recomputes activations layer by layer.

    Weights of ``nn.Linear`` are stored input-major meanwhile, so that the masks gather contiguous rows.

    Args:
        model: Dense model, its channels in base order; unchanged afterwards.
        plan: The model's plan.
        importances: Linear name -> importance, for every pruned linear.
        relaxation: Logits of the spaces that learn; the masks of all other sites keep the base order.
        config: Options.

    Yields:
        The masks of the sites that learn.
    """
    entries, pattern, group_scale = [], config.sparsity, config.learn.group_scale
    with ExitStack() as stack:
        stack.enter_context(frozen(model))
        if config.activation_checkpointing:
            stack.enter_context(checkpointed(layer_modules(model, plan)))
        for site in plan.sites:
            blocks = relaxation.blocks_of(site) if relaxation.learns(site) else None
            sizes = blocks.sizes if blocks else [pattern.group] * (site.channels // pattern.group)
            weights = []
            for name in site.linears:
                module = linear_module(model, name)
                in_out = isinstance(module, Conv1D)
                weights.append(_MaskedWeight(importances[name], sizes, pattern, group_scale, in_out))
                stack.enter_context(_parametrized(module, weights[-1], in_out))
            if blocks:
                entries.append((blocks, weights))
        yield Masks(entries)


@contextmanager
def _parametrized(module: nn.Module, masked: _MaskedWeight, in_out: bool) -> Iterator[None]:
    weight, names = module.get_parameter("weight"), list(module._parameters)
    if not in_out:
        weight.data = _turned(weight.data).t()
    parametrize.register_parametrization(module, "weight", masked, unsafe=True)
    try:
        yield
    finally:
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
        weight = module.get_parameter("weight")
        if not in_out:
            weight.data = _turned(weight.data.t())
        for name in names:  # restores their order, in which the weight has become the last
            module._parameters[name] = module._parameters.pop(name)


def _turned(matrix: Tensor) -> Tensor:
    """Returns the transpose of a matrix, contiguous and in the same memory, where a second one may not fit."""
    turned = matrix.t().contiguous()
    return matrix.contiguous().view(turned.shape).copy_(turned)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def checkpointed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the context, recomputes each layer in the backward pass.

    The switch in transformers works in training mode only, which would turn on dropout.
    """
    with replaced_forwards(layers, lambda layer: partial(checkpoint, layer.forward, use_reentrant=False)):
        yield

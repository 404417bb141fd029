"""The model with N:M masks on its pruned linears, computed in the order that is being learned (eq. 8-9).

The stored weights do not change: each pruned linear sees its weight through a mask that follows the permutations.

Where memory allows, a masked weight is kept until its order changes, through all micro-batches of a step. It is a leaf,
so autograd accumulates its gradients as for a dense model's weights. The gradient of the order is linear in these, so
it is computed once, from their sum. A step then costs as much as a step of a dense model plus one pass over all masks.
Otherwise masks and their gradients are computed whenever a linear runs.

The gradient of the order is either the change of the loss when each channel is placed at each position
(`permtriton.kernels.placement_gradient`), or the published gradient through a softmax (`permtriton.kernels.nm_mask`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import nm_mask, nm_mask_backward
from permtriton.kernels.placement_gradient import placement_gradient
from permtriton.kernels.swap_gains import RankOneCurvature
from permtriton.methods.order.relaxation import Relaxation, SiteBlocks
from permtriton.methods.run import Run
from permtriton.passes.plan import linear_module
from permtriton.running.backward import frozen
from permtriton.running.sharding import spread, twin_of
from permtriton.util import ranks
from permtriton.util.permutation import identity
from permtriton.util.sparsity import NMPattern


class _MaskedWeight(nn.Module):
    """The parametrization of a pruned linear's weight, at first with the mask of the base order.

    Args:
        sizes: sizes of the site's blocks, in channel order.
        curvature: curvature of the loss; None for the published gradient.
    """

    def __init__(
        self,
        linear: nn.Module,
        importance: ImportanceFactors,
        sizes: list[int],
        pattern: NMPattern,
        curvature: RankOneCurvature | None,
    ) -> None:
        super().__init__()
        self._weight = (linear.get_parameter("weight"),)  # in a tuple, so that it does not become a parameter
        self.in_out = isinstance(linear, Conv1D)  # whether the weight is stored ``[in_features, out_features]``
        self._importance, self._sizes, self._pattern, self._curvature = importance, sizes, pattern, curvature
        scale = importance.scale
        self.set(identity(sum(sizes)).to(scale.device), scale.new_empty(0), keep=False)

    @torch.no_grad()
    def set(self, index: Tensor, soft: Tensor, keep: bool, curved: float = 0.0) -> None:
        """Makes the mask follow ``index``, a hard permutation, int64 ``[channels]``.

        Args:
            soft: the flat soft blocks that ``index`` was assigned from, a leaf; empty where there is no backward pass.
            keep: whether to compute the masked weight now, and to keep it until the next call.
            curved: factor of the curvature, applied whenever the gradient is computed.
        """
        self.index, self.soft, self._curved = index, soft, curved
        self._kept: Tensor | None = None  # frees the last masked weight before the next one is computed
        if keep:
            self._kept = self(*self._weight).requires_grad_(soft.requires_grad)

    def forward(self, weight: Tensor) -> Tensor:
        if self._kept is not None:
            return self._kept
        masked: Tensor = _Masked.apply(self.soft, weight, self)
        return masked

    def masked(self, weight: Tensor) -> Tensor:
        return self._oriented(nm_mask(self._oriented(weight), self._importance, self.index, self._sizes, self._pattern))

    def take_gradient(self) -> Tensor | None:
        """Returns the gradient of the flat soft blocks, computed from the kept weight's gradient, which is freed.

        Returns None if no weight is kept, since autograd then computes the gradient, or for an expert without tokens.
        """
        if self._kept is None or self._kept.grad is None:
            return None
        grad, self._kept.grad = self._kept.grad, None
        return self.gradient(grad, *self._weight)

    def gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        arguments = (self._oriented(grad), self._oriented(weight), self._importance, self.index, self._sizes)
        if self._curvature is None:
            return nm_mask_backward(*arguments, self._pattern.group).to(self.soft.dtype)
        curvature = RankOneCurvature(self._curvature.row * self._curved, self._curvature.column)
        return placement_gradient(*arguments, self._pattern, curvature).to(self.soft.dtype)

    def _oriented(self, weight: Tensor) -> Tensor:
        return weight.t() if self.in_out else weight


class _Masked(torch.autograd.Function):
    """A masked weight that is not kept; only the soft blocks get a gradient."""

    @staticmethod
    def forward(ctx: Any, _soft: Tensor, weight: Tensor, mask: _MaskedWeight) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.mask = mask
        return mask.masked(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.mask.gradient(grad, *ctx.saved_tensors), None, None


class LearnedMasks:
    """The masks of all pruned linears of a model.

    Args:
        entries: for each site whose order is learned, its blocks and the masked weights of its linears.
        fixed: the masked weights of all other linears, which keep the base order.
        keep: whether masked weights are kept until their order changes, or computed whenever a linear runs: less
            memory, more time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        entries: Sequence[tuple[SiteBlocks, Sequence[_MaskedWeight]]],
        fixed: Sequence[_MaskedWeight] = (),
        keep: bool = True,
    ) -> None:
        self.model, self._entries, self.keep = model, list(entries), keep
        self._soft: Sequence[Tensor] = ()
        self._leaves: list[Tensor] = []  # for each site of ``entries``, its soft blocks detached from the logits
        for weight in fixed:
            weight.set(weight.index, weight.soft, keep)

    @torch.no_grad()
    def set(self, index: Tensor, soft: Sequence[Tensor] | None, curved: float = 0.0) -> None:
        """Makes the masks of every site whose order is learned follow a hard permutation, and drops all gradients.

        Args:
            index: as `Relaxation.assign` returns it.
            soft: the soft permutations that it was assigned from; None where there is no backward pass.
            curved: factor of the curvature each time that a weight's gradient is taken: once where masked weights are
                kept, otherwise in every backward pass.
        """
        self._soft, self._leaves, none = soft or (), [], torch.empty(0, device=index.device)
        for blocks, weights in self._entries:
            self._leaves.append(none if soft is None else blocks.flat(soft).detach().requires_grad_())
            order = blocks.order(index)
            for weight in weights:
                weight.set(order, self._leaves[-1], self.keep, curved)

    @torch.no_grad()
    def backward(self, scale: float) -> Tensor:
        """Propagates to the logits the gradients that all ranks collected since `set`, divided by ``scale``.

        Returns the largest gradient of the soft permutations, ``[]``; with 0, infinity or NaN nothing can be learned.
        """
        grads = [torch.zeros_like(matrices) for matrices in self._soft]
        for (blocks, weights), leaf in zip(self._entries, self._leaves, strict=True):
            for flat in (leaf.grad, *(weight.take_gradient() for weight in weights)):
                if flat is not None:
                    blocks.add_gradient(flat, grads)
        ranks.add_up(grads)
        largest = torch.stack([grad.div_(scale).abs().amax() for grad in grads]).amax()
        torch.autograd.backward(self._soft, grads)
        return largest


@contextmanager
def masked_model(
    run: Run,
    relaxation: Relaxation,
    curvatures: Mapping[str, RankOneCurvature] | None = None,
) -> Iterator[LearnedMasks]:
    """Inside the context, masks every pruned linear, freezes the model and applies `Run.recomputing`.

    The model is the run's, which is unchanged afterwards, or a twin whose layers are spread over the ranks.

    Weights of ``nn.Linear`` that are not spread are stored input-major meanwhile, so that masks gather contiguous rows.
    Masked weights are kept until their order changes, except where memory is short (they and their gradients take twice
    the memory of the pruned weights) or where the weights are spread over the ranks.

    Args:
        relaxation: logits of the spaces that are learned; the masks of all other sites keep the base order.
        curvatures: linear name -> curvature of the loss; None for the published gradient.
    """
    plan, importances, spread_on = run.plan, run.importances(), run.placement.spread_on
    model = run.model if spread_on is None else twin_of(run.model)
    entries, fixed = [], []
    with frozen(model), run.recomputing(model), ExitStack() as stack:
        for site in plan.sites:
            blocks = SiteBlocks(relaxation, site) if site.space.name in relaxation.first else None
            weights = []
            for name in site.linears:
                pattern, module = plan.patterns[name], linear_module(model, name)
                sizes = blocks.sizes if blocks else [pattern.group] * (site.channels // pattern.group)
                device = spread_on or module.get_parameter("weight").device
                importance = importances[name].of_rows(slice(None), device)
                curvature = curvatures[name].to(device) if curvatures else None
                weight = _MaskedWeight(module, importance, sizes, pattern, curvature)
                weights.append(weight)
                stack.enter_context(_parametrized(module, weight, weight.in_out or spread_on is not None))
            if blocks:
                entries.append((blocks, weights))
            else:
                fixed += weights
        if spread_on is not None:  # FSDP2 must see the parametrizations
            stack.enter_context(spread(model, plan, spread_on))
        yield LearnedMasks(model, entries, fixed, not run.memory.low_memory and spread_on is None)


@contextmanager
def _parametrized(module: nn.Module, masked: _MaskedWeight, as_stored: bool) -> Iterator[None]:
    weight, names = module.get_parameter("weight"), list(module._parameters)
    if not as_stored:
        weight.data = _turned(weight.data).t()
    parametrize.register_parametrization(module, "weight", masked, unsafe=True)
    try:
        yield
    finally:
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
        weight = module.get_parameter("weight")
        if not as_stored:
            weight.data = _turned(weight.data.t())
        for name in names:  # restores the order of the parameters: parametrizing has moved the weight to the end
            module._parameters[name] = module._parameters.pop(name)


def _turned(matrix: Tensor) -> Tensor:
    """Returns the contiguous transpose of a matrix, in that matrix's memory: no second matrix stays allocated."""
    turned = matrix.t().contiguous()
    return matrix.contiguous().view(turned.shape).copy_(turned)

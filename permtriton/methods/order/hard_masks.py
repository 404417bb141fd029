"""The model with hard N:M masks written into its weights, and the gradient of the loss with respect to these."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton.errors import ConfigError
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import nm_mask
from permtriton.kernels.swap_gains import RankOneCurvature, SwapTerms, swap_terms
from permtriton.methods.measure.losses import Objective
from permtriton.methods.run import Run
from permtriton.model.experts import expert_of
from permtriton.model.forward import to_numbers
from permtriton.passes.plan import ChannelSpace, Site, linear_module
from permtriton.passes.weight_folds import runs_of
from permtriton.running.backward import frozen, loss_scale
from permtriton.running.sharding import rows_of_share, share
from permtriton.util import ranks
from permtriton.util.micro_batch import MicroBatch
from permtriton.util.sparsity import NMPattern


@dataclass
class _HardMasked:
    """A pruned linear, whose parameter holds a masked weight once `HardMasks.set` has been called.

    Where weights are spread over the ranks, what has a value per output row, but for the parameter, holds only this
    rank's rows.
    """

    site: Site
    parameter: nn.Parameter
    in_out: bool  # whether the parameter is stored ``[in_features, out_features]``
    importance: ImportanceFactors
    curvature: RankOneCurvature
    pattern: NMPattern
    gradient: Tensor | None = None  # sum of the masked weight's gradients, float32 or wider; None before the first one

    def __post_init__(self) -> None:
        self.dense = self.out_in(self.parameter).clone()

    def out_in(self, stored: Tensor) -> Tensor:
        """Returns what this rank holds of the parameter, or of its gradient, as ``[out_features, in_features]``."""
        return share(stored).t() if self.in_out else share(stored)

    def add_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.total.add_(self.out_in(parameter.grad))
        parameter.grad = None

    @property
    def total(self) -> Tensor:
        """``gradient``, which is set to zeros if it is None."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.dense, dtype=torch.promote_types(self.dense.dtype, torch.float32))
        return self.gradient


class HardMasks:
    """The masks of all pruned linears; ``spread`` says whether each rank holds only some rows of the weights."""

    def __init__(self, run: Run, objective: Objective, linears: Sequence[_HardMasked]) -> None:
        self.spread = run.placement.spread_on is not None
        self._objective, self._linears, self._device = objective, linears, objective.model.device
        self._micro_batch = MicroBatch(run.config.micro_batch_size)

    @torch.no_grad()
    def set(self, indices: Mapping[str, Tensor]) -> None:
        """Masks weights by ``indices``, space -> unit index, int64 ``[units]``; other spaces keep the base order."""
        for linear in self._linears:
            site, group, importance = linear.site, linear.pattern.group, linear.importance
            # The runs of a frozen space need not consist of whole groups.
            runs = [group] * (site.channels // group) if site.space.frozen else list(runs_of(site))
            masked = nm_mask(linear.dense, importance, self._order(site, indices), runs, linear.pattern)
            linear.out_in(linear.parameter).copy_(masked)

    def _order(self, site: Site, indices: Mapping[str, Tensor]) -> Tensor:
        index = indices.get(site.space.name)
        order = torch.arange(site.channels) if index is None else site.expand(index)
        return order.to(self._device)

    def loss(self) -> float:
        return self._objective.finite(self._micro_batch.run(self._objective.mean), "loss of the search")

    @torch.enable_grad()
    def take_gradients(self, advance: Callable[[int], None] = lambda _steps: None) -> float:
        """Sums up the gradient of the mean loss with respect to each masked weight, and returns the mean loss.

        After each backward pass, ``advance`` is called with the number of its sequences.
        """
        samples = self._objective.samples
        scale, rows = loss_scale(samples.positions), torch.arange(len(samples))
        reported = 0

        def backward(size: int) -> float:
            nonlocal reported
            self.drop_gradients()
            losses, sequences_done = [], 0
            for loss, count in self._objective.backward(rows, size, scale):
                losses.append(loss)
                sequences_done += count
                advance(max(sequences_done - reported, 0))  # 0 while passes repeat after memory ran out
                reported = max(sequences_done, reported)
            return sum(to_numbers(losses))

        loss = self._objective.finite(ranks.total(self._micro_batch.run(backward)), "loss of the search")
        totals = [linear.total for linear in self._linears]
        if not self.spread:  # gradients of weights that are spread are added up already, by FSDP2
            ranks.add_up(totals)
        for total in totals:
            total.div_(scale)
        return loss

    def drop_gradients(self) -> None:
        for linear in self._linears:
            linear.gradient = linear.parameter.grad = None

    def terms(self, space: ChannelSpace, indices: Mapping[str, Tensor], damping: float) -> Iterator[SwapTerms]:
        """Yields the terms that give the gains of swapping a space's units, once per linear and copy of the units.

        The curvature counts ``damping`` times; with 0, the gains are exact to first order.
        """
        for linear in (linear for linear in self._linears if linear.site.space is space):
            curvature = RankOneCurvature(linear.curvature.row * damping, linear.curvature.column)
            order = self._order(linear.site, indices)
            terms = swap_terms(linear.dense, linear.importance, linear.total, order, linear.pattern, curvature)
            for channels in linear.site.channels_by_unit.unbind(1):
                yield terms.of_positions(channels.to(self._device))


@contextmanager
def hard_masked(
    run: Run, model: PreTrainedModel, objective: Objective, curvatures: Mapping[str, RankOneCurvature]
) -> Iterator[HardMasks]:
    """Inside the context, the pruned linears of a dense model in base order hold masked weights.

    Only these weights require gradients. ``model`` is the run's, as placed; it is unchanged afterwards.
    """
    plan, importances, linears = run.plan, run.importances(), list[_HardMasked]()
    experts = next((name for _, name in plan.linears() if expert_of(model, name) is not None), None)
    if experts is not None and run.placement.spread_on is not None:
        raise ConfigError(
            f"{experts}: the gradients of experts cannot be spread over GPUs, because not every GPU sends tokens to "
            "each: leave the step searched out, or use GPUs that hold the whole model"
        )
    with frozen(model), run.recomputing(model), ExitStack() as stack:
        for site, name in plan.linears():
            module = linear_module(model, name)
            parameter, in_out = module.get_parameter("weight"), isinstance(module, Conv1D)
            rows = rows_of_share(parameter)
            importance = importances[name].of_rows(rows, model.device)
            curvature = RankOneCurvature(curvatures[name].row[rows], curvatures[name].column)
            linear = _HardMasked(site, parameter, in_out, importance, curvature, plan.patterns[name])
            stack.enter_context(parameter.requires_grad_(True).register_post_accumulate_grad_hook(linear.add_gradient))
            linears.append(linear)
        try:
            yield HardMasks(run, objective.on(model), linears)
        finally:
            for linear in linears:
                linear.out_in(linear.parameter).copy_(linear.dense)
                linear.parameter.requires_grad_(False)
                linear.parameter.grad = None

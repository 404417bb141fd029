"""The sensitivity of the loss to each weight: the diagonal Fisher information, as two vectors per linear.

For a linear ``y = W x``, the information of ``W[o, j]`` is the sum over tokens of ``(dL/dy_o)^2 x_j^2``, where L is
random (`Loss.drawn`): for kl, its labels are drawn from the dense model's own prediction. The information is kept as
two factors, as if these were independent: the sum of squared gradients at output o, and the mean square of input j.

The rows alone are weights for the heuristic order (``--heuristic-row-weights fisher``): an N:M mask compares the
weights of one row, so a factor per row changes no mask, but the order sums scores over rows, which matter unequally.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError
from permtriton.kernels.swap_gains import RankOneCurvature
from permtriton.methods.measure.losses import LOSSES, Draw, LossKind, objective_kind
from permtriton.methods.measure.statistics import reads_every_token
from permtriton.methods.run import Run
from permtriton.model.modules import as_multiplied
from permtriton.passes.plan import linear_module, weight_in_out
from permtriton.running.backward import frozen, with_gradients
from permtriton.util import ranks
from permtriton.util.hooks import hooked
from permtriton.util.micro_batch import MicroBatch

Watch = Callable[[str, Tensor], Callable[[Tensor], None]]


def curvatures(run: Run, kind: LossKind) -> dict[str, RankOneCurvature]:
    """Returns linear name -> half the second derivative of the mean loss over all tokens, by `fisher_information`."""
    information, tokens = fisher_information(run, kind), run.samples.positions
    return {name: RankOneCurvature(own.row / (2 * tokens), own.column) for name, own in information.items()}


def row_weights(run: Run) -> dict[str, Tensor]:
    """Returns linear name -> sensitivity of the loss to each of its rows, float32 ``[out_features]``."""
    information = fisher_information(run, objective_kind("auto", run.model))
    return {name: own.row.to(run.model.device) for name, own in information.items()}


@torch.enable_grad()
def fisher_information(run: Run, kind: LossKind) -> dict[str, RankOneCurvature]:
    """Returns linear name -> Fisher information of its weights, from one backward pass over all sequences.

    The rows are sums over tokens of the squared gradient at each output, the columns means of the square of each input
    over the tokens that the linear has read: an expert reads only those routed to it. The loss is the ``drawn``
    function of ``kind`` in `permtriton.methods.measure.losses.LOSSES`.
    """
    # Linear -> sums of squares of gradients and of inputs, and the number of tokens: float64, so that the result does
    # not depend on ranks and micro-batches.
    sums: dict[str, list[Tensor]] = {}

    def clear() -> None:
        for _, name in run.plan.linears():
            channels, rows = weight_in_out(linear_module(run.model, name)).shape
            sizes = [(rows,), (channels,), ()]
            sums[name] = [torch.zeros(size, dtype=torch.float64, device=model.device) for size in sizes]

    def watch(name: str, inputs: Tensor) -> Callable[[Tensor], None]:
        squares = _squares(inputs)  # computed now, so that the input need not stay in memory

        def add(gradient: Tensor) -> None:
            row, column, tokens = sums[name]
            row.add_(_squares(gradient))
            column.add_(squares)
            tokens.add_(len(gradient))

        return add

    with run.placed_model() as model:
        _backward_passes(run, model, "row weights", kind, run.samples, run.config.micro_batch_size, clear, watch)
    information = {}
    for name, totals in sums.items():
        ranks.add_up(totals)
        row, column = (total.float() for total in totals[:2])
        information[name] = RankOneCurvature(row, column / max(int(totals[2]), 1))
        if not bool(row.isfinite().all() & column.isfinite().all()):
            raise CalibrationError(
                f"{name}: its inputs or the gradients of its outputs are not finite on the calibration text: try "
                "`dtype=float32`, or `heuristic_row_weights=none`"
            )
    return information


def _squares(values: Tensor) -> Tensor:
    """Returns the sum of squares of every column, float64."""
    return values.float().square().sum(0, dtype=torch.float64)


@torch.enable_grad()
def output_gradients(run: Run, tokens: int) -> dict[str, Tensor]:
    """Returns linear name -> gradients of its outputs, bfloat16 ``[tokens, out_features]`` on the CPU.

    All ranks together read about ``tokens`` calibration tokens, in whole sequences, at least one; each rank gets all
    gradients. The loss is that of `fisher_information`. Two kinds of linears are left out: those that not every token
    reaches (experts), and those without a gradient (an indexer's: choosing tokens is not differentiable).
    """
    parts: dict[str, list[Tensor]] = {}

    def watch(name: str, _inputs: Tensor) -> Callable[[Tensor], None]:
        return lambda gradient: parts.setdefault(name, []).append(run.store.copied(gradient.to("cpu", torch.bfloat16)))

    samples = run.samples[: max(tokens // run.samples.tokens, 1)]
    with run.placed_model_for_fit() as model:
        # One sequence at a time: sequences are few, and the logits of several would take more memory than all else.
        _backward_passes(run, model, "output gradients", objective_kind("auto", model), samples, 1, parts.clear, watch)
    gradients = {}
    for site in run.plan.sites:
        for name in site.linears if reads_every_token(run.model, site) else ():
            of_rank = torch.cat(parts.pop(name)) if name in parts else torch.empty(0)
            if shares := [share for share in ranks.gather(of_rank) if share.numel()]:
                gradients[name] = torch.cat(shares)
    return gradients


def _backward_passes(
    run: Run,
    model: PreTrainedModel,
    stage: str,
    kind: LossKind,
    samples: Samples,
    micro_batch_size: int,
    clear: Callable[[], None],
    watch: Watch,
) -> None:
    """Runs backward passes of a loss, and shows the inputs and output gradients of every pruned linear to ``watch``.

    Args:
        model: the run's model, as `Run.placed_model` yields it.
        stage: name of the stage for progress.
        samples: samples of all ranks, of which this rank runs its share.
        clear: discards what was collected; called before the first pass, and again if memory runs out and all passes
            restart with smaller micro-batches.
        watch: called with a linear's name and its input ``[tokens, in_features]``; returns the function that is called
            with the gradient of the linear's output ``[tokens, out_features]``.
    """
    share = ranks.own_rows(len(samples))

    def backward(size: int) -> None:
        clear()
        draw = _draws(run.config.seed, skip=int(share[0]) if share.numel() else 0)
        with run.progress.stage(stage, share.numel()) as advance:
            for rows in ranks.parts(torch.arange(len(samples)), size):
                with run.recomputing(model):
                    with_gradients(LOSSES[kind].drawn(model, samples[rows], draw), model).backward()
                advance(len(rows))

    hooks = (
        linear_module(model, name).register_forward_hook(partial(_show, partial(watch, name)))
        for _, name in run.plan.linears()
    )
    with frozen(model), hooked(hooks):
        MicroBatch(micro_batch_size).run(backward)


def _show(
    watch: Callable[[Tensor], Callable[[Tensor], None]], module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """A forward hook that calls ``watch`` with the input, and the result with the gradient of the output."""
    if not torch.is_grad_enabled():
        return output
    if not output.requires_grad:
        # No weight of the model requires a gradient, so the first linears start the autograd graph. Their outputs must
        # not be leaves, which a model cannot change in place (OLMo clamps its queries, keys and values).
        output = output.requires_grad_().clone()
    add = watch(as_multiplied(module, inputs[0]).detach().flatten(0, -2))
    # A layer that is recomputed runs twice, but only one output has a gradient.
    output.register_hook(lambda gradient: add(gradient.flatten(0, -2)))
    return output


def _draws(seed: int, skip: int) -> Draw:
    """Draws random numbers for one sample after another, independently of the micro-batches and the ranks.

    The numbers of the first ``skip`` samples are drawn and discarded.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(distribution: Callable[..., Tensor], like: Tensor) -> Tensor:
        nonlocal skip
        for _ in range(skip):
            distribution(like.shape[1:], generator=generator)
        skip = 0
        return torch.stack([distribution(like.shape[1:], generator=generator) for _ in like]).to(like.device)

    return draw

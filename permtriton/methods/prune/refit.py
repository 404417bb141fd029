"""Step ``refit``: least-squares weights on a mask, layer by layer, which also correct errors of the layers before.

Each layer runs in two models: ``X_p`` are a linear's inputs in the model as pruned so far, which it will read, and
``X_d`` those in the dense model, whose outputs it should reproduce. A linear that writes into the residual stream may
also correct the stream's error so far, ``R_d - R_p``, where ``R`` is the stream before the addition. For each linear,
with ``H = X_p X_p^T + damping``, the weight ``V`` should give ``W X_p + a W (X_d - X_p) + b (R_d - R_p)`` on ``X_p``,
with ``dense_targets`` a and ``residual_targets`` b. Without a mask, the best weight is

    W* = W + (a W (X_d - X_p) + b (R_d - R_p)) X_p^T H^-1

and the error of any other is larger by ``tr((V - W*) H (V - W*)^T)``. SparseGPT, started from ``W*``, chooses a mask;
conjugate gradients minimise the error on this mask; kept weights are exchanged for pruned ones while the error falls
(`permtriton.methods.prune.least_squares`). Last, with ``K = E[g g^T]`` of the gradients of the linear's outputs, the
same weights minimise ``tr(K (V - W*) H (V - W*)^T)``: errors of rows with correlated gradients offset each other.

Dense targets: GPTAQ (arXiv 2504.02692); those of the residual stream: LoaQ (arXiv 2509.06297); ``K``: YAQA (arXiv
2505.22988), all for quantization; least squares on a mask: ALPS (arXiv 2406.07831).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from permtriton.errors import CalibrationError
from permtriton.methods.layer_updates import FinishedLayers, update_linears
from permtriton.methods.measure.fisher import output_gradients
from permtriton.methods.measure.postconditions import check_no_worse
from permtriton.methods.measure.statistics import Curvature, Moments, dense_inputs, moments
from permtriton.methods.prune.least_squares import better_mask, better_rows, error_of, least_squares, metric_of
from permtriton.methods.prune.sparsegpt import CANCELLED_SHARE, sparsegpt
from permtriton.methods.run import Run
from permtriton.methods.sizes import FLOAT32, Memory, ModelSizes
from permtriton.methods.step import Outcome, Stage, Step, from_options
from permtriton.model.checks import all_finite
from permtriton.model.nm_checks import check_kept, zeros_in_groups
from permtriton.passes.plan import linear_module, sequential_groups, weight_in_out
from permtriton.running.mixed_precision import exact_products
from permtriton.util import ranks
from permtriton.util.option import option
from permtriton.util.sparsity import NMPattern


@dataclass(frozen=True)
class Refit(Step):
    """Options of the step ``refit``, which fits the kept weights of each linear by least squares."""

    name: ClassVar[str] = "refit"
    prefix: ClassVar[str] = "refit"
    summary: ClassVar[str] = "least-squares weights on SparseGPT's mask and on masks improved from it: minutes"
    stage: ClassVar[Stage] = Stage.PRUNE
    importance: ClassVar[str] = "obs"
    keeps_values: ClassVar[bool] = False
    dense_weights: ClassVar[bool] = True
    shards: ClassVar[bool] = False
    reads_generated = True

    dense_targets: float = option(
        0.5,
        "Share of the dense model's inputs in the targets of the fit; the rest comes from the inputs of the model as "
        "pruned so far.",
        maximum=1.0,
    )
    residual_targets: float = option(
        0.25,
        "Share of the residual stream's error so far (dense minus pruned) that the linears that write into the stream "
        "correct: 0 for none, 1 for all of it.",
        maximum=1.0,
    )
    iterations: int = option(20, "Conjugate-gradient iterations per linear; 0 keeps SparseGPT's weights and mask.")
    exchanges: int = option(
        4, "Maximum number of rounds that swap pruned weights for kept ones, each followed by another fit."
    )
    metric_tokens: int = option(
        2048,
        "Calibration tokens whose gradients say how errors of a linear's outputs add up in the loss (whole sequences, "
        "at least one); 0 gives all outputs the same weight and no correlation.",
    )
    metric_rounds: int = option(12, "Conjugate-gradient iterations with these gradients, after all fits.", minimum=1)

    gradients = from_options(lambda step: bool(step.iterations and step.metric_tokens))

    def uses_importance(self) -> bool:
        return False

    def memory(self, sizes: ModelSizes) -> Memory:
        inputs = 2 * sizes.layer_inputs + sizes.all_positions * sizes.layer_channels * sizes.element
        output_gradients = self.metric_tokens * sizes.rows * 2 * self.gradients
        # The sums of Hessians are in float64; shift, inverse and factor exist for one site at a time.
        fit = 2 * sizes.forward + sizes.hessians * 5 // 2 + sizes.largest_weight * 18 * FLOAT32
        backward = replace(sizes, micro_batch_size=1).gradients * self.gradients
        return Memory(max(backward, fit), inputs + output_gradients)

    def passes(self, sizes: ModelSizes) -> float:
        return 5.5 if self.gradients else 3.5

    def state_bytes(self, sizes: ModelSizes) -> int:
        return sizes.finished_layers

    @torch.no_grad()
    def run(self, run: Run) -> Outcome:
        """Returns for each linear its ``name``, ``seconds``, and its errors at ``start`` and at ``end``.

        An error is the squared distance from the outputs of ``W*``, relative to their squared norm, both in the metric
        ``K`` if gradients are used. ``start`` is the error of SparseGPT's weight.
        """
        plan, samples, finished = run.plan, run.samples_for(self), FinishedLayers(run, self.name)
        gradients = output_gradients(run, self.metric_tokens) if self.gradients else {}
        if not_finite := [name for name, gradient in gradients.items() if not all_finite(gradient)]:
            raise CalibrationError(
                f"{not_finite[0]}: the gradients of its outputs are not finite on the calibration text: try "
                "`dtype=float32`, or `refit_metric_tokens=0`"
            )
        turns_by_layer = list(map(sequential_groups, plan.layers()))

        def steps(turns: Sequence[object]) -> int:
            """A layer reads the samples once in the dense model, and once per turn in the pruned model."""
            return ranks.own_rows(len(samples)).numel() * (1 + len(turns)) + len(turns)

        num_steps = sum(map(steps, turns_by_layer))
        # In host memory, outputs are not kept: moving them there and back takes longer than computing them again.
        keep = not run.store.onloads
        with run.placed_model_for_fit() as model, run.progress.stage("refit", num_steps) as advance:
            walk = run.walk(model, samples)
            layers = zip(turns_by_layer, walk.walk_and_change(keep), walk.walk_dense(run.dense_weights), strict=True)
            for turns, layer, dense_layer in layers:
                batches = max(layer.parts, dense_layer.parts, key=len)
                if finished.restore(dense_layer.sites):
                    for batch in batches:
                        dense_layer.run(batch)
                    advance(steps(turns))
                    continue
                parts: list[dict[str, Any]] = []
                targets = dense_inputs(model, replace(dense_layer, parts=batches), advance, run.store)
                for sites in turns:
                    of_turn = moments(model, replace(layer, sites=sites, parts=batches), targets, advance)
                    parts += update_linears(
                        run,
                        sites,
                        {site: moment.hessian for site, moment in of_turn.items()},
                        partial(self._refit, run, of_turn, gradients),
                    )
                    layer.finish(sites)
                    del of_turn  # frees its memory before the next turn needs as much
                    advance()
                finished.store(dense_layer.sites, parts)
        return Outcome(parts=finished.parts)

    def _refit(
        self, run: Run, moments: Mapping[str, Moments], gradients: Mapping[str, Tensor], curvature: Curvature, name: str
    ) -> dict[str, Any]:
        """Prunes and fits a linear, and returns its entry in the step's report."""
        start_time = time.perf_counter()
        weight_view, pattern = weight_in_out(linear_module(run.model, name)), run.plan.patterns[name]
        weight = weight_view.to(curvature.damped.device)
        zeros = zeros_in_groups(weight * ~curvature.dead.unsqueeze(1), pattern)
        fitted, start, end = self.fit(weight.T, moments[curvature.site], curvature, pattern, gradients.get(name))
        fitted = fitted.T + 0.0  # the sum turns -0.0 into 0.0
        check_kept(name, fitted, zeros, pattern, CANCELLED_SHARE)
        weight_view.copy_(fitted)
        check_no_worse(start, end, f"refitting {name}")
        return {"name": name, "start": start, "end": end, "seconds": time.perf_counter() - start_time}

    def fit(
        self, weight: Tensor, moment: Moments, curvature: Curvature, pattern: NMPattern, gradients: Tensor | None
    ) -> tuple[Tensor, float, float]:
        """Returns the fitted weight of one linear, and the relative errors of SparseGPT's weight and of the fitted one.

        Args:
            weight: the dense weight, ``[out_features, in_features]``.
            gradients: gradients of the linear's outputs, ``[tokens, out_features]``; None to weight outputs equally.
        """
        with exact_products():
            target = self.best_weight(weight.float(), moment, curvature)
        sparsegpt_weight = sparsegpt(target, curvature, pattern, None)
        fitted = least_squares(sparsegpt_weight, target, curvature.damped, self.iterations)
        if self.iterations:
            fitted = better_mask(fitted, target, curvature, pattern, self.exchanges)
        sparsegpt_weight, fitted = sparsegpt_weight.to(weight.dtype), fitted.to(weight.dtype)
        fitted, metric = better_rows(fitted, sparsegpt_weight, target, curvature.damped), None
        if gradients is not None:
            metric = metric_of(gradients.to(weight.device))
        error = partial(error_of, target=target, hessian=curvature.damped, metric=metric)
        sparsegpt_error, candidates = error(sparsegpt_weight), [(fitted, error(fitted))]
        if metric is not None:
            coupled = least_squares(fitted.float(), target, curvature.damped, self.metric_rounds, metric)
            coupled = coupled.to(weight.dtype)
            candidates = [(coupled, error(coupled)), *candidates, (sparsegpt_weight, sparsegpt_error)]
        best, best_error = min(candidates, key=lambda candidate: candidate[1])
        zero_error = max(error(torch.zeros_like(target)), torch.finfo(torch.float32).tiny)
        return best, sparsegpt_error / zero_error, best_error / zero_error

    def best_weight(self, weight: Tensor, moment: Moments, curvature: Curvature) -> Tensor:
        """Returns ``W*``, float32 ``[out_features, in_features]``: the least-squares solution without a mask."""
        if moment.shift is None or not (self.dense_targets or self.residual_targets):
            return weight
        target_cross_moment = self.dense_targets * (weight @ moment.shift)
        if moment.residual_shift is not None:
            target_cross_moment += self.residual_targets * moment.residual_shift
        return weight + target_cross_moment @ curvature.inverse

    def words(self, outcome: Outcome) -> list[tuple[str, str]]:
        start, end = (fmean(part[key] for part in outcome.parts) for key in ("start", "end"))
        return [("refit: error", f"{start:.4f} to {end:.4f} (mean of {len(outcome.parts)} linears)")]

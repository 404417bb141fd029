"""Step ``round``: rounds kept weights to FP8, layer by layer, so that they compensate for each other's errors.

FP8 is float8 e4m3 with a scale per row; the formats fp8 and packed-fp8 store the result as it is. With the Hessian
``H`` of a linear's inputs, in the model as rounded so far, the FP8 weight ``Q`` should have a small error

    tr((Q - W) H (Q - W)^T)

First each row gets the scale, among the `short_scales`, with which rounding to nearest has the smallest error. Then
several sweeps of coordinate descent set each kept weight to the FP8 value that is best with all others fixed: with
``G = (Q - W) H``, that is ``q_j - G_j / H_jj``, rounded. The error never grows, and pruned weights stay zero. GPTQ
(arXiv 2210.17323) visits each weight once, and would also change pruned weights.
"""

import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from permtriton.kernels.quantize import FLOAT8, LARGEST, dequantized, round_to_fp8, short_scales, to_float8
from permtriton.methods.layer_updates import update_layers
from permtriton.methods.measure.statistics import Curvature
from permtriton.methods.prune.least_squares import row_errors
from permtriton.methods.prune.sparsegpt import COLUMNS_AT_ONCE
from permtriton.methods.run import Run
from permtriton.methods.sizes import FLOAT32, Memory, ModelSizes
from permtriton.methods.step import Outcome, Stage, Step
from permtriton.model.experts import stacked_name
from permtriton.passes.plan import linear_module
from permtriton.running.mixed_precision import exact_products
from permtriton.util.option import option

NO_LINEAR = "it is an expert, or stores its weight transposed, and formats in 8 bits hold linears only"


@dataclass(frozen=True)
class Round(Step):
    """Options of the step ``round``, which rounds the kept weights to FP8."""

    name: ClassVar[str] = "round"
    prefix: ClassVar[str] = "round"
    summary: ClassVar[str] = "kept weights rounded to FP8 such that they make up for each other's errors: minutes"
    stage: ClassVar[Stage] = Stage.TRAIN
    shards: ClassVar[bool] = False

    sweeps: int = option(
        2,
        "How often each kept weight is rounded anew, with all others as they are; 0: only the scale of each row is "
        "chosen.",
    )

    def conflicts(self, config: Any, steps: Any) -> str:
        if steps[-1] is not self:
            return f"{steps[-1].name} cannot follow {self.name}, which rounds the weights: name {self.name} last"
        return ""

    def uses_importance(self) -> bool:
        return False

    def memory(self, sizes: ModelSizes) -> Memory:
        layer = sizes.layer_by_layer
        return Memory(layer.device + sizes.largest_weight * 8 * FLOAT32, layer.movable)

    def passes(self, sizes: ModelSizes) -> float:
        return 3

    def state_bytes(self, sizes: ModelSizes) -> int:
        return sizes.finished_layers

    def run(self, run: Run) -> Outcome:
        """Returns for each linear its ``name``, ``seconds``, and its errors ``start`` and ``end``.

        ``start`` is the error of rounding to nearest and ``end`` that of this step, both relative to ``tr(W H W^T)``.
        """
        skip_reasons = {
            name: NO_LINEAR
            for _, name in run.plan.linears()
            if not isinstance(linear_module(run.model, name), nn.Linear) or stacked_name(run.model, name) is not None
        }

        def update(curvature: Curvature, name: str) -> dict[str, Any] | None:
            if name in skip_reasons:
                return None
            parameter, start_time = linear_module(run.model, name).get_parameter("weight"), time.perf_counter()
            hessian = curvature.damped
            weight = parameter.detach().to(hessian.device).float()
            rounded_weight = rounded(weight, hessian, self.sweeps)
            plain, scale = round_to_fp8(parameter.detach())
            errors = [
                float(row_errors(candidate.to(weight), weight, hessian).sum())
                for candidate in (torch.zeros_like(weight), dequantized(plain, scale), rounded_weight)
            ]
            parameter.copy_(rounded_weight)
            start, end = (error / max(errors[0], torch.finfo(torch.float32).tiny) for error in errors[1:])
            return {"name": name, "start": start, "end": end, "seconds": time.perf_counter() - start_time}

        return Outcome(parts=update_layers(run, self.name, update), left=skip_reasons)

    def words(self, outcome: Outcome) -> list[tuple[str, str]]:
        start, end = (fmean([part[key] for part in outcome.parts] or [0.0]) for key in ("start", "end"))
        words = f"{start:.2e}, rounded each alone, to {end:.2e} (mean of {len(outcome.parts)} linears)"
        return [("round: error", words)] + [(f"round: {name}", f"left: {why}") for name, why in outcome.left.items()]


def rounded(weight: Tensor, hessian: Tensor, sweeps: int) -> Tensor:
    """Returns a weight rounded to FP8, zero where ``weight`` is: both float32 ``[out_features, in_features]``.

    The Hessian is damped, float32 ``[in_features, in_features]``.
    """
    nearest, scale = _with_best_scale(weight, hessian)
    # Channels first: what belongs to one channel is then contiguous.
    q_CO, kept_CO = nearest.T.contiguous(), weight.T != 0
    with exact_products():
        gradient_CO = hessian @ (q_CO - weight.T)
        for start in list(range(0, len(q_CO), COLUMNS_AT_ONCE)) * sweeps:
            columns = slice(start, start + COLUMNS_AT_ONCE)
            block_hessian, old_block = hessian[columns, columns], q_CO[columns].clone()
            _round_block(q_CO[columns], gradient_CO[columns].clone(), kept_CO[columns], block_hessian, scale.flatten())
            gradient_CO.addmm_(hessian[:, columns], q_CO[columns] - old_block)
    return q_CO.T + 0.0  # never -0.0


def _round_block(q_CO: Tensor, gradient_CO: Tensor, kept_CO: Tensor, hessian: Tensor, scale: Tensor) -> None:
    """Rounds the weights of a block of channels again, in place; after each channel, updates the gradient."""
    for channel, (q, gradient, is_kept) in enumerate(zip(q_CO, gradient_CO, kept_CO, strict=True)):
        best_value = (q - gradient / hessian[channel, channel]) / scale
        new_q = best_value.clamp_(-LARGEST, LARGEST).to(FLOAT8).float().mul_(scale).mul_(is_kept)
        gradient_CO[channel + 1 :].addr_(hessian[channel, channel + 1 :], new_q - q)
        q.copy_(new_q)


def _with_best_scale(weight: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weight rounded to nearest with the best scale of each row, and these scales, ``[out_features, 1]``."""
    best, chosen = torch.zeros_like(weight), weight.new_ones(len(weight), 1)
    lowest = weight.new_full((len(weight),), torch.inf)
    for scale in short_scales(weight.abs().amax(1, keepdim=True)):
        scale = torch.where(scale > 0, scale, 1)
        nearest = to_float8(weight, scale).float() * scale
        errors = row_errors(nearest, weight, hessian)
        better = (errors < lowest).unsqueeze(1)
        best, chosen = torch.where(better, nearest, best), torch.where(better, scale, chosen)
        lowest = torch.minimum(errors, lowest)
    return best, chosen

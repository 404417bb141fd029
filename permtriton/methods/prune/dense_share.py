"""Chooses the linears that stay dense as the ``dense_share``: those whose masks raise the loss most per weight.

If the outputs of row o of a linear have the squared error ``e_o``, the loss rises to second order by ``f_o e_o / 2``,
with the Fisher information ``f_o`` of the output (`permtriton.methods.measure.fisher`). ``e_o`` is estimated by the
sum of scores of the weights that the mask drops in the present order: OBS scores if OBS is the importance, otherwise
squared Wanda scores, whatever importance decides the mask. Such a score is the squared error of the output if its
weight alone is dropped. After the kept weights are updated, a fraction of this sum is left as error, which is several
times as large in some linears as in others. If the recipe updates weights and OBS is the importance, SparseGPT on a few
rows measures this fraction (`statistics_and_shares_left`). The costs only rank linears; they do not predict the loss.
``e_o`` and ``f_o`` sum over tokens, so second linears of experts, which read few, count for less than they should.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from permtriton.config import ImportanceMethod
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.methods.measure.fisher import row_weights
from permtriton.methods.measure.importance import importance_of, importances_of, inverts_hessians
from permtriton.methods.measure.statistics import Curvature, obs_statistics, site_statistics
from permtriton.methods.planning import plan_model
from permtriton.methods.prune.sparsegpt import sparsegpt
from permtriton.methods.run import Run
from permtriton.methods.sizes import Memory, ModelSizes
from permtriton.methods.step import BACKWARD, Stage, Step
from permtriton.model.experts import stacked_name
from permtriton.passes.plan import Plan, Site, linear_module, weight_in_out
from permtriton.running.layer_walk import LayerWalk
from permtriton.running.resume import State
from permtriton.util.progress import Progress
from permtriton.util.sparsity import NMPattern

UPDATED_ROWS = 64  # rows of each linear to measure on; with all rows, the choice differs for 1% of the weights


@dataclass(frozen=True)
class DenseShare(Step):
    """The choice of the dense linears: a step that no recipe names and that runs first if ``dense_share`` is not 0."""

    name: ClassVar[str] = "dense share"
    prefix: ClassVar[str] = "dense_share"
    summary: ClassVar[str] = "the linears whose masks raise the loss most per weight stay dense"
    stage: ClassVar[Stage] = Stage.ORDER
    gradients = True

    share: float

    def memory(self, sizes: ModelSizes) -> Memory:
        return Memory(sizes.gradients)

    def passes(self, sizes: ModelSizes) -> float:
        return BACKWARD

    def run(self, run: Run) -> None:
        """Measures the sites, chooses linears unless an interrupted run already did, and plans again without them.

        The choice is saved, because gradients differ from run to run on a GPU.
        """
        model, config = run.model, run.config
        updates = any(step.stage is Stage.PRUNE and not step.keeps_values for step in config.steps)
        # Its scores are errors of the output, and its statistic also serves the importance that the config names.
        method: ImportanceMethod = "obs" if inverts_hessians(config.importance) else "wanda"
        shares_left: dict[str, float] = {}

        def measure(walk: LayerWalk) -> dict[str, Tensor]:
            if method != "obs" or not updates:
                return site_statistics(walk, method, run.progress)
            statistics, shares = statistics_and_shares_left(walk, run.progress)
            shares_left.update(shares)
            return statistics

        def choose() -> State:
            errors, rows = importances_of(model, run.plan, method, run.statistics), row_weights(run)
            dense = most_sensitive(model, run.plan, run.importances(), errors, rows, self.share, shares_left)
            return {}, {"dense": dense}

        run.calibrate(measure)
        chosen = run.workspace.state(self.prefix).once(choose)[1]["dense"]
        run.workspace.inputs["dense"] = chosen
        run.progress.say(f"left dense, as the dense share: {', '.join(chosen) or 'nothing, as every linear is larger'}")
        plan, graph = plan_model(model, replace(config, ignore=(*config.ignore, *chosen)), run.samples)
        plan.skipped.update(dict.fromkeys(chosen, "of the dense share: its mask would raise the loss most per weight"))
        run.replan(plan, graph)


def statistics_and_shares_left(walk: LayerWalk, progress: Progress) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Returns the sites' statistics for ``obs``, and the fraction of each linear's cost left after SparseGPT.

    The second result is linear -> squared error of the outputs after SparseGPT, divided by the sum of the OBS scores of
    the weights that a mask drops.
    """

    def measure(site: Site, curvature: Curvature) -> dict[str, float]:
        weights = {name: weight_in_out(linear_module(walk.model, name)) for name in site.linears}
        return {name: _share_left(weight, curvature, walk.plan.patterns[name]) for name, weight in weights.items()}

    statistics, shares_by_site = obs_statistics(walk, progress, measure)
    return statistics, {name: share for shares in shares_by_site.values() for name, share in shares.items()}


def _share_left(weight_CO: Tensor, curvature: Curvature, pattern: NMPattern) -> float:
    rows = weight_CO.shape[1]
    chosen = torch.linspace(0, rows - 1, min(UPDATED_ROWS, rows), device=weight_CO.device).long()
    weight_OC = weight_CO[:, chosen].t().to(curvature.hessian.device, torch.float32)
    scores_CO = importance_of("obs", weight_OC.t(), curvature.inverse.diagonal()).scores(weight_OC.t())
    dropped = (scores_CO * ~top_n_mask(scores_CO, pattern)).sum()
    lost_OC = weight_OC - sparsegpt(weight_OC, curvature, pattern, None)
    error = ((lost_OC @ curvature.hessian) * lost_OC).sum()
    return float(error / dropped) if dropped else 1.0


def most_sensitive(
    model: nn.Module,
    plan: Plan,
    importances: Mapping[str, ImportanceFactors],
    errors: Mapping[str, ImportanceFactors],
    rows: Mapping[str, Tensor],
    share: float,
    left: Mapping[str, float],
) -> list[str]:
    """Returns the linears that stay dense, by name: together at most a share of the prunable weights.

    They are taken one after another, the most sensitive first; a linear that would exceed the share is passed over,
    and at least one linear is always pruned. Experts that one parameter holds are taken together.

    Args:
        importances: linear -> importance that decides its mask.
        errors: linear -> importance whose scores are errors of the output, for the cost of the dropped weights.
        rows: linear -> sensitivity of the loss to each of its rows, float32 ``[out_features]``.
        left: linear -> fraction of its cost that remains after the kept weights are updated; empty without an update.
    """

    def cost(name: str) -> float:
        mask_CO = top_n_mask(importances[name].scores(weights[name]), plan.patterns[name])
        dropped_CO = errors[name].scores(weights[name]).pow(2 / errors[name].power) * ~mask_CO
        return float(dropped_CO.sum(0) @ rows[name]) * left.get(name, 1.0)

    weights = {name: weight_in_out(linear_module(model, name)) for _, name in plan.linears()}
    names: dict[str, list[str]] = {}  # parameter, or linear -> the linears that it holds
    for name in weights:
        names.setdefault(stacked_name(model, name) or name, []).append(name)
    sizes = {parameter: sum(weights[name].numel() for name in held) for parameter, held in names.items()}
    costs = {parameter: sum(map(cost, held)) for parameter, held in names.items()}
    budget, dense = share * sum(sizes.values()), list[str]()
    for parameter in sorted(costs, key=lambda p: costs[p] / sizes[p], reverse=True):
        if sizes[parameter] <= budget and len(dense) < len(sizes) - 1:
            dense.append(parameter)
            budget -= sizes[parameter]
    return [name for parameter in dense for name in names[parameter]]

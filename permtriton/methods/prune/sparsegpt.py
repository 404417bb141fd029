"""Step ``sparsegpt``: kept weights make up for pruned ones in closed form, layer by layer.

Hessians come from the model as pruned so far; the formulas stand in `permtriton.methods.prune.sparsegpt_math`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from permtriton.kernels.nm_mask import top_n_mask
from permtriton.methods.measure.importance import importance_of
from permtriton.methods.measure.statistics import hessians
from permtriton.methods.prune.sparsegpt_math import Curvature, curvatures, sparsegpt
from permtriton.methods.run import Run
from permtriton.methods.sizes import Memory, ModelSizes
from permtriton.methods.step import Stage, Step
from permtriton.model.checks import check_kept, zeros_in_groups
from permtriton.passes.plan import Site, linear_module, weight_in_out
from permtriton.running import ranks
from permtriton.running.layer_walk import LayerWalk
from permtriton.running.state import FinishedLayers
from permtriton.util.option import documented, option

CANCELLED_SHARE = 1e-3  # share of the groups in which an update may cancel a kept weight exactly


@documented
@dataclass(frozen=True)
class SparseGPT(Step):
    """Options of SparseGPT."""

    name: ClassVar[str] = "sparsegpt"
    prefix: ClassVar[str] = "sparsegpt"
    summary: ClassVar[str] = "pruning that updates the kept weights in closed form (SparseGPT): minutes"
    stage: ClassVar[Stage] = Stage.PRUNE
    importance: ClassVar[str] = "obs"
    keeps_values: ClassVar[bool] = False
    shards: ClassVar[bool] = False

    mask: Literal["own", "keep"] = option(
        "own", "own (SparseGPT chooses the mask as it goes) or keep (the importance chooses it)."
    )

    def uses_importance(self) -> bool:
        return self.mask == "keep"

    def memory(self, sizes: ModelSizes) -> tuple[Memory, ...]:
        return (sizes.layer_by_layer,)

    def passes(self, sizes: ModelSizes) -> float:
        return 3

    def state_bytes(self, sizes: ModelSizes) -> int:
        return sizes.finished_layers

    @torch.no_grad()
    def run(self, run: Run) -> None:
        plan, state = run.plan, run.state(FinishedLayers, self.name)
        share = ranks.own_rows(len(run.samples)).numel()
        with run.fitting() as model, run.progress.stage("sparsegpt", (share + 1) * len(plan.layers())) as advance:
            walk = LayerWalk(model, plan, run.samples, run.batch, run.store)
            for number, layer in enumerate(walk.changing()):
                weights = weights_of_sites(model, layer.sites)
                if state is not None and state.restore(number, weights, plan.patterns) is not None:
                    advance(share + 1)
                    continue
                self._prune(run, model, layer.sites, hessians(model, layer, advance))
                if state is not None:
                    state.keep(number, weights, plan.patterns)
                advance()

    def _prune(self, run: Run, model: nn.Module, sites: Sequence[Site], of_inputs: Mapping[str, Tensor]) -> None:
        """Prunes and updates the linears that read some sites, by the sites' Hessians."""
        curvature = curvatures(of_inputs)
        linears = [(site, name) for site in sites for name in site.linears]
        ranks.deal(linears, lambda linear: self._update(run, model, curvature, *linear))
        ranks.send_dealt([linear_module(model, name).get_parameter("weight") for _, name in linears])

    def _update(
        self, run: Run, model: nn.Module, curvature_of: Callable[[str], Curvature], site: Site, name: str
    ) -> None:
        stored, pattern, mask = weight_in_out(linear_module(model, name)), run.plan.patterns[name], None
        curvature = curvature_of(site.name)
        weight = stored.to(curvature.damped.device)
        if self.mask == "keep":
            statistic = run.statistics[site.name].to(weight.device)
            mask = top_n_mask(importance_of(run.config.importance, weight, statistic).scores(weight), pattern).T
        zeros = zeros_in_groups(weight * ~curvature.dead.unsqueeze(1), pattern)
        updated = sparsegpt(weight.T, curvature, pattern, mask)
        check_kept(name, updated.T, zeros, pattern, CANCELLED_SHARE)
        stored.copy_(updated.T).add_(0.0)  # the sum turns -0.0 into 0.0


def weights_of_sites(model: nn.Module, sites: Iterable[Site]) -> dict[str, Tensor]:
    """Returns linear -> its weight, ``[in_features, out_features]``, for all that read the sites."""
    return {name: weight_in_out(linear_module(model, name)) for site in sites for name in site.linears}

"""Step ``sparsegpt``: kept weights make up for pruned ones in closed form, see `permtriton.methods.prune.obs`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from permtriton.driver.step import Facts, Stage, Step
from permtriton.util.option import documented, option

if TYPE_CHECKING:
    from permtriton.driver.run import Run


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

    def needs(self, facts: Facts) -> dict[str, dict[str, int]]:
        return {"hessians": facts.layer_by_layer()}

    def passes(self, facts: Facts) -> float:
        return 3

    def state_bytes(self, facts: Facts) -> int:
        return facts.finished_layers()

    def run(self, run: "Run") -> None:
        from permtriton.methods.prune.weights import update_weights
        from permtriton.running.state import FinishedLayers

        state = run.state(FinishedLayers, self.name)
        statistics = run.statistics if self.mask == "keep" else None
        with run.fitting() as model:
            update_weights(
                model, run.plan, statistics, run.samples, run.batch, run.config, run.progress, state, run.store
            )

"""Step ``heuristic``: RIA's two-stage channel order, see `permtriton.methods.order.heuristic_order`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from permtriton.driver.step import BACKWARD, FLOAT32, Facts, Stage, Step
from permtriton.util.option import documented, option

if TYPE_CHECKING:
    from permtriton.driver.run import Run


@documented
@dataclass(frozen=True)
class Heuristic(Step):
    """Options of the heuristic order."""

    name: ClassVar[str] = "heuristic"
    prefix: ClassVar[str] = "heuristic"
    summary: ClassVar[str] = "channels dealt out and reassigned by importance (RIA's two stages): seconds to minutes"
    stage: ClassVar[Stage] = Stage.ORDER

    row_weights: Literal["fisher", "none"] = option(
        "none", "How much each output row counts: fisher (by its effect on the loss) or none (all alike)."
    )

    @property
    def gradients(self) -> bool:
        return self.row_weights == "fisher"

    def needs(self, facts: Facts) -> dict[str, dict[str, int]]:
        from permtriton.methods.order.heuristic_order import MAX_ROWS

        rows = min(MAX_ROWS, facts.pruned // facts.width)
        scores = 4 * max(facts.spaces, default=0) * rows * FLOAT32
        needs = {"heuristic": {"scores": scores, **facts.mask()}}
        return needs | ({"row weights": facts.gradients()} if self.gradients else {})

    def passes(self, facts: Facts) -> float:
        return 1 + BACKWARD * self.gradients

    def state_bytes(self, facts: Facts) -> int:
        return sum(facts.spaces) * 8 * self.gradients  # int64

    def run(self, run: "Run") -> None:
        from permtriton.methods.order.heuristic_order import heuristic_indices
        from permtriton.running.state import StateFile

        if spaces := [space for space in run.plan.spaces if not space.frozen]:
            # Gradients of a GPU, which row weights follow from, are not the same in every run.
            state = run.state(StateFile, self.name) if self.gradients else None
            if state is not None and (stored := state.read()) is not None:
                indices = stored[0]
            else:
                rows = run.row_weights() if self.gradients else None
                importances, device = run.importances(), run.placement.device
                indices = heuristic_indices(run.model, run.plan, spaces, importances, rows, run.progress, device)
                if state is not None:
                    state.write(indices, {})
            run.reorder(indices)

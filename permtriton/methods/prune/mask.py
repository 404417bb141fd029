"""Step ``mask``: the weights that an N:M mask of the importance drops are set to 0, the others keep their values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from permtriton.driver.step import Stage, Step

if TYPE_CHECKING:
    from permtriton.driver.run import Run


@dataclass(frozen=True)
class Mask(Step):
    """Pruning by masks; it has no options."""

    name: ClassVar[str] = "mask"
    prefix: ClassVar[str] = "mask"
    summary: ClassVar[str] = "the weights of the lowest importance are set to 0: seconds"
    stage: ClassVar[Stage] = Stage.PRUNE

    def run(self, run: "Run") -> None:
        from permtriton.methods.measure.postconditions import check_retained, total_importance
        from permtriton.methods.prune.weights import mask_weights

        importances = run.importances()
        mask_weights(run.model, run.plan, importances)
        check_retained(run.retained, total_importance(run.model, run.plan, importances))
        run.check_promise()

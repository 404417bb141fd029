"""Step ``distill``: all kept weights are trained together, see `permtriton.methods.train.distillation`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from permtriton.config import ObjectiveKind, minimises
from permtriton.driver.step import FLOAT32, Facts, Outcome
from permtriton.methods.train.training import Training
from permtriton.util.option import documented, option

if TYPE_CHECKING:
    from permtriton.driver.run import Run


@documented
@dataclass(frozen=True)
class Distill(Training):
    """Options of distillation."""

    name: ClassVar[str] = "distill"
    prefix: ClassVar[str] = "distill"
    summary: ClassVar[str] = "kept weights trained together, to give the dense model's outputs: minutes to hours"
    offloads: ClassVar[bool] = False

    loss: Literal["auto", ObjectiveKind] = option("auto", minimises())

    @property
    def objective(self) -> str:
        return self.loss

    def needs(self, facts: Facts) -> dict[str, dict[str, int]]:
        kept = int(facts.pruned * facts.kept)
        optimizer = kept * 6 * FLOAT32 + facts.pruned  # and one byte per mask
        return {"distill": {**facts.gradients(), **facts.targets(), "optimizer": optimizer, **facts.mask()}}

    def state_bytes(self, facts: Facts) -> int:
        return int(facts.pruned * facts.kept) * (facts.element + 3 * FLOAT32)

    def run(self, run: "Run") -> Outcome:
        from permtriton.methods.train.distillation import distill
        from permtriton.running.state import StateFile

        trained = distill(
            run.model, run.plan, run.read_by(self), run.objective(self), self, run.working_config, run.progress,
            run.state(StateFile, self.name),
        )  # fmt: skip
        return Outcome("round", **trained.report("round"))

"""Step ``tune``: norms, biases and a scale per row, trained on new text, see `permtriton.methods.train.tuning`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from permtriton.config import ObjectiveKind, minimises
from permtriton.driver.step import BACKWARD, FLOAT32, GENERATED, Facts, Outcome
from permtriton.methods.options import Tuning
from permtriton.methods.train.training_step import TrainingStep
from permtriton.util.option import documented, option

if TYPE_CHECKING:
    from permtriton.driver.run import Run


@documented
@dataclass(frozen=True)
class Tune(Tuning, TrainingStep):
    """Options of tuning."""

    name: ClassVar[str] = "tune"
    prefix: ClassVar[str] = "tune"
    summary: ClassVar[str] = (
        "norms, biases and a scale per row trained together, on text that calibration does not read: minutes"
    )
    keeps_values: ClassVar[bool] = False

    generated: bool = option(True, GENERATED)
    loss: Literal["auto", ObjectiveKind] = option("auto", minimises())

    @property
    def objective(self) -> str:
        return self.loss

    def needs(self, facts: Facts) -> dict[str, dict[str, int]]:
        targets, state = facts.targets(), {"optimizer": facts.vectors * 6 * FLOAT32}
        return {
            "tune": {**self.memory_of_passes(facts), **state},
            "scales": {**targets, **state, "weights before": facts.pruned * facts.element, **facts.mask()},
        }

    def passes(self, facts: Facts) -> float:
        return BACKWARD * self.trained / facts.sequences + 1

    def state_bytes(self, facts: Facts) -> int:
        return 2 * facts.vectors * (facts.element + 3 * FLOAT32)

    def run(self, run: "Run") -> Outcome:
        from permtriton.methods.train.tuning import tune
        from permtriton.running.state import StateFile

        state = run.state(StateFile, self.name)
        with run.running() as model:
            tuned = tune(
                model, run.plan, run.read_by(self), run.objective(self), self, run.working_config, run.progress, state,
                store=run.store,
            )  # fmt: skip
        return Outcome("round", **tuned.report("round"))

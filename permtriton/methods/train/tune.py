"""Step ``tune``: norms, biases and a scale per row, trained on new text, see `permtriton.methods.train.tuning`."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, ClassVar, Literal

from permtriton.config import CommonConfig
from permtriton.driver.step import FLOAT32, GENERATED, LOSS, Facts, Outcome, Speed, Stage, Step
from permtriton.util.option import documented, option

if TYPE_CHECKING:
    from permtriton.driver.run import Run

ROUNDS = 4  # that all steps are divided into: after each, the held-out samples are measured
TRAINED, MOST = 10, 16  # samples that are trained on per sample that is held out, and most that are held out


@documented
@dataclass(frozen=True)
class Tune(Step):
    """Options of tuning."""

    name: ClassVar[str] = "tune"
    prefix: ClassVar[str] = "tune"
    summary: ClassVar[str] = "norms, biases and a scale per row trained together, on text not read before: minutes"
    stage: ClassVar[Stage] = Stage.TRAIN
    keeps_values: ClassVar[bool] = False
    shards: ClassVar[bool] = False
    offloads: ClassVar[bool] = False
    not_offloaded: ClassVar[str] = "each of its steps would read all weights from the disk three times"

    steps: int = option(
        16, "Optimiser steps, each on sequences that no step before has read, as far as there are.", minimum=1
    )
    learning_rate: float = option(
        5e-3,
        "Peak Adam learning rate, with cosine decay to 0: relative to a scale, and to the root mean square of a norm's "
        "gains or of a bias.",
        positive=True,
    )
    batch_size: int = option(8, "Sequences per optimiser step.", minimum=1)
    generated: bool = option(True, GENERATED)
    loss: Literal["auto", "kl", "cosine"] = option("auto", LOSS)

    @property
    def gradients(self) -> bool:
        return True

    @property
    def reads_generated(self) -> bool:
        return self.generated

    @property
    def draws(self) -> int:
        trained = self.steps * self.batch_size
        return trained + min(ceil(trained / TRAINED), MOST)

    @property
    def objective(self) -> str:
        return self.loss

    def uses_importance(self) -> bool:
        return False

    def conflicts(self, config: CommonConfig, steps: Sequence[Step]) -> str:
        after = steps[[step.name for step in steps].index(self.name) + 1 :]
        if later := [step.name for step in after if step.dense_weights]:
            return (
                f"step {later[0]} after {self.name} is refused: it runs layers of the dense model, whose norms and "
                f"biases {self.name} has changed; put {self.name} after {later[0]}"
            )
        return ""

    def needs(self, facts: Facts) -> dict[str, dict[str, int]]:
        targets, state = facts.targets(), {"optimizer": facts.vectors * 6 * FLOAT32}
        return {
            "tune": {**facts.gradients(), **targets, **state},
            "scales": {**targets, **state, "kept weights": facts.pruned * facts.element, **facts.mask()},
        }

    def seconds(self, facts: Facts, speed: Speed) -> float:
        one, trained = speed.times(1 / facts.sequences), self.steps * self.batch_size
        return trained * one.both + (ROUNDS + 3) * held_out(facts.sequences) * one.forward + speed.forward

    def state_bytes(self, facts: Facts) -> int:
        return facts.vectors * (facts.element + 3 * FLOAT32)

    def run(self, run: "Run") -> Outcome:
        from permtriton.methods.train.tuning import tune
        from permtriton.running.state import StateFile

        tuned = tune(
            run.model, run.plan, run.read_by(self), run.objective(self), self, run.config, run.progress,
            run.state(StateFile, self.name),
        )  # fmt: skip
        history = [{"round": each.pop("epoch"), **each} for each in tuned.report()["history"]]
        return Outcome("round", history, tuned.kept)


def held_out(samples: int) -> int:
    """Returns how many of so many samples decide which round is kept."""
    return min(max(samples // (TRAINED + 1), 1), MOST)

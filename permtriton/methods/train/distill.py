"""Step ``distill``: all kept weights are trained together, see `permtriton.methods.train.distillation`."""

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from permtriton.config import ObjectiveKind, minimises
from permtriton.driver.step import FLOAT32, Facts, Outcome
from permtriton.methods.train.training_step import (
    EPOCHS,
    FURTHER,
    MOST_FURTHER,
    ROUND,
    Training,
    held_out,
    with_held_out,
)
from permtriton.util.option import documented, option

if TYPE_CHECKING:
    from permtriton.driver.run import Run

WITHOUT_STEPS = {"distill_steps": (0,)}


@documented
@dataclass(frozen=True)
class Distill(Training):
    """Options of distillation."""

    name: ClassVar[str] = "distill"
    prefix: ClassVar[str] = "distill"
    summary: ClassVar[str] = "kept weights trained together, to give the dense model's outputs: minutes to hours"

    epochs: int = option(20, EPOCHS, minimum=1, needs=WITHOUT_STEPS)
    further: int = option(0, FURTHER, maximum=MOST_FURTHER, needs=WITHOUT_STEPS)
    steps: int = option(
        0,
        "Optimiser steps on samples that calibration does not read, where there are, in place of all those epochs; 0 "
        "for epochs.",
    )
    loss: Literal["auto", ObjectiveKind] = option("auto", minimises())

    @property
    def objective(self) -> str:
        return self.loss

    @property
    def ends_after(self) -> int:
        return self.steps

    @property
    def draws(self) -> int:
        return with_held_out(self.steps * self.batch_size) if self.steps else 0

    @property
    def _in_one_round(self) -> bool:
        """Whether the only state that it keeps is that at the end."""
        return 0 < self.steps <= ROUND

    def over(self, calibration: int, read: int) -> Self:
        """Returns the options with the epochs that hold the steps asked for; arguments as of `Training.over`."""
        if not self.steps:
            return super().over(calibration, read)
        return replace(self, epochs=ceil(self.steps * self.batch_size / max(read - held_out(read), 1)))

    def needs(self, facts: Facts) -> dict[str, dict[str, int]]:
        collected = facts.ranks > 1 or self.batch_size > facts.micro_batch_size
        copies = 1 if self._in_one_round else 2  # of a state before the end there is another
        return {
            "distill": {
                **self.memory_of_passes(facts),
                "moments": self.optimizer_bytes(facts.pruned, facts),
                "finished weights": copies * int(facts.pruned * facts.kept) * facts.element,
                "collected gradients": facts.pruned * FLOAT32 * collected,
                **facts.mask(),
            }
        }

    def state_bytes(self, facts: Facts) -> int:
        kept = int(facts.pruned * facts.kept) * facts.element
        return kept if self._in_one_round else 2 * (2 * kept + self.optimizer_bytes(facts.pruned, facts))

    def run(self, run: "Run") -> Outcome:
        from permtriton.methods.train.distillation import distill
        from permtriton.running.state import StateFile

        samples, state = run.read_by(self), run.state(StateFile, self.name)
        options = self.over(len(run.samples), len(samples))
        with run.running() as model:
            trained = distill(
                model, run.plan, samples, run.objective(self), options, run.working_config, run.progress, state,
                store=run.store,
            )  # fmt: skip
        return Outcome("round", **trained.report("round"))

"""Step ``reconstruct``: kept weights are trained layer by layer, see `permtriton.methods.train.reconstruction`."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from permtriton.driver.step import FLOAT32, Facts, Outcome
from permtriton.methods.train.training_step import LayerTraining
from permtriton.util.option import documented

if TYPE_CHECKING:
    from permtriton.driver.run import Run


@documented
@dataclass(frozen=True)
class Reconstruct(LayerTraining):
    """Options of reconstruction."""

    name: ClassVar[str] = "reconstruct"
    prefix: ClassVar[str] = "reconstruct"
    summary: ClassVar[str] = "kept weights trained layer by layer, to give each dense layer's output: minutes to hours"
    dense_weights: ClassVar[bool] = True

    def needs(self, facts: Facts) -> dict[str, dict[str, int]]:
        return {
            "reconstruct": {
                **replace(facts, one_layer=True, checkpointing=False).gradients(),
                "targets": 2 * facts.all_positions * facts.hidden * facts.element,
                "weights before": facts.outside * facts.element,
                "finished weights": int(facts.pruned * facts.kept) * facts.element,
                "optimizer": facts.layer * FLOAT32 + self.optimizer_bytes(facts.layer, facts),
                **facts.mask(),
            }
        }

    def state_bytes(self, facts: Facts) -> int:
        return 2 * int(facts.pruned * facts.kept) * facts.element

    def run(self, run: "Run") -> Outcome:
        from permtriton.methods.train.reconstruction import reconstruct
        from permtriton.running.state import StateFile

        samples, state = run.read_by(self), run.state(StateFile, self.name)
        with run.running() as model:
            reconstructed = reconstruct(
                model,
                run.plan,
                run.dense_weights,
                samples,
                self.over(len(run.samples), len(samples)),
                run.config,
                run.progress,
                state,
                run.store,
            )
        return Outcome(parts=reconstructed.parts, left=reconstructed.left)

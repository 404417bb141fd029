"""Step ``refit``: the exact weights on a mask that SparseGPT chooses, see `permtriton.methods.refitting`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from permtriton.option import documented, option
from permtriton.step import Facts, Outcome, Speed, Stage, Step

if TYPE_CHECKING:
    from permtriton.run import Run


@documented
@dataclass(frozen=True)
class Refit(Step):
    """Options of refitting."""

    name: ClassVar[str] = "refit"
    prefix: ClassVar[str] = "refit"
    summary: ClassVar[str] = "SparseGPT's mask, then the exact least-squares weights on it, layer by layer: minutes"
    stage: ClassVar[Stage] = Stage.PRUNE
    importance: ClassVar[str] = "obs"
    keeps_values: ClassVar[bool] = False
    dense_weights: ClassVar[bool] = True
    shards: ClassVar[bool] = False

    dense_share: float = option(
        0.75,
        "Share of the dense model's own inputs in what weights are fitted to; the rest are the inputs of the model "
        "as pruned so far.",
        maximum=1.0,
    )
    iterations: int = option(30, "Most rounds of conjugate gradients per weight; 0 leaves SparseGPT's weights.")

    def uses_importance(self) -> bool:
        return False

    def needs(self, facts: Facts) -> dict[str, dict[str, int]]:
        layer = facts.layer_by_layer()
        both = {"inputs of layers": 2 * layer["inputs of layers"], "hessians": 2 * layer["hessians"]}
        return {"refit": {**layer, **both, "dense weights": facts.pruned * facts.element}}

    def seconds(self, facts: Facts, speed: Speed) -> float:
        # Inputs of both models, and outputs of the new weights; a round of conjugate gradients costs about one token
        # per column, and SparseGPT two.
        per_token = speed.forward / max(facts.positions, 1)
        return 4 * speed.forward + (3 + self.iterations) * facts.widest * per_token

    def run(self, run: "Run") -> Outcome:
        from permtriton.methods.refitting import refit

        parts = refit(
            run.model, run.plan, run.dense_weights, run.samples, run.batch, self, run.config, run.progress, run.empty
        )
        return Outcome(parts=parts)

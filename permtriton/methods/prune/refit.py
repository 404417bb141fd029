"""Step ``refit``: least-squares weights, on SparseGPT's mask and on better ones (see `refitting` beside it)."""

from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

from permtriton.driver.step import FLOAT32, GENERATED, Facts, Outcome, Stage, Step
from permtriton.methods.options import Refitting
from permtriton.util.option import documented, option

if TYPE_CHECKING:
    from permtriton.driver.run import Run


@documented
@dataclass(frozen=True)
class Refit(Refitting, Step):
    """Options of refitting."""

    name: ClassVar[str] = "refit"
    prefix: ClassVar[str] = "refit"
    summary: ClassVar[str] = (
        "least-squares weights, on SparseGPT's mask and on better ones that follow from them: minutes"
    )
    stage: ClassVar[Stage] = Stage.PRUNE
    importance: ClassVar[str] = "obs"
    keeps_values: ClassVar[bool] = False
    dense_weights: ClassVar[bool] = True
    shards: ClassVar[bool] = False
    low_memory_words: ClassVar[str] = (
        "refit runs each layer anew for every site, because the inputs and outputs of all its sites do not fit"
    )

    generated: bool = option(True, GENERATED)

    @property
    def reads_generated(self) -> bool:
        return self.generated

    @property
    def gradients(self) -> bool:
        return bool(self.iterations and self.metric_tokens)

    def uses_importance(self) -> bool:
        return False

    def needs(self, facts: Facts) -> dict[str, dict[str, int]]:
        layer = facts.layer_by_layer()
        channels = facts.widest + facts.hidden if facts.low_memory else facts.between_turns
        kept = {"output gradients": self.metric_tokens * facts.rows * 2} if self.gradients else {}
        backward = {**replace(facts, micro_batch_size=1).gradients(), **kept}
        return {
            **({"output gradients": backward} if self.gradients else {}),
            "refit": {
                **kept,
                "activations": 2 * layer["activations"],
                "inputs of layers": 2 * layer["inputs of layers"],
                "inputs of sites": facts.all_positions * channels * facts.element,
                # The sums are in float64; shift, inverse and factor are those of the site at hand.
                "hessians": layer["hessians"] * 5 // 2,
                "one layer": facts.largest_weight * 18 * FLOAT32,
            },
        }

    def passes(self, facts: Facts) -> float:
        return 5.5 if self.gradients else 3.5

    def state_bytes(self, facts: Facts) -> int:
        return facts.finished_layers()

    def run(self, run: "Run") -> Outcome:
        from permtriton.methods.prune.refitting import refit
        from permtriton.running.state import FinishedLayers

        state = run.state(FinishedLayers, self.name)
        gradients = run.output_gradients(self.metric_tokens) if self.gradients else {}
        with run.fitting() as model:
            parts = refit(
                model,
                run.plan,
                run.dense_weights,
                run.read_by(self),
                run.batch,
                self,
                run.progress,
                state,
                run.store,
                gradients=gradients,
                low_memory=run.low_memory,
            )
        return Outcome(parts=parts)

    def words(self, outcome: Outcome) -> list[tuple[str, str]]:
        start, end = (fmean(part[when] for part in outcome.parts) for when in ("start", "end"))
        return [("refit: error", f"{start:.4f} to {end:.4f} (mean of {len(outcome.parts)} linears)")]

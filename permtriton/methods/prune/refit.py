"""Step ``refit``: least-squares weights, on SparseGPT's mask and on better ones (see `refitting` beside it)."""

from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

from permtriton.driver.step import FLOAT32, GENERATED, Facts, Outcome, Speed, Stage, Step
from permtriton.methods.options import FIT_AFTER_EXCHANGE, Refitting
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

    def seconds(self, facts: Facts, speed: Speed) -> float:
        # Both models compute a layer's products once, or where memory is short for every site; the moments cost about
        # as much as one of them. A round of conjugate gradients costs about one token per column, SparseGPT and the
        # targets three each, a round of exchanges two and its fit.
        exchanges = self.exchanges if self.iterations else 0
        rounds = 6 + self.iterations + (2 + FIT_AFTER_EXCHANGE) * exchanges
        # A round in the metric multiplies by it, too, and its tokens run forward and backward.
        share = min(self.metric_tokens / max(facts.positions, 1), 1) if self.gradients else 0
        rounds += 2 * self.metric_rounds if share else 0
        per_token = speed.forward / max(facts.positions, 1)
        return (6 if facts.low_memory else 3) * speed.forward + rounds * facts.widest * per_token + share * speed.both

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

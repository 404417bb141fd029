"""Step ``rotate``: the values of each attention head rotated, see `permtriton.methods.rotation`."""

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

from permtriton.option import documented, option
from permtriton.step import FLOAT32, Facts, Outcome, Speed, Stage, Step

if TYPE_CHECKING:
    from permtriton.run import Run


@documented
@dataclass(frozen=True)
class Rotate(Step):
    """Options of the rotations of attention values."""

    name: ClassVar[str] = "rotate"
    prefix: ClassVar[str] = "rotate"
    summary: ClassVar[str] = "the values of each attention head rotated so that masks lose less: minutes"
    stage: ClassVar[Stage] = Stage.ORDER
    keeps_values: ClassVar[bool] = False
    shards: ClassVar[bool] = False

    entropy_steps: int = option(150, "Steps of Adam that concentrate the importance of each row in few weights.")
    loss_steps: int = option(200, "Steps of Adam, after those, that lower the importance that masks lose.")

    def uses_importance(self) -> bool:
        return False

    def needs(self, facts: Facts) -> dict[str, dict[str, int]]:
        from permtriton.methods.rotation import ROWS

        scores = 32 * ROWS * facts.width * FLOAT32  # of a reader and a writer, and what their gradients keep
        return {"rotate": {**facts.layer_by_layer(), "scores": scores}}

    def seconds(self, facts: Facts, speed: Speed) -> float:
        from permtriton.methods.rotation import ROWS

        # A step costs about what ten tokens' pass through the layer costs, per row of scores.
        per_token = speed.forward / max(facts.positions, 1)
        return 1.3 * speed.forward + (self.entropy_steps + self.loss_steps) * ROWS * per_token / 10

    def run(self, run: "Run") -> Outcome:
        from permtriton.methods.rotation import rotate_values

        return rotate_values(run, self.entropy_steps, self.loss_steps)

    def words(self, outcome: Outcome) -> list[tuple[str, str]]:
        if not outcome.parts:
            return [("rotate", "no values of attention may be rotated in this model")]
        start, end = (fmean(part[when] for part in outcome.parts) for when in ("start", "end"))
        change = f"{start:.4f} to {end:.4f} (mean of {len(outcome.parts)} layers)"
        return [("rotate: importance that masks lose", change)]

"""Step ``learned``: PermLLM's learnable channel permutation, see `permtriton.methods.order.learning`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from permtriton.config import CommonConfig, ObjectiveKind, minimises
from permtriton.driver.step import BACKWARD, FLOAT32, Facts, Outcome, Stage, Step
from permtriton.methods.options import Learning
from permtriton.util.option import documented, option

if TYPE_CHECKING:
    from permtriton.driver.run import Run


@documented
@dataclass(frozen=True)
class Learned(Learning, Step):
    """Options of learning, from the order that the steps before it left; the recipe ``permllm`` has the paper's."""

    name: ClassVar[str] = "learned"
    prefix: ClassVar[str] = "learn"
    summary: ClassVar[str] = "block permutations learned by gradient (PermLLM): minutes to hours"
    stage: ClassVar[Stage] = Stage.ORDER
    onloads: ClassVar[bool] = False
    low_memory_words: ClassVar[str] = (
        "masks are computed for each micro-batch, which takes longer: masked weights and their gradients do not fit in "
        "memory"
    )

    loss: Literal["cosine", ObjectiveKind, "before_norm", "auto"] = option(
        "cosine",
        minimises(
            cosine="of the last hidden state, as in the paper",
            before_norm="the same before the final norm, as in its code",
        ),
    )

    @property
    def gradients(self) -> bool:
        return True

    def conflicts(self, config: CommonConfig, steps: Sequence[Step]) -> str:
        for pattern in config.patterns:
            if self.block_size % pattern.group:
                return (
                    f"learn_block_size {self.block_size} is not a multiple of the group of {pattern}: choose a "
                    f"multiple of {pattern.group}"
                )
        return ""

    @property
    def at_once(self) -> int:
        return self.batch_size

    @property
    def objective(self) -> str:
        return self.loss

    def needs(self, facts: Facts) -> dict[str, dict[str, int]]:
        one_layer = facts.checkpointing and facts.low_memory
        alive = facts.layer if one_layer else facts.pruned
        permutations = sum(min(self.block_size, units) * units * FLOAT32 * 6 for units in facts.spaces)
        masked = alive * 2 * facts.element  # and their gradients
        return {
            "learning": {
                **facts.gradients(), **facts.targets(), "masked weights": masked, "permutations": permutations,
                **facts.mask(),
            }
        }  # fmt: skip

    def passes(self, facts: Facts) -> float:
        return BACKWARD + 7 * self.epochs if self.gradient == "placement" else 6.5 * self.epochs

    def state_bytes(self, facts: Facts) -> int:
        return 2 * sum(units * min(self.block_size, units) for units in facts.spaces) * 3 * FLOAT32

    def batches(self, sequences: int) -> tuple[int, ...]:
        batch = min(self.batch_size, sequences)
        return batch, sequences % batch or batch

    def run(self, run: "Run") -> Outcome:
        from permtriton.methods.measure.postconditions import check_no_worse
        from permtriton.methods.order.learning import LearningFile, learn

        objective = run.objective(self)
        fisher = run.fisher(objective.kind) if self.gradient == "placement" else None
        masked = run.spread_twin()  # `learn` spreads the masked twin
        learned = learn(
            masked, run.plan, run.importances(), fisher, run.samples, objective.on(masked), self, run.working_config,
            run.progress, run.state(LearningFile, self.name), not run.low_memory, run.placement.spread_on,
        )  # fmt: skip
        start, kept = learned.history[0].loss, learned.history[learned.kept].loss
        if self.keep == "best":
            check_no_worse(start, kept, "learning")
        run.reorder(learned.indices)
        run.promise(self, kept)
        return Outcome("epoch", [asdict(epoch) for epoch in learned.history], learned.kept)

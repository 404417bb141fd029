"""Step ``searched``: an order found by exact gains of swaps, see `permtriton.methods.order.swap_search`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from permtriton.config import CommonConfig, ObjectiveKind, minimises
from permtriton.driver.step import FLOAT32, Facts, Outcome, Stage, Step
from permtriton.methods.options import Searching
from permtriton.util.option import documented, option

if TYPE_CHECKING:
    from permtriton.driver.run import Run


@documented
@dataclass(frozen=True)
class Searched(Searching, Step):
    """Options of the search, from the order that the steps before it left."""

    name: ClassVar[str] = "searched"
    prefix: ClassVar[str] = "search"
    summary: ClassVar[str] = "swaps of channels chosen by their exact gains, round by round: minutes to hours"
    stage: ClassVar[Stage] = Stage.ORDER
    onloads: ClassVar[bool] = False

    loss: Literal["auto", ObjectiveKind] = option("auto", minimises())

    @property
    def gradients(self) -> bool:
        return True

    def conflicts(self, config: CommonConfig, steps: Sequence[Step]) -> str:
        chooses = [step.name for step in steps if step.stage is Stage.PRUNE and not step.keeps_values]
        if chooses:
            return (
                f"step {self.name} before {chooses[0]} is refused: an order searched for masks alone is no better than "
                f"the heuristic one once {chooses[0]} changes the weights; leave {self.name} out, or prune with mask"
            )
        return ""

    @property
    def objective(self) -> str:
        return self.loss

    def needs(self, facts: Facts) -> dict[str, dict[str, int]]:
        from permtriton.methods.order.swap_search import GAINS_AT_ONCE

        search = {
            **facts.gradients(),
            **facts.targets(),
            "dense weights": facts.pruned * facts.element,
            "gradients": facts.pruned * max(FLOAT32, facts.element),
            "gains": (4 * facts.largest_weight + 3 * GAINS_AT_ONCE) * FLOAT32,
        }
        return {"row weights": facts.gradients(), "search": search}

    def passes(self, facts: Facts) -> float:
        return 6 * (self.rounds + 1)

    def state_bytes(self, facts: Facts) -> int:
        return 2 * sum(facts.spaces) * 8

    def run(self, run: "Run") -> Outcome:
        from permtriton.methods.measure.postconditions import check_no_worse
        from permtriton.methods.order.swap_search import SearchFile, search

        state = run.state(SearchFile, self.name)
        objective = run.objective(self)
        with run.running() as dense:
            searched = search(
                dense, run.plan, run.importances(), run.samples, objective.on(dense), self, run.working_config,
                run.progress, state,
            )  # fmt: skip
        check_no_worse(searched.history[0].loss, searched.loss, "the search")
        run.reorder(searched.indices)
        run.promise(self, searched.loss)
        return Outcome("round", [asdict(each) for each in searched.history])

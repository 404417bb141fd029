"""How much memory a compilation needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from permtriton.running.placement import Way

RELOADING = "reloading"  # the stage that is left out where a second model does not fit


@dataclass(frozen=True)
class Needs:
    """The memory of one compilation, in bytes.

    Attributes:
        program: what the process holds beside the model before the work begins; 0 on a GPU.
        model: parameters.
        held: what is in memory already and is not given up: the program, and a model that is not mapped from its files.
        stages: stage -> use -> bytes beside program and model.
        low_memory: whether steps save memory, because what they could keep does not fit.
        recomputes: whether backward passes recompute activations, because keeping them would take too much.
        way: how the model is placed.
        on_host: what stands in host memory, where layers come to the GPU one by one -> bytes; else empty.
    """

    program: int
    model: int
    held: int
    stages: Mapping[str, Mapping[str, int]]
    low_memory: bool = False
    recomputes: bool = False
    way: Way = Way.WHOLE
    on_host: Mapping[str, int] = field(default_factory=dict)

    @property
    def largest(self) -> str:
        """The stage that needs the most."""
        return max(self.stages, key=self.extra)

    def extra(self, stage: str) -> int:
        """Returns what a stage needs beside program and model."""
        return sum(self.stages[stage].values())

    def added(self, stage: str) -> int:
        """Returns what a stage needs beyond what is held."""
        return self.program + self.model + self.extra(stage) - self.held

    @property
    def largest_needed(self) -> str:
        """The stage that needs the most of those that no compilation leaves out."""
        return max((stage for stage in self.stages if stage != RELOADING), key=self.extra)

    @property
    def peak(self) -> int:
        """The most that is in use at once."""
        return self.program + self.model + self.extra(self.largest)

    def report(self) -> dict[str, object]:
        """Returns everything, for the report."""
        return {
            "peak": self.peak,
            "program": self.program,
            "model": self.model,
            "stages": {stage: dict(uses) for stage, uses in self.stages.items()},
            "low_memory": self.low_memory,
            "recomputes": self.recomputes,
            "spread": self.way is Way.SPREAD,
            "onload": self.way is Way.ONLOADED,
        }

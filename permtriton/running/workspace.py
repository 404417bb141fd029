"""The clock and the state files of a compilation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from permtriton.model.checks import sample_hash
from permtriton.running.resume import State
from permtriton.util.machine import release_memory
from permtriton.util.progress import NoProgress, Progress

Kind = TypeVar("Kind", bound=State)


def state_path(resume_path: Path, step: str) -> Path:
    return resume_path.with_suffix(f".{step}{resume_path.suffix}")


@dataclass
class Workspace:
    """What exists before anything is known about the model: the clock, and the files of states."""

    progress: Progress = field(default_factory=NoProgress)
    # path of the files that keep the states of steps, each with its step's name before the suffix; None keeps no state
    resume_path: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # time per step and stage, filled by `timed`
    states: list[State] = field(default_factory=list)  # the files that keep a state
    # what decides the result, as JSON values, filled by `note`: a state of another run is refused
    inputs: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time of the block, a stage of the progress, to ``seconds[stage]``, and gives freed memory back."""
        start_time = time.perf_counter()
        with self.progress.stage(stage, 0):
            yield
            release_memory()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start_time

    def note(self, **inputs: Any) -> None:
        """Notes what decides the results of all that follows."""
        self.inputs |= inputs

    def state(self, kind: type[Kind], step: str, model: PreTrainedModel | None = None) -> Kind | None:
        """Returns the file that keeps the state of a step; None without ``resume_path``.

        Args:
            model: what the step starts from; None for the dense model, whose hash is noted.
        """
        if self.resume_path is None:
            return None
        # ``inputs`` has the dense model's hash. A changed model is hashed here: other thread counts round differently.
        start = "dense" if model is None else sample_hash(model)
        file = kind(state_path(self.resume_path, step), {**self.inputs, "start": start})
        self.states.append(file)
        return file

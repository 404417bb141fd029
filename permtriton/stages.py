"""What the stages of a compilation hand on to each other: `permtriton.compiler` makes these values in this order."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, fx
from transformers import PreTrainedModel

from permtriton.config import CompileConfig
from permtriton.kernels.importance import ImportanceFactors
from permtriton.machine import versions
from permtriton.model.checks import weights_hash
from permtriton.model.plan import Plan
from permtriton.model.reference import Reference
from permtriton.passes.pipeline import PassResult
from permtriton.progress import Progress
from permtriton.prune.evaluate import Evaluation
from permtriton.prune.importance import importances_of
from permtriton.prune.learn import Learned
from permtriton.prune.objective import Objective
from permtriton.prune.search import Searched
from permtriton.prune.state_file import StateFile
from permtriton.prune.text import ids_hash

State = TypeVar("State", bound=StateFile)


@dataclass(frozen=True)
class Work:
    """What all stages share.

    Attributes:
        model: model that `permute` and `prune` change in place.
        config: every option.
        progress: progress reporter.
        resume_path: path of the files that keep the state of long stages, each with its stage's name before the suffix;
            None keeps no state.
        seconds: time per stage, filled by `timed`.
        states: the files that keep a state, filled by `state`.
    """

    model: PreTrainedModel
    config: CompileConfig
    progress: Progress
    resume_path: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    states: list[StateFile] = field(default_factory=list)

    def state(self, kind: type[State], stage: str, fingerprint: str) -> State | None:
        """Returns the file that keeps the state of a stage; None without ``resume_path``.

        Args:
            kind: class of the file.
            stage: name of the stage, part of the file's name.
            fingerprint: hash of everything that decides the stage's result.
        """
        if self.resume_path is None:
            return None
        file = kind(self.resume_path.with_suffix(f".{stage}{self.resume_path.suffix}"), fingerprint)
        self.states.append(file)
        return file

    def fingerprint(self, ids: Tensor) -> str:
        """Returns a hash of everything that decides what the next stage finds: options, text, weights and versions.

        Args:
            ids: calibration sequences, int64 ``[samples, tokens]``.
        """
        inputs = {
            "config": self.config.to_dict(),
            "ids": ids_hash(ids),
            "weights": weights_hash(self.model),
            "versions": versions(),
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    def importances(self, plan: Plan, statistics: Mapping[str, Tensor]) -> dict[str, ImportanceFactors]:
        """Returns linear name -> importance of its present weight, for every pruned linear.

        Args:
            plan: plan of the model.
            statistics: site name -> statistic in the present order, float32 ``[channels]``.
        """
        return importances_of(self.model, plan, self.config.importance, statistics)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time that the ``with`` block takes to ``seconds[stage]``."""
        started = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started


@dataclass(frozen=True)
class Prepared:
    """The plan of the dense model, and what was measured on it.

    Attributes:
        ids: calibration sequences, int64 ``[samples, tokens]`` on the CPU.
        batch: sequences per forward pass without gradients.
        plan: sites and channel spaces.
        graph: graph of the model, over the model's own parameters.
        reference: outputs of the dense model, which exact steps must reproduce.
        needs: estimated bytes by use.
        statistics: site name -> statistic of its input channels, float32 ``[channels]``.
        evaluation: held-out evaluation; None without windows.
    """

    ids: Tensor
    batch: int
    plan: Plan
    graph: fx.GraphModule
    reference: Reference
    needs: dict[str, int]
    statistics: dict[str, Tensor]
    evaluation: Evaluation | None


@dataclass(frozen=True)
class Permuted:
    """The model with its channels in a new order; its outputs are still those of the dense model.

    Attributes:
        indices: space name -> unit index from the dense order, int64 ``[units]``.
        graph: permuted graph.
        statistics: site name -> statistic of its input channels in the new order, float32 ``[channels]``.
        passes: result of each compiler pass.
        difference: largest difference from the dense outputs, relative to the largest output.
        retained: pruned linear -> importance that its mask retains in the new order; empty where nothing was permuted.
        learned: result of learning; None unless the permutation is ``learned``.
        searched: result of the search; None unless the permutation is ``searched``.
        objective: objective that was learned or searched with, in the present order; None unless one was.
    """

    indices: dict[str, Tensor]
    graph: fx.GraphModule
    statistics: dict[str, Tensor]
    passes: tuple[PassResult, ...] = ()
    difference: float = 0.0
    retained: dict[str, float] = field(default_factory=dict)
    learned: Learned | None = None
    searched: Searched | None = None
    objective: Objective | None = None

    @property
    def promised_loss(self) -> float | None:
        """The loss that masks alone must have in the learned or searched order; None if nothing was measured."""
        if self.learned is not None:
            return self.learned.history[self.learned.kept].loss
        return self.searched.loss if self.searched is not None else None


@dataclass(frozen=True)
class Pruned:
    """The model after pruning.

    Attributes:
        passes: result of each compiler pass.
        updates: part of the weight update -> what it reports, in the order in which they ran.
        comparison: ``"same outputs"`` if the model was compared with the lowered graph, else why it was not.
        evaluation: held-out measure, with its values for the dense and the compiled model; empty without windows.
    """

    passes: tuple[PassResult, ...]
    updates: dict[str, Any]
    comparison: str
    evaluation: dict[str, Any]

"""What the stages of a compilation hand on to each other: `permtriton.compiler` makes these values in this order."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from transformers import PreTrainedModel

from permtriton import ranks
from permtriton.config import CompileConfig
from permtriton.data.samples import Samples
from permtriton.evaluation.held_out import Evaluation
from permtriton.kernels.importance import ImportanceFactors
from permtriton.machine import device_name, release_memory, versions
from permtriton.memory import Needs
from permtriton.methods.importance import importances_of
from permtriton.methods.learning import Learned
from permtriton.methods.objective import Objective
from permtriton.methods.promises import Retained
from permtriton.methods.swap_search import Searched
from permtriton.model.checks import model_hash
from permtriton.model.plan import Plan
from permtriton.model.reference import Reference
from permtriton.offload import Offload
from permtriton.passes.pipeline import PassResult
from permtriton.progress import Progress
from permtriton.running.layer_calls import Empty
from permtriton.running.sharding import running
from permtriton.running.state import StateFile

State = TypeVar("State", bound=StateFile)
# What is lowered where memory ran out, and then continues the same run.
ROUNDING_ONLY = ("micro_batch_size", "activation_checkpointing")
STAGES = ("learning", "search", "reconstruct", "distill")  # those that keep a state


def state_paths(resume_path: Path) -> list[Path]:
    """Returns the paths of the states of all stages, whether they are there or not."""
    return [_state_path(resume_path, stage) for stage in STAGES]


def _state_path(resume_path: Path, stage: str) -> Path:
    return resume_path.with_suffix(f".{stage}{resume_path.suffix}")


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
        inputs: what decides the result of the run, filled by `identify`; it is stored with every state.
        states: the files that keep a state, filled by `state`.
        offload: where weights are that do not fit in memory, and large tensors beside them; None for memory.
    """

    model: PreTrainedModel
    config: CompileConfig
    progress: Progress
    resume_path: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    states: list[StateFile] = field(default_factory=list)
    offload: Offload | None = None

    @property
    def empty(self) -> Empty:
        """Makes a large tensor on the CPU, as ``torch.empty`` does."""
        return torch.empty if self.offload is None else self.offload.empty

    def identify(self, samples: Samples, device: torch.device) -> None:
        """Fills ``inputs``, and refuses states of another run before any work is done.

        Args:
            samples: calibration samples.
            device: device that the model will run on.

        Raises:
            OutputError: a state beside the output belongs to another run, or is damaged.
        """
        if self.resume_path is None:
            return
        options = json.loads(json.dumps(self.config.to_dict()))
        self.inputs.update(
            config={name: value for name, value in options.items() if name not in ROUNDING_ONLY},
            text=samples.sha256,
            weights=model_hash(self.model),
            versions=versions(),
            machine=device_name(device),
        )
        if ranks.count() > 1:  # sums over ranks are rounded in another order, too
            self.inputs["machine"] = f"{ranks.count()} ranks, each on {self.inputs['machine']}"
        paths = state_paths(self.resume_path)
        machines = ranks.on_first(lambda: {StateFile(path, self.inputs).check() for path in paths})
        for path in ranks.on_first(lambda: list(filter(Path.is_file, paths))):
            self.progress.say(f"found {path.name}: its stage will continue where the interrupted run stopped")
        for machine in sorted(machines - {None, self.inputs["machine"]}, key=str):
            self.progress.say(
                f"the interrupted run was on {machine}; this is {self.inputs['machine']}, which rounds sums "
                "differently: the result may differ from that of an uninterrupted run"
            )

    def state(self, kind: type[State], stage: str) -> State | None:
        """Returns the file that keeps the state of a stage; None without ``resume_path``.

        Args:
            kind: class of the file.
            stage: name of the stage, one of `STAGES`.
        """
        if self.resume_path is None:
            return None
        with self.timed("identify"):
            file = kind(_state_path(self.resume_path, stage), {**self.inputs, "start": model_hash(self.model)})
        self.states.append(file)
        return file

    def importances(self, plan: Plan, statistics: Mapping[str, Tensor]) -> dict[str, ImportanceFactors]:
        """Returns linear name -> importance of its present weight, for every pruned linear.

        Args:
            plan: plan of the model.
            statistics: site name -> statistic in the present order, float32 ``[channels]``.
        """
        return importances_of(self.model, plan, self.config.importance, statistics)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time that the ``with`` block takes to ``seconds[stage]``, and returns the memory that it freed."""
        started = time.perf_counter()
        yield
        release_memory()
        if self.offload is not None:
            self.offload.release()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started


@dataclass(frozen=True)
class Prepared:
    """The plan of the dense model, and what was measured on it.

    Attributes:
        samples: calibration samples on the CPU.
        batch: sequences per forward pass without gradients.
        plan: sites and channel spaces.
        graph: graph of the model, over the model's own parameters.
        reference: outputs of the dense model, which exact steps must reproduce.
        needs: estimated memory.
        statistics: site name -> statistic of its input channels, float32 ``[channels]``.
        evaluation: held-out evaluation; None without windows.
        spread_on: device on which the model runs with its layers spread over the ranks; None where it runs as it is.
    """

    samples: Samples
    batch: int
    plan: Plan
    graph: fx.GraphModule
    reference: Reference
    needs: Needs
    statistics: dict[str, Tensor]
    evaluation: Evaluation | None
    spread_on: torch.device | None = None

    def running(self, model: PreTrainedModel) -> AbstractContextManager[PreTrainedModel]:
        """Returns a context that yields what runs in place of the model, see `permtriton.running.sharding.running`."""
        return running(model, self.plan, self.spread_on)


@dataclass(frozen=True)
class Permuted:
    """The model with its channels in a new order; its outputs are still those of the dense model.

    Attributes:
        indices: space name -> unit index from the dense order, int64 ``[units]``.
        graph: permuted graph.
        statistics: site name -> statistic of its input channels in the new order, float32 ``[channels]``.
        passes: result of each compiler pass.
        difference: largest difference from the dense outputs, relative to the largest output.
        dense_order: pruned linear -> importance that its mask would retain in the dense model's order.
        retained: pruned linear -> importance that its mask retains in the new order.
        learned: result of learning; None unless the permutation is ``learned``.
        searched: result of the search; None unless the permutation is ``searched``.
        objective: objective that was learned or searched with, in the present order; None unless one was.
    """

    indices: dict[str, Tensor]
    graph: fx.GraphModule
    statistics: dict[str, Tensor]
    passes: tuple[PassResult, ...] = ()
    difference: float = 0.0
    dense_order: dict[str, Retained] = field(default_factory=dict)
    retained: dict[str, float] = field(default_factory=dict)
    learned: Learned | None = None
    searched: Searched | None = None
    objective: Objective | None = None

    @property
    def importance(self) -> dict[str, dict[str, float]]:
        """Pruned linear -> share of its importance that a mask retains, in the dense and in the new channel order."""
        return {
            name: {"before": dense.present / dense.total, "after": self.retained[name] / dense.total}
            for name, dense in self.dense_order.items()
            if dense.total > 0
        }

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

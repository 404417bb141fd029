"""What the stages of a compilation hand on to each other: `permtriton.compiler` makes these values in this order."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from transformers import PreTrainedModel

from permtriton.config import CompileConfig
from permtriton.model.plan import Plan
from permtriton.model.reference import Reference
from permtriton.passes.pipeline import PassResult
from permtriton.progress import Progress
from permtriton.prune.evaluate import Evaluation
from permtriton.prune.learn import Learned
from permtriton.prune.resume import ResumeFile


@dataclass(frozen=True)
class Work:
    """What all stages share.

    Attributes:
        model: model that `permute` and `prune` change in place.
        config: every option.
        progress: progress reporter.
        seconds: time per stage, filled by `timed`.
    """

    model: PreTrainedModel
    config: CompileConfig
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

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
        target: last hidden states of the dense model in the base order, ``[samples, tokens, hidden]``; None
            unless the permutation is ``learned`` and no weight update follows.
        resume: file that holds the state of learning; None without ``resume_path``.
    """

    indices: dict[str, Tensor]
    graph: fx.GraphModule
    statistics: dict[str, Tensor]
    passes: tuple[PassResult, ...] = ()
    difference: float = 0.0
    retained: dict[str, float] = field(default_factory=dict)
    learned: Learned | None = None
    target: Tensor | None = None
    resume: ResumeFile | None = None


@dataclass(frozen=True)
class Pruned:
    """The model after pruning.

    Attributes:
        passes: result of each compiler pass.
        comparison: ``"same outputs"`` if the model was compared with the lowered graph, else why it was not.
        evaluation: held-out measure, with its values for the dense and the compiled model; empty without windows.
    """

    passes: tuple[PassResult, ...]
    comparison: str
    evaluation: dict[str, Any]

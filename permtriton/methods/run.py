"""State of a running compilation: the model as changed so far, what was measured, and helpers for all steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, fx
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.kernels.importance import ImportanceFactors
from permtriton.methods.compile_config import CompileConfig
from permtriton.methods.measure.importance import importances_of
from permtriton.methods.measure.objective import Objective, dense_objective, objective_kind
from permtriton.methods.measure.postconditions import Retained, check_loss, check_retained, retained_importance
from permtriton.methods.measure.statistics import reorder_statistics, tokens_of_experts, undersampled_warning
from permtriton.methods.sizes import MemoryEstimate
from permtriton.methods.step import Outcome, Stage, Step
from permtriton.model.reference import Reference
from permtriton.passes.apply import apply_edits
from permtriton.passes.edits import edits_of, moves_of
from permtriton.passes.graph import absorb_folds
from permtriton.passes.pipeline import Pass, permutation_passes, run_passes
from permtriton.passes.plan import Plan, linear_module
from permtriton.running.mixed_precision import mixed_precision, rounded_products
from permtriton.running.placement import ModelPlacement
from permtriton.running.sharding import twin_of
from permtriton.running.workspace import Kind, Workspace
from permtriton.util.micro_batch import MicroBatch
from permtriton.util.permutation import compose, identity
from permtriton.util.progress import Progress
from permtriton.util.store import Store


@dataclass
class Run:
    """What steps read and change in a compilation; `permtriton.driver.prepare.prepare` makes it from the dense model.

    Attributes:
        model: model that the steps change in place.
        config: every option.
        workspace: times of the stages, and saved states of interrupted steps.
        samples: calibration samples on the CPU.
        generated: further samples that the dense model wrote, int64 ``[samples, tokens]``; None where it wrote none.
        batch: samples per forward pass without gradients.
        plan: sites and channel spaces.
        graph: graph of the model in the present order, over the model's own parameters.
        reference: outputs of the dense model, which exact steps must reproduce.
        placement: where the model runs.
        memory: estimated memory.
        statistics: site name -> statistic of its input channels in the present order, float32 ``[channels]``; empty
            where no step uses the importance.
        expert_tokens: experts module -> number of calibration tokens routed to each expert; empty if not measured.
        rows: linear -> row weights (sensitivity of the loss to each row) in the present order; None if not known.
        indices: space name -> unit index from the dense order, int64 ``[units]``.
        retained: pruned linear -> importance that its mask retains in the present order.
        dense_weights: pruned linear -> its weight before it was pruned; filled where a step needs it.
        difference: largest difference from the dense outputs, relative to the largest output.
        outcomes: step name -> what it reports.
    """

    model: PreTrainedModel
    config: CompileConfig
    workspace: Workspace
    samples: Samples
    generated: Tensor | None
    batch: int
    plan: Plan
    graph: fx.GraphModule
    reference: Reference
    placement: ModelPlacement
    memory: MemoryEstimate
    statistics: dict[str, Tensor] = field(default_factory=dict)
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, Tensor] | None = None

    def __post_init__(self) -> None:
        self.indices = self.unmoved()
        self.retained: dict[str, float] = {}
        self.dense_weights: dict[str, Tensor] = {}
        self.difference = 0.0
        self.outcomes: dict[str, Outcome] = {}
        self._dense_order: dict[str, Retained] = {}
        self._objectives: dict[tuple[str, int, int, bool], Objective] = {}
        self._promise: tuple[Objective, float] | None = None  # loss to reach by masking alone in the present order

    # -- what it works with --------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        return self.workspace.progress

    @property
    def store(self) -> Store:
        return self.placement.store

    @property
    def low_memory(self) -> bool:
        """Whether steps must save memory, because not all that they could keep fits."""
        return bool(self.memory.saving)

    @property
    def working_config(self) -> CompileConfig:
        """The config for backward passes: activations are checkpointed also where memory is short."""
        recomputed = self.config.activation_checkpointing or self.memory.recomputes
        return replace(self.config, activation_checkpointing=recomputed)

    def state(self, kind: type[Kind], step: str) -> Kind | None:
        """Returns the file that keeps the state of a step; None where no state is kept."""
        return self.workspace.state(kind, step, self.model)

    def samples_for(self, step: Step) -> Samples:
        """Returns the samples that a step reads.

        They are the calibration samples and, for a step that asks for them, surplus ones of the same text
        (``extra_per_sample``) and what the dense model wrote. A step with ``fresh_samples`` gets the surplus samples
        and what the dense model wrote, in random order; if they are too few, calibration samples are added.
        """
        written = [] if self.generated is None or not step.reads_generated else [self.samples.of_text(self.generated)]
        surplus = [] if self.samples.surplus is None else [self.samples.surplus]
        if not step.fresh_samples:
            extra = step.extra_per_sample * len(self.samples)
            further = [*(samples[:extra] for samples in surplus if extra), *written]
            return self.samples.joined(*further) if further else self.samples
        new = [*surplus, *written]
        if sum(map(len, new)) < step.fresh_samples:
            new = [*new, self.samples[: step.fresh_samples - sum(map(len, new))]]
        pool = new[0].joined(*new[1:])
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(self.config.seed))
        return pool[order[: step.fresh_samples]]

    # -- the model -----------------------------------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[PreTrainedModel]:
        """Returns a context that yields the model, or a copy with the same weights, on the device where steps run."""
        return self.placement.running(self.model, self.plan)

    @contextmanager
    def fitting(self) -> Iterator[PreTrainedModel]:
        """As `running`, but float32 matrix products may round their factors (TF32, bfloat16)."""
        with self.running() as model, rounded_products(model, self.config):
            yield model

    def spread_twin(self) -> PreTrainedModel:
        """Returns a copy of the model that a step may shard over the ranks, or the model if it is not sharded."""
        return self.model if self.placement.spread_on is None else twin_of(self.model)

    def importances(self) -> dict[str, ImportanceFactors]:
        return importances_of(self.model, self.plan, self.config.importance, self.statistics)

    def calibrate(self, measure: Callable[[PreTrainedModel], dict[str, Tensor]]) -> None:
        """Measures the statistics of all sites, and how many tokens each expert is sent."""
        with self.running() as model:
            statistics = measure(model)
            self.expert_tokens = tokens_of_experts(model, len(self.samples) * self.samples.longest)
            few = undersampled_warning(model, self.expert_tokens)
        self.statistics = {name: statistic.to(self.model.device) for name, statistic in statistics.items()}
        if few and not self.config.calibration.calibrate_all_experts:
            self.progress.say(few)

    def replan(self, plan: Plan, graph: fx.GraphModule, rows: dict[str, Tensor] | None) -> None:
        """Switches to a plan with fewer linears, before channels are permuted; ``rows`` is as the attribute."""
        sites = {name: site.name for site, name in self.plan.linears()}
        self.statistics = {site.name: self.statistics[sites[site.linears[0]]] for site in plan.sites}
        self.plan, self.graph, self.rows = plan, graph, rows
        self.indices = self.unmoved()

    # -- the order of channels -----------------------------------------------------------------------------------------

    def unmoved(self) -> dict[str, Tensor]:
        """Returns space name -> identity, int64 ``[units]``."""
        return {space.name: identity(space.units) for space in self.plan.spaces}

    def run_passes(self, passes: Sequence[Pass]) -> None:
        self.graph = run_passes(self.graph, passes)

    def reorder(self, indices: Mapping[str, Tensor]) -> None:
        """Writes permutations into graph, model and statistics, and checks that the outputs stay the same.

        Args:
            indices: space name -> unit index relative to the present order, int64 ``[units]``.
        """
        for space in self.plan.spaces:
            if space.name in indices:
                space.check(indices[space.name])
        promised = self._retained(indices)
        moves = moves_of(self.plan, indices)
        self.run_passes(permutation_passes(moves))
        apply_edits(self.model, edits_of(moves))
        self.indices |= {name: compose(self.indices[name], index) for name, index in indices.items()}
        order = self.plan.hidden_order(self.indices)
        self.difference = max(self.difference, self.reference.check(self.model, "after folding permutations", order))
        self.statistics = reorder_statistics(self.statistics, moves)
        self.retained = {}
        retained = {name: share.present for name, share in self._retained({}).items()}
        check_retained({name: share.chosen for name, share in promised.items()}, retained)
        self.graph = absorb_folds(self.graph)
        self._dense_order = self._dense_order or promised
        self.retained = retained
        order = self.plan.hidden_order({**self.unmoved(), **indices})
        self._objectives = {key: objective.reordered(order, self.store) for key, objective in self._objectives.items()}
        self._promise, self.rows = None, None

    def _retained(self, indices: Mapping[str, Tensor]) -> dict[str, Retained]:
        return retained_importance(self.model, self.plan, self.importances(), indices, self.retained)

    @property
    def importance_shares(self) -> dict[str, dict[str, float]]:
        """Pruned linear -> share of its importance that a mask retains, in the dense and in the new channel order."""
        return {
            name: {"before": dense.present / dense.total, "after": self.retained[name] / dense.total}
            for name, dense in self._dense_order.items()
            if dense.total > 0
        }

    def keep_dense(self, steps: Sequence[Step]) -> None:
        """Stores what the remaining steps and the record need of the dense model, before the first one prunes it."""
        if not self._dense_order and self.statistics:  # nothing was permuted
            self._dense_order = self._retained({})
            self.retained = {name: share.chosen for name, share in self._dense_order.items()}
        if any(step.dense_weights for step in steps):
            for _, name in self.plan.linears():
                weight = linear_module(self.model, name).get_parameter("weight").detach()
                self.dense_weights[name] = self.store.empty(weight.shape, dtype=weight.dtype).copy_(weight)
        keys = {self._objective_key(step): step for step in steps if step.objective}
        self._objectives = {key: objective for key, objective in self._objectives.items() if key in keys}
        for step in keys.values():
            self.objective(step)

    # -- the distance from the dense model -----------------------------------------------------------------------------

    def objective(self, step: Step) -> Objective:
        """Returns what a step minimises; its targets are the dense outputs in the present channel order.

        The first call computes the targets, so it must come before the model is pruned.
        """
        key = self._objective_key(step)
        if key not in self._objectives:
            rounds = self.config.mixed_precision and step.stage is Stage.TRAIN  # as the training steps do
            with self.running() as model, mixed_precision(model, rounds):
                objective = dense_objective(
                    model, objective_kind(step.objective, self.model), self.samples_for(step), self.batch, self.store
                )
            self._objectives[key] = objective.on(self.model)
        return self._objectives[key]

    def _objective_key(self, step: Step) -> tuple[str, int, int, bool]:
        written = step.reads_generated and self.generated is not None
        return objective_kind(step.objective, self.model), step.fresh_samples, step.extra_per_sample, written

    def promise(self, step: Step, loss: float) -> None:
        """Records the loss, by a step's objective, that the masked model must have in the present order."""
        self._promise = self.objective(step), loss

    def check_promise(self) -> None:
        """Checks the loss of the masked model against the loss that `promise` recorded, if any."""
        if self._promise is None:
            return
        objective, promised = self._promise
        with self.running() as model:
            mean = partial(objective.on(model).mean, model, self.samples)
            loss = MicroBatch(self.config.micro_batch_size).run(mean)
        check_loss(promised, loss, self.model.dtype)
        self._promise = None

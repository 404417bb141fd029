"""State of a running compilation: the model as changed so far, what was measured, and helpers for all steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.kernels.importance import ImportanceFactors
from permtriton.methods.measure.importance import importances_of, retained
from permtriton.methods.measure.losses import Objective, dense_objective, objective_kind
from permtriton.methods.measure.postconditions import check_loss, check_retained, total_importance
from permtriton.methods.measure.statistics import reorder_statistics, tokens_of_experts, undersampled_warning
from permtriton.methods.planning import Planned
from permtriton.methods.sizes import MemoryEstimate
from permtriton.methods.step import Outcome, Stage, Step
from permtriton.model.reference import Reference
from permtriton.passes.graph import absorb_folds
from permtriton.passes.pipeline import Pass, permutation_passes, run_passes
from permtriton.passes.plan import Plan, layer_modules, linear_module, weight_in_out
from permtriton.passes.weight_folds import apply_edits, edits_of, moves_of
from permtriton.running.backward import checkpointed
from permtriton.running.layer_walk import LayerWalk
from permtriton.running.mixed_precision import mixed_precision, rounded_products
from permtriton.running.placement import DevicePlacement, ModelPlacement
from permtriton.running.resume import StateFile
from permtriton.util.micro_batch import MicroBatch
from permtriton.util.permutation import compose, identity
from permtriton.util.store import Store


@dataclass(kw_only=True)
class Run(Planned):
    """What steps read and change in a compilation; `permtriton.driver.prepare.prepare` makes it of the dense model."""

    generated_ids: Tensor | None  # samples that the dense model wrote, int64 ``[samples, tokens]``; None if none
    batch_size: int  # samples per forward pass without gradients
    reference: Reference  # outputs of the dense model, which must stay the same when channels are reordered
    placement: ModelPlacement  # where the model runs
    memory: MemoryEstimate
    # site name -> statistic of its input channels in the present order, float32 ``[channels]``; empty where no step
    # uses the importance
    statistics: dict[str, Tensor] = field(default_factory=dict)
    # experts module -> number of calibration tokens routed to each expert; empty if not measured
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.progress = self.workspace.progress
        self.indices = self.identity_indices()  # space name -> unit index from the dense order, int64 ``[units]``
        # Pruned linear -> importance that its mask retains in the present order; filled with the statistics.
        self.retained_importance: dict[str, float] = {}
        # Pruned linear -> its weight before it was pruned; filled where a step needs it.
        self.dense_weights: dict[str, Tensor] = {}
        self.max_output_difference = 0.0  # largest difference from the dense outputs, relative to the largest output
        self.outcomes: dict[str, Outcome] = {}  # step name -> what the step reports
        # Pruned linear -> importance of the dense weight: all of it, and what an N:M mask retains.
        self._dense_importance: dict[str, float] = {}
        self._dense_retained: dict[str, float] = {}
        self._objectives: dict[tuple[str, int, int, bool], Objective] = {}
        self._expected_loss: tuple[Objective, float] | None = None  # as `promise` recorded it; None if there is none

    # -- what steps work with ------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        return self.placement.store

    def state(self, step: str) -> StateFile:
        return self.workspace.state(step, self.model)

    def samples_for(self, step: Step) -> Samples:
        """Returns the samples that a step reads.

        They are the calibration samples, surplus samples of the same text for a step with ``extra_per_sample``, and
        what the dense model wrote if the step ``reads_generated``. A step with ``fresh_samples`` gets that many samples
        in random order: surplus samples, what the dense model wrote and, if these are too few, calibration samples.
        """
        ids = self.generated_ids if step.reads_generated else None
        generated = [] if ids is None else [Samples({"input_ids": ids}, special=self.samples.special)]
        surplus = [] if self.samples.surplus is None else [self.samples.surplus]
        if not step.fresh_samples:
            num_extra = step.extra_per_sample * len(self.samples)
            additions = [*(samples[:num_extra] for samples in surplus if num_extra), *generated]
            return self.samples.joined(*additions) if additions else self.samples
        fresh = [*surplus, *generated]
        if sum(map(len, fresh)) < step.fresh_samples:
            fresh = [*fresh, self.samples[: step.fresh_samples - sum(map(len, fresh))]]
        pool = fresh[0].joined(*fresh[1:])
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(self.config.seed))
        return pool[order[: step.fresh_samples]]

    # -- the model -----------------------------------------------------------------------------------------------------

    def placed_model(self) -> AbstractContextManager[PreTrainedModel]:
        """Returns a context that yields the model, or a copy with the same weights, on the device where steps run."""
        return self.placement.running(self.model, self.plan)

    @contextmanager
    def placed_model_for_fit(self) -> Iterator[PreTrainedModel]:
        """As `placed_model`, but float32 matrix products may round their factors (TF32, bfloat16)."""
        with self.placed_model() as model, rounded_products(model, self.config):
            yield model

    def recomputing(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Returns a context in which backward passes recompute activations, if the config says so or memory is short.

        Layers that come to a GPU one by one are always recomputed, which brings their weights back to the GPU.
        """
        recomputes = self.config.activation_checkpointing or self.memory.recomputes or self.store.onloads
        return checkpointed(layer_modules(model, self.plan) if recomputes else [])

    def walk(self, model: PreTrainedModel, samples: Samples | None = None) -> LayerWalk:
        """Returns a walk through the layers of the placed model, by default on the calibration samples."""
        return LayerWalk(model, self.plan, samples or self.samples, self.batch_size, self.store)

    def importances(self) -> dict[str, ImportanceFactors]:
        return importances_of(self.model, self.plan, self.config.importance, self.statistics)

    def calibrate(self, measure: Callable[[LayerWalk], dict[str, Tensor]]) -> None:
        """Stores the site statistics that ``measure`` returns, and how many tokens were sent to each expert."""
        with self.placed_model() as model:
            statistics = measure(self.walk(model))
            self.expert_tokens = tokens_of_experts(model, len(self.samples) * self.samples.longest)
            warning = undersampled_warning(model, self.expert_tokens)
        self.statistics = {name: statistic.to(self.model.device) for name, statistic in statistics.items()}
        self._dense_importance = total_importance(self.model, self.plan, self.importances())
        self._dense_retained = self.retained_importance = self._retained({})
        if warning and not self.config.calibration.calibrate_all_experts:
            self.progress.say(warning)

    def replan(self, plan: Plan, graph: fx.GraphModule) -> None:
        """Switches to a plan with fewer linears, before channels are permuted."""
        sites = {name: site.name for site, name in self.plan.linears()}
        self.statistics = {site.name: self.statistics[sites[site.linears[0]]] for site in plan.sites}
        self.plan, self.graph = plan, graph
        self.retained_importance = {name: self.retained_importance[name] for _, name in plan.linears()}
        self.indices = self.identity_indices()

    # -- the order of channels -----------------------------------------------------------------------------------------

    def identity_indices(self) -> dict[str, Tensor]:
        """Returns space name -> identity, int64 ``[units]``."""
        return {space.name: identity(space.units) for space in self.plan.spaces}

    def run_passes(self, passes: Sequence[Pass]) -> None:
        self.graph = run_passes(self.graph, passes)

    def reorder(self, indices: Mapping[str, Tensor]) -> None:
        """Writes permutations into graph, model and statistics; checks outputs and the importance that masks retain.

        ``indices``: space name -> unit index relative to the present order, int64 ``[units]``.
        """
        for space in self.plan.spaces:
            if space.name in indices:
                space.check(indices[space.name])
        expected_retained = self._retained(indices)
        moves = moves_of(self.plan, indices)
        self.run_passes(permutation_passes(moves))
        apply_edits(self.model, edits_of(moves))
        self.indices |= {name: compose(self.indices[name], index) for name, index in indices.items()}
        order = self.plan.hidden_order(self.indices)
        difference = self.reference.check(self.model, "after folding permutations", order)
        self.max_output_difference = max(self.max_output_difference, difference)
        self.statistics = reorder_statistics(self.statistics, moves)
        self.retained_importance = self._retained({})
        check_retained(expected_retained, self.retained_importance)
        self.graph = absorb_folds(self.graph)
        order = self.plan.hidden_order({**self.identity_indices(), **indices})
        self._objectives = {key: objective.reordered(order, self.store) for key, objective in self._objectives.items()}
        self._expected_loss = None

    def _retained(self, indices: Mapping[str, Tensor]) -> dict[str, float]:
        """Returns pruned linear -> the importance that its mask retains in the order of ``indices``.

        ``indices``: space name -> unit index, int64 ``[units]``; spaces without an index keep the present order.
        """
        importances, retained_by_name = self.importances(), dict[str, float]()
        for site, name in self.plan.linears():
            scores = importances[name].scores(weight_in_out(linear_module(self.model, name)))
            index = indices.get(site.space.name)
            order = identity(site.channels) if index is None else site.expand(index)
            retained_by_name[name] = retained(scores, order.to(scores.device), self.plan.patterns[name])
        return retained_by_name

    @property
    def importance_shares(self) -> dict[str, dict[str, float]]:
        """Pruned linear -> share of its importance that its mask retains, ``before`` and ``after`` reordering.

        Linears whose importance sums to 0 are left out.
        """
        return {
            name: {"before": self._dense_retained[name] / total, "after": after / total}
            for name, after in self.retained_importance.items()
            if (total := self._dense_importance[name]) > 0
        }

    def keep_dense(self, steps: Sequence[Step]) -> None:
        """Stores what the remaining ``steps``, the first of which prunes, need of the dense model."""
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
        """Returns the objective of a step; its targets are the dense model's outputs in the present channel order.

        The first call computes the targets, so it must come before the model is pruned.
        """
        key = self._objective_key(step)
        if key not in self._objectives:
            # Targets of training steps are computed with rounding, as these steps train. Weights that are spread, or
            # come to the GPU layer by layer, are not there as a whole, so they cannot be rounded once in advance.
            rounds = self.config.mixed_precision and step.stage is Stage.TRAIN
            whole = self.placement.kind is DevicePlacement.WHOLE
            with self.placed_model() as model, mixed_precision(model, rounds, fixed=whole):
                samples, kind = self.samples_for(step), objective_kind(step.objective, self.model)
                objective = dense_objective(model, kind, samples, self.batch_size, self.store)
            self._objectives[key] = objective.on(self.model)
        return self._objectives[key]

    def _objective_key(self, step: Step) -> tuple[str, int, int, bool]:
        with_generated = step.reads_generated and self.generated_ids is not None
        return objective_kind(step.objective, self.model), step.fresh_samples, step.extra_per_sample, with_generated

    def promise(self, step: Step, loss: float) -> None:
        """Records the loss, by a step's objective, that the masked model must have in the present order."""
        self._expected_loss = self.objective(step), loss

    def check_promise(self) -> None:
        """Checks the loss of the masked model against the loss that `promise` recorded, if any."""
        if self._expected_loss is None:
            return
        objective, expected_loss = self._expected_loss
        with self.placed_model() as model:
            loss = MicroBatch(self.config.micro_batch_size).run(objective.on(model).mean)
        check_loss(expected_loss, loss, self.model.dtype)
        self._expected_loss = None

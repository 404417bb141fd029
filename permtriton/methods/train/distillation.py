"""Distillation: all kept weights of a pruned model are trained together, to give the dense model's outputs back."""

from functools import partial

import torch
from transformers import PreTrainedModel

from permtriton.config import CommonConfig
from permtriton.data.samples import Samples
from permtriton.methods.measure.objective import Objective
from permtriton.methods.train.kept_weights import KeptWeights, weights_of
from permtriton.methods.train.trainer import Course, Trained, Trainer
from permtriton.methods.train.training_step import ROUND, Training
from permtriton.passes.plan import Plan, layer_modules
from permtriton.running.backward import checkpointed
from permtriton.running.state import StateFile
from permtriton.running.store import MEMORY, Store
from permtriton.util.progress import Progress


@torch.enable_grad()
def distill(  # noqa: PLR0913
    model: PreTrainedModel,
    plan: Plan,
    samples: Samples,
    objective: Objective,
    options: Training,
    config: CommonConfig,
    progress: Progress,
    state: StateFile | None = None,
    *,
    store: Store = MEMORY,
) -> Trained:
    """Trains the kept weights of all pruned linears on ``objective``; nothing else of the model changes.

    A tenth of the sequences, at most 24, is held out. It is measured after every epoch, or after every round of one
    that has more than `ROUND` steps; the weights with the lowest loss on it are kept, which may be those before
    training.

    Args:
        model: pruned model; its weights change in place.
        objective: the loss, with the dense model's outputs on ``samples``, their channels in the order of ``model``.
        state: file that keeps the state between rounds, to continue from and to write to; None keeps no state. Its
            inputs must cover the pruned weights, or what they follow from.
        store: where copies of the weights and what the optimizer keeps are.

    Raises:
        CalibrationError: a loss or a gradient is not finite; some weights may have changed in that step already.
        OutputError: the state belongs to another run, is damaged, or cannot be written.
    """
    names = [name for _, name in plan.linears()]
    weights = weights_of(model, names)
    alone = len(weights) == len(names) and all(site.calls == 1 for site in plan.sites)
    kept = KeptWeights(weights, options.optimizer, store, changes_at_once=alone)
    samples = samples.to(model.device, model.dtype)
    layers = layer_modules(model, plan) if config.activation_checkpointing or store.onloads else []
    course = Course.of(len(samples), samples.tokens, options, config.seed)
    course = (course.first(options.ends_after) if options.ends_after else course).in_rounds(ROUND, options.batch_size)
    with kept.trainable(model), checkpointed(layers):
        return Trainer(kept, model, partial(objective.of, model, samples), course, config, "distill").run(
            state, progress
        )

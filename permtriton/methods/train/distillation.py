"""Distillation: all kept weights of a pruned model are trained together, to give the dense model's outputs back."""

import json

import torch
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.config import CommonConfig
from permtriton.data.samples import Samples
from permtriton.methods.measure.objective import Objective
from permtriton.methods.train.kept_weights import (
    MOMENTS,
    KeptWeights,
    Trained,
    WeightTrainer,
    steps_per_epoch,
    weights_of,
)
from permtriton.methods.train.training import Training
from permtriton.model.forward import last_hidden_state
from permtriton.passes.plan import Plan, layer_modules
from permtriton.running.backward import checkpointed
from permtriton.running.state import StateFile
from permtriton.util.progress import Progress


@torch.enable_grad()
def distill(
    model: PreTrainedModel,
    plan: Plan,
    samples: Samples,
    objective: Objective,
    options: Training,
    config: CommonConfig,
    progress: Progress,
    state: StateFile | None = None,
) -> Trained:
    """Trains the kept weights of all pruned linears on ``objective``; nothing else of the model changes.

    A tenth of the sequences is held out. The weights of the epoch with the lowest loss on it are kept, which may be
    those before training.

    Args:
        model: pruned model; its weights change in place.
        objective: the loss, with the dense model's outputs on ``samples``, their channels in the order of ``model``.
        state: file that keeps the state between epochs, to continue from and to write to; None keeps no state. Its
            inputs must cover the pruned weights, or what they follow from.

    Raises:
        CalibrationError: a loss or a gradient is not finite; the weights are then those of the last step.
        OutputError: the state belongs to another run, is damaged, or cannot be written.
    """
    kept = KeptWeights(weights_of(model, [name for _, name in plan.linears()]))
    samples = samples.to(model.device, model.dtype)

    def loss_of(rows: Tensor) -> Tensor:
        return objective.loss(last_hidden_state(model, samples[rows]), rows)

    layers = layer_modules(model, plan) if config.activation_checkpointing else []
    steps = steps_per_epoch(len(samples), options, config)
    with kept.trainable(model), checkpointed(layers):
        trainer = WeightTrainer(kept, loss_of, len(samples), samples.tokens, options, config, "distill")
        result = _load(state, kept, trainer, options.epochs) if state else Trained()
        if result.history:
            progress.say(f"distill: continuing after epoch {len(result.history) - 1} of an interrupted run")
        with progress.stage("distill", options.epochs * steps) as advance:
            advance(max(len(result.history) - 1, 0) * steps)
            trainer.fit(result, advance, lambda: _save(state, kept, trainer, result))
    return result


def _save(state: StateFile | None, kept: KeptWeights, trainer: WeightTrainer, result: Trained) -> None:
    if state is None:
        return
    tensors = {f"best.{name}": best for name, best in trainer.best.items()}
    for name, values in kept.values.items():
        tensors[f"value.{name}"] = values
        for key in (*MOMENTS, "step"):
            tensors[f"{key}.{name}"] = trainer.optimizer.state[values][key]
    state.write(tensors, {"result": json.dumps(result.report())})


def _load(state: StateFile, kept: KeptWeights, trainer: WeightTrainer, epochs: int) -> Trained:
    """Restores weights and optimizer and returns the result so far, or returns an empty one where there is no state.

    Raises:
        OutputError: the state belongs to another run, or is damaged.
    """
    found = state.read()
    if found is None:
        return Trained()
    tensors, texts = found
    try:
        result = Trained.read(json.loads(texts["result"]), epochs)
    except (KeyError, TypeError, ValueError) as error:
        raise state.damaged(f"its history cannot be read ({error})") from error
    like: dict[str, Tensor] = {}
    for name, values in kept.values.items():
        like |= {f"best.{name}": trainer.best[name], f"step.{name}": torch.tensor(0.0)}
        like |= {f"{key}.{name}": values for key in ("value", *MOMENTS)}
    state.check_tensors(tensors, like)
    with torch.no_grad():
        for name, values in kept.values.items():
            values.copy_(tensors[f"value.{name}"])
            moments = {key: tensors[f"{key}.{name}"].to(values) for key in MOMENTS}
            trainer.optimizer.state[values] = {"step": tensors[f"step.{name}"], **moments}
    kept.write(kept.values)
    trainer.best = {name: tensors[f"best.{name}"] for name in trainer.best}
    return result

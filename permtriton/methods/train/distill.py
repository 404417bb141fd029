"""Step ``distill``: trains all kept weights of a pruned model together to reproduce the dense model's outputs.

A tenth of the samples, at most 24, is held out. The loss on them is measured after every epoch, or after every round of
an epoch with more than `ROUND` steps. The weights with the lowest held-out loss are kept, perhaps the initial ones.
"""

from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import ClassVar, Literal

import torch

from permtriton.config import OptimizerKind
from permtriton.data.samples import Samples
from permtriton.methods.measure.losses import ObjectiveKind, minimises
from permtriton.methods.run import Run
from permtriton.methods.sizes import FLOAT32, Memory, ModelSizes
from permtriton.methods.step import BACKWARD, GENERATED, Outcome, Stage, Step
from permtriton.methods.train.kept_weights import KeptWeights, weights_of
from permtriton.methods.train.trainer import Schedule, Trainer, num_held_out, num_to_draw, split_held_out
from permtriton.util.option import documented, option
from permtriton.util.permutation import epoch_order

HALF = 2  # bytes
MOST_FURTHER = 63
ROUND = 64  # most steps of a round, or the steps that read three times the held-out samples, if these are more
WITHOUT_STEPS = {"distill_steps": (0,)}


@documented
@dataclass(frozen=True)
class Distill(Step):
    """Options of distillation."""

    name: ClassVar[str] = "distill"
    prefix: ClassVar[str] = "distill"
    summary: ClassVar[str] = "kept weights trained together, to give the dense model's outputs: minutes to hours"
    stage: ClassVar[Stage] = Stage.TRAIN
    shards: ClassVar[bool] = False
    gradients = True

    epochs: int = option(
        20,
        "Passes over all samples that it reads; more where there are fewer further ones than asked for.",
        minimum=1,
        needs=WITHOUT_STEPS,
    )
    learning_rate: float = option(
        5e-3,
        "Peak learning rate, with cosine decay to 0: relative to the root mean square of a linear's kept weights.",
        positive=True,
    )
    batch_size: int = option(8, "Sequences per optimiser step.", minimum=1)
    optimizer: Literal[OptimizerKind] = option(
        "adam",
        "What changes the weights: adam, which keeps two numbers per weight, or adafactor: one per row and column.",
    )
    generated: bool = option(True, GENERATED)
    further: int = option(
        0,
        "Further samples of the calibration text to train on, per sample of --samples; where it has fewer, or none may "
        "be drawn, all samples are read more often.",
        maximum=MOST_FURTHER,
        needs=WITHOUT_STEPS,
    )
    steps: int = option(
        0,
        "Optimiser steps on samples that calibration does not read, where there are, in place of all those epochs; 0 "
        "for epochs.",
    )
    loss: Literal["auto", ObjectiveKind] = option("auto", minimises())

    @property
    def objective(self) -> str:
        return self.loss

    @property
    def saves_memory(self) -> str:
        return f"{self.prefix}_optimizer=adafactor" if self.optimizer == "adam" else ""

    @property
    def backward_batch(self) -> int:
        return self.batch_size

    @property
    def reads_generated(self) -> bool:
        return self.generated

    @property
    def extra_per_sample(self) -> int:
        return self.further

    @property
    def fresh_samples(self) -> int:
        return num_to_draw(self.steps * self.batch_size) if self.steps else 0

    @property
    def _in_one_round(self) -> bool:
        """Whether the schedule is one round, so that the only state that is saved is the one at the end."""
        return 0 < self.steps <= ROUND

    def uses_importance(self) -> bool:
        return False

    def memory(self, sizes: ModelSizes) -> tuple[Memory, ...]:
        collected = sizes.ranks > 1 or self.batch_size > sizes.micro_batch_size
        copies = 1 if self._in_one_round else 2  # a state saved before the last round holds another copy
        weights = copies * int(sizes.pruned * sizes.kept) * sizes.element + sizes.pruned * FLOAT32 * collected
        movable = sizes.targets + self._optimizer_bytes(sizes) + weights
        return (Memory(sizes.gradients + sizes.mask, movable),)

    def passes(self, sizes: ModelSizes) -> float:
        return BACKWARD * self._epochs(sizes.calibration, sizes.sequences)

    def state_bytes(self, sizes: ModelSizes) -> int:
        kept = int(sizes.pruned * sizes.kept) * sizes.element
        return kept if self._in_one_round else 2 * (2 * kept + self._optimizer_bytes(sizes))

    def _optimizer_bytes(self, sizes: ModelSizes) -> int:
        """Returns the bytes that the optimizer keeps: Adam's moments, and the remainders of half-precision weights."""
        moments = 2 * FLOAT32 if self.optimizer == "adam" else 0
        return sizes.pruned * (moments + (HALF if sizes.element < FLOAT32 else 0))

    def _epochs(self, calibration: int, sequences: int) -> int:
        """Returns the number of epochs: enough for ``steps``, or else ``epochs``, more if there are too few samples."""
        if self.steps:
            return ceil(self.steps * self.batch_size / max(sequences - num_held_out(sequences), 1))
        return max(self.epochs, round(self.epochs * (1 + self.further) * calibration / sequences))

    @torch.enable_grad()
    def run(self, run: Run) -> Outcome:
        samples = run.samples_for(self)
        with run.placed_model() as model:
            names = [name for _, name in run.plan.linears()]
            weights = weights_of(model, names)
            # The gradient of a shared weight arrives in parts, and the weight may change only after the last part.
            unshared = len(weights) == len(names) and all(site.num_calls == 1 for site in run.plan.sites)
            kept_weights = KeptWeights(weights, self.optimizer, run.store, updates_in_backward=unshared)
            schedule = self._schedule(samples, self._epochs(len(run.samples), len(samples)), run.config.seed)
            return Trainer(run, self, kept_weights, schedule).run()

    def _schedule(self, samples: Samples, epochs: int, seed: int) -> Schedule:
        """Returns rounds of epochs, or of their first ``steps`` steps, over all samples that are not held out."""
        trained, held_out = split_held_out(len(samples), seed)
        orders = (epoch_order(trained.numel(), seed, number) for number in range(1, epochs + 1))
        batches = [trained[order].split(self.batch_size) for order in orders]
        if self.steps:
            batches = [tuple(chain.from_iterable(batches))[: self.steps]]
        # With many held-out sequences rounds are longer, so that measuring them remains a small part of the time.
        length = max(ROUND, 3 * held_out.numel() // self.batch_size)
        rounds = [epoch[start : start + length] for epoch in batches for start in range(0, len(epoch), length)]
        return Schedule(rounds, held_out, samples.tokens, self.learning_rate)

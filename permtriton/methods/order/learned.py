"""Step ``learned``: PermLLM's learnable channel permutation, trained on the whole model (eq. 2-10).

The model's weights do not change and stay in base order; each pruned linear sees its weight through an N:M mask that
follows the permutations (`permtriton.methods.order.masked_model`). Only the permutations' logits are trained
(`permtriton.methods.order.relaxation`), on the distance between the outputs of the masked and the dense model.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from permtriton.config import CommonConfig
from permtriton.errors import CalibrationError, ConfigError
from permtriton.methods.measure.fisher import curvatures
from permtriton.methods.measure.losses import ObjectiveKind, minimises
from permtriton.methods.measure.postconditions import check_no_worse
from permtriton.methods.order.masked_model import LearnedMasks, masked_model
from permtriton.methods.order.relaxation import Relaxation
from permtriton.methods.run import Run
from permtriton.methods.sizes import FLOAT32, Memory, ModelSizes
from permtriton.methods.step import BACKWARD, Outcome, Stage, Step, from_options
from permtriton.passes.plan import ChannelSpace, Plan
from permtriton.running.backward import loss_scale
from permtriton.running.resume import StateFile
from permtriton.util import ranks
from permtriton.util.micro_batch import MicroBatch
from permtriton.util.option import option
from permtriton.util.permutation import epoch_order, identity, moved

NOISE = 0.1  # bound of the uniform noise that is added to the identity at the start
OPTIMIZER_KEYS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Learned(Step):
    """Options of the step ``learned``, starting from the order so far; recipe ``permllm`` has the paper's values."""

    name: ClassVar[str] = "learned"
    prefix: ClassVar[str] = "learn"
    summary: ClassVar[str] = "block permutations learned by gradient (PermLLM): minutes to hours"
    stage: ClassVar[Stage] = Stage.ORDER
    onloads: ClassVar[bool] = False
    gradients = True

    block_size: int = option(
        64,
        "Channels per block of the block permutation, a multiple of M; "
        "a value of at least the number of channels makes one block: the full permutation.",
        minimum=1,
    )
    sinkhorn_rounds: int = option(5, "Rounds of row and column normalisation (eq. 3-5); 0 means a row softmax.")
    tau_start: float = option(1.0, "Temperature at the first step.", positive=True)
    tau_end: float = option(0.5, "Temperature at the last step, reached linearly.", positive=True)
    tau_falls: Literal["step", "epoch"] = option(
        "step", "When the temperature falls: at every step, or at the start of every epoch but the first."
    )
    epochs: int = option(50, "Passes over the calibration sequences.", minimum=1)
    batch_size: int = option(16, "Sequences per optimiser step.", minimum=1)
    learning_rate: float = option(
        5e-3,
        "Peak AdamW learning rate, with cosine decay. With fewer than a hundred steps, 0.02 gives a lower loss; the "
        "recipe permllm uses 0.005 with the importance ria.",
        positive=True,
    )
    weight_decay: float = option(0.1, "AdamW weight decay.")
    layers: str = option(
        "all",
        "Layers whose permutations are learned; the others keep their order.",
        pattern=r"all|last:[1-9]\d*",
        values="all, or last:K with K at least 1",
    )
    init: Literal["identity", "random"] = option(
        "identity", "Initial permutation: near the order of the steps before (identity), or random."
    )
    clamp: float = option(0.0, "Limit on the absolute value of logits; 0 for none.")
    gradient: Literal["placement", "published"] = option(
        "placement",
        "Gradient of the permutations: placement (estimated change of the loss for each channel at each position, to "
        "second order) or published (the paper's, through a softmax over each group).",
    )
    keep: Literal["best", "last"] = option(
        "best",
        "Epoch to keep: best (lowest loss under the hard permutation, the initial order included) or last.",
    )
    loss: Literal["cosine", ObjectiveKind, "before_norm", "auto"] = option(
        "cosine",
        minimises(
            cosine="of the last hidden state, as in the paper",
            before_norm="of the hidden state before the final norm, as in the paper's code",
        ),
    )

    objective = from_options(lambda step: step.loss)
    backward_batch = from_options(lambda step: step.batch_size)

    def conflicts(self, config: CommonConfig, steps: Sequence[Step]) -> str:
        for pattern in config.patterns:
            if self.block_size % pattern.group:
                return (
                    f"learn_block_size {self.block_size} is not a multiple of the group size of {pattern}: choose a "
                    f"multiple of {pattern.group}"
                )
        return ""

    def memory(self, sizes: ModelSizes) -> Memory:
        one_layer = sizes.checkpointing and sizes.low_memory
        weight_and_gradient_bytes = (sizes.pruned // sizes.layers if one_layer else sizes.pruned) * 2 * sizes.element
        permutation_bytes = sum(min(self.block_size, units) * units * FLOAT32 * 6 for units in sizes.spaces)
        return Memory(sizes.gradients + weight_and_gradient_bytes + permutation_bytes + sizes.mask, sizes.targets)

    def passes(self, sizes: ModelSizes) -> float:
        return BACKWARD + 7 * self.epochs if self.gradient == "placement" else 6.5 * self.epochs

    def state_bytes(self, sizes: ModelSizes) -> int:
        return 2 * sum(units * min(self.block_size, units) for units in sizes.spaces) * 3 * FLOAT32

    def run(self, run: Run) -> Outcome:
        indices, outcome = self.learn(run)
        if self.keep == "best":
            check_no_worse(outcome.history[0]["loss"], outcome.kept_row["loss"], "learning")
        run.reorder(indices)
        run.promise(self, outcome.kept_row["loss"])
        return outcome

    @torch.enable_grad()
    def learn(self, run: Run) -> tuple[dict[str, Tensor], Outcome]:
        """Returns space name -> unit index relative to the base order, int64 ``[units]``, and the outcome.

        The outcome's history has one row per epoch: the loss under the hard permutations after the epoch, and how many
        units are ``moved`` from the base order. Epoch 0 is the base order.
        """
        spaces = self.spaces(run.plan)
        if not spaces:
            reason = f"with learn_layers {self.layers}, all channels that may move are read in earlier layers, too"
            if self.layers == "all":
                reason = "none of this model's channels may move (see permtriton inspect)"
            raise ConfigError(f"no permutation is left to learn: {reason}; remove the step learned from the recipe")
        # Objective and Fisher information belong to the dense model, so they are computed before it is masked.
        objective, state = run.objective(self), run.state(self.name)
        curvature_by_linear = curvatures(run, objective.kind) if self.gradient == "placement" else None
        relaxation = self.relaxation(spaces, run.config.seed, run.placement.spread_on or run.model.device)
        with masked_model(run, relaxation, curvature_by_linear) as masks:
            trainer = OrderTrainer(run, self, masks, relaxation)
            with run.progress.stage("learn", self.epochs * trainer.steps_per_epoch) as advance:
                return trainer.run(state, advance)

    def spaces(self, plan: Plan) -> list[ChannelSpace]:
        """Returns the spaces to learn: those that may be permuted and are read only in layers that ``layers`` selects.

        Spaces that are read outside the layers of the model are not learned.
        """
        num_layers = max(site.layer for site in plan.sites) + 1
        first_layer = 0 if self.layers == "all" else num_layers - int(self.layers.removeprefix("last:"))
        movable_spaces = (space for space in plan.spaces if not space.frozen)
        return [space for space in movable_spaces if all(site.layer >= first_layer for site in plan.sites_of(space))]

    def relaxation(self, spaces: Sequence[ChannelSpace], seed: int, device: torch.device) -> Relaxation:
        return Relaxation(
            spaces,
            seed,
            device,
            block_size=self.block_size,
            rounds=self.sinkhorn_rounds,
            clamp=self.clamp,
            noise=NOISE if self.init == "identity" else None,
        )


class OrderTrainer:
    """Trains the permutations: optimiser steps, losses and schedules. It sets the masks of a `masked_model`."""

    def __init__(self, run: Run, options: Learned, masks: LearnedMasks, relaxation: Relaxation) -> None:
        self._run, self._options, self._masks, self._relaxation = run, options, masks, relaxation
        self._objective = run.objective(options).on(masks.model)
        self._optimizer = torch.optim.AdamW(
            relaxation.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
        )
        self._micro_batch = MicroBatch(run.config.micro_batch_size)
        self.steps_per_epoch = math.ceil(len(run.samples) / options.batch_size)

    def run(self, state: StateFile, advance: Callable[..., None]) -> tuple[dict[str, Tensor], Outcome]:
        index, outcome = self._load(state)
        history = outcome.history
        advance((len(history) - 1) * self.steps_per_epoch)
        for epoch in range(len(history), self._options.epochs + 1):
            start_time, steps_done = time.perf_counter(), epoch * self.steps_per_epoch
            order = epoch_order(len(self._run.samples), self._run.config.seed, epoch)
            for step, rows in enumerate(order.split(self._options.batch_size), steps_done - self.steps_per_epoch):
                advance(1, f"loss {self.step(rows, step):.4f}, base {history[0]['loss']:.4f}")
            hard_index = self.index(steps_done)
            loss, tau = self.hard_loss(hard_index), self.tau(steps_done)
            history.append(_row(epoch, loss, hard_index, tau, time.perf_counter() - start_time))
            if self._options.keep == "last" or loss < outcome.kept_row["loss"]:
                index, outcome.kept = hard_index, epoch
            self._save(state, index, outcome)
        return self._relaxation.by_space(index), outcome

    def _load(self, state: StateFile) -> tuple[Tensor, Outcome]:
        """Restores what `_save` wrote; returns the order to keep so far (at first, the base order) and the outcome."""
        if (saved_state := state.read()) is None:
            base = identity(self._relaxation.units)
            row = _row(0, self.hard_loss(base), base, self._options.tau_start, 0.0)
            return base, Outcome("epoch", [row], kept=0)
        tensors, values = saved_state
        self._relaxation.load_state_dict({name: tensors[name] for name in self._relaxation.state_dict()})
        moments = {
            number: {key: tensors[f"{number}.{key}"] for key in OPTIMIZER_KEYS}
            for number, _ in enumerate(self._relaxation.parameters())
        }
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})
        outcome = Outcome("epoch", values["history"], values["kept"])
        self._run.progress.say(f"continuing after epoch {len(outcome.history) - 1} of an interrupted run")
        return tensors["index"], outcome

    def _save(self, state: StateFile, index: Tensor, outcome: Outcome) -> None:
        tensors = {"index": index, **self._relaxation.state_dict()}
        for number, moments in self._optimizer.state_dict()["state"].items():
            tensors |= {f"{number}.{key}": value for key, value in moments.items()}
        state.write(tensors, history=outcome.history, kept=outcome.kept)

    def tau(self, step: int) -> float:
        """Returns the temperature at a step, from ``tau_start`` to ``tau_end``.

        With ``tau_falls`` "step", tau falls at every step and reaches ``tau_end`` at the last one. With "epoch", tau
        falls at every epoch and would reach ``tau_end`` one epoch after the last.
        """
        epochs, steps = self._options.epochs, self.steps_per_epoch
        if self._options.tau_falls == "epoch":
            fraction = min(step // steps, epochs - 1) / epochs
        else:
            fraction = min(step / max(epochs * steps - 1, 1), 1.0)
        return self._options.tau_start + (self._options.tau_end - self._options.tau_start) * fraction

    @torch.no_grad()
    def index(self, step: int) -> Tensor:
        """Returns the hard permutation at the temperature of a step, as from `Relaxation.assign`, on the CPU."""
        return ranks.on_first(lambda: self._relaxation.assign(self._relaxation.soft(self.tau(step))).cpu())

    def step(self, rows: Tensor, step: int) -> float:
        total_steps = self._options.epochs * self.steps_per_epoch
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * 0.5 * (1 + math.cos(math.pi * step / total_steps))
        soft_permutations = self._relaxation.soft(self.tau(step))
        index = self._relaxation.assign(soft_permutations)
        ranks.send_from_first([index])
        scale = loss_scale(rows.numel() * self._run.samples.tokens)

        def backward(size: int) -> list[Tensor]:
            # The batch's curvature is scaled like its gradient, and each pass on each rank adds an equal share of it.
            passes = min(ranks.count(), rows.numel()) * (1 if self._masks.keep else len(ranks.parts(rows, size)) or 1)
            # This also drops the gradients of an attempt that ran out of memory.
            self._masks.set(index, soft_permutations, scale / passes)
            return [loss for loss, _ in self._objective.backward(rows, size, scale)]

        losses = [*self._micro_batch.run(backward), self._masks.backward(scale)]
        # The host waits for the GPU only here, once all work is queued.
        *partial_losses, largest_gradient = torch.stack(losses).tolist()
        loss_sum = self._objective.finite(ranks.total(sum(partial_losses)), "learning loss")
        if not 0 < largest_gradient < math.inf:
            raise CalibrationError(
                f"the largest gradient of the permutations is {largest_gradient}: nothing can be learned in this "
                "dtype; try `dtype=float32` or bfloat16"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss_sum

    @torch.no_grad()
    def hard_loss(self, index: Tensor) -> float:
        def mean(size: int) -> float:
            self._masks.set(index.to(self._relaxation.scale.device), None)
            return self._objective.mean(size)

        return self._objective.finite(self._micro_batch.run(mean), "learning loss")


def _row(number: int, loss: float, index: Tensor, tau: float, seconds: float) -> dict[str, Any]:
    return {"epoch": number, "loss": loss, "moved": moved(index), "tau": tau, "seconds": seconds}

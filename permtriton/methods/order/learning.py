"""Learning the permutations: PermLLM's learnable channel permutation on the model itself (eq. 2-10).

The model's weights do not change and stay in base order; each pruned linear sees its weight through an N:M mask that
follows the permutations. Only the logits of the permutations learn, from the distance between the outputs of the masked
and the dense model.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.config import CommonConfig
from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, ConfigError, MemoryTooSmallError
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.swap_gains import RankOneCurvature
from permtriton.methods.measure.fisher import Fisher
from permtriton.methods.measure.objective import Objective, finite
from permtriton.methods.options import Learning
from permtriton.methods.order.masked_model import Masks, masked_model
from permtriton.methods.order.relaxation import Relaxation
from permtriton.passes.plan import ChannelSpace, Plan
from permtriton.running import ranks
from permtriton.running.backward import loss_scale
from permtriton.running.micro_batch import MicroBatch, Result
from permtriton.running.state import StateFile
from permtriton.util.permutation import identity, moved
from permtriton.util.progress import Progress

OPTIMIZER_KEYS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Epoch:
    """The outcome of one epoch.

    Attributes:
        epoch: Number of the epoch, from 1; 0 is the base order before learning.
        loss: Mean loss over the calibration set, under the hard permutations after the epoch.
        moved: Number of units, over all spaces, that are not where the base order has them.
        tau: Temperature after the epoch.
        seconds: Time of training and evaluation.
    """

    epoch: int
    loss: float
    moved: int
    tau: float
    seconds: float


@dataclass
class LearnedOrder:
    """The result of learning.

    Attributes:
        indices: Space name -> unit index relative to the base order, int64 ``[units]`` on the CPU.
        history: All epochs so far; the first is the base order.
        kept: Number of the epoch that ``indices`` come from.
    """

    indices: dict[str, Tensor]
    history: list[Epoch] = field(default_factory=list)
    kept: int = 0


class LearningFile(StateFile):
    """A safetensors file with the state between epochs, from which an interrupted run continues."""

    def load(self, relaxation: Relaxation, optimizer: torch.optim.Optimizer) -> LearnedOrder | None:
        """Restores the state into ``relaxation`` and ``optimizer`` and returns the result so far; None without a file.

        Args:
            relaxation: Logits of this run, to be replaced.

        Raises:
            OutputError: The file belongs to another run, or is damaged.
        """
        state = self.read()
        if state is None:
            return None
        tensors, texts = state
        history = [Epoch(**row) for row in json.loads(texts["history"])]
        indices = {name: tensors[f"index.{name}"] for name in relaxation.units}
        result = LearnedOrder(indices, history, int(texts["kept"]))
        restored = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
        for number, parameter in enumerate(relaxation.parameters()):
            parameter.data.copy_(tensors[f"parameter.{number}"])
            restored["state"][number] = {key: tensors[f"optimizer.{number}.{key}"] for key in OPTIMIZER_KEYS}
        optimizer.load_state_dict(restored)
        return result

    def save(self, relaxation: Relaxation, optimizer: torch.optim.Optimizer, result: LearnedOrder) -> None:
        """Replaces the file by the current state; if interrupted, the earlier file stays intact.

        Raises:
            OutputError: The file cannot be written.
        """
        tensors = {f"index.{name}": index for name, index in result.indices.items()}
        for number, parameter in enumerate(relaxation.parameters()):
            tensors[f"parameter.{number}"] = parameter.detach()
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{number}.{key}"] = value
        history = json.dumps([asdict(epoch) for epoch in result.history])
        self.write(tensors, {"history": history, "kept": str(result.kept)})


def learned_spaces(plan: Plan, options: Learning) -> list[ChannelSpace]:
    """Returns the spaces that learn: those that may move and are read only in layers that ``layers`` selects.

    Spaces that are read outside the layers of the model do not learn.
    """
    first = 0
    if options.last_layers is not None:
        first = max(site.layer for site in plan.sites) + 1 - options.last_layers
    return [
        space for space in plan.spaces if not space.frozen and all(site.layer >= first for site in plan.sites_of(space))
    ]


@torch.enable_grad()
def learn(  # noqa: PLR0913
    model: PreTrainedModel,
    plan: Plan,
    importances: Mapping[str, ImportanceFactors],
    fisher: Mapping[str, Fisher] | None,
    samples: Samples,
    objective: Objective,
    options: Learning,
    config: CommonConfig,
    progress: Progress,
    resume: LearningFile | None = None,
    keep_masked: bool = True,
    spread_on: torch.device | None = None,
) -> LearnedOrder:
    """Learns a unit index for every space that may move.

    Args:
        model: Dense model, its channels already in base order; unchanged on return.
        fisher: Linear name -> Fisher information of the dense weight; None for the published gradient.
        objective: The loss, with the dense model's outputs on ``samples``.
        config: Options of the compilation; the seed is that of the initial logits and of the order of sequences.
        resume: Storage of the state between epochs, to continue from and to write to; None keeps no state.
        keep_masked: Whether memory allows to compute masks once per step, see `permtriton.methods.order.masked_model`.
        spread_on: Device on which the weights of ``model``, a twin, are spread over the ranks; None where they are not.

    Raises:
        CalibrationError: The loss is not finite, or the gradients are zero or not finite.
        ConfigError: No permutation is left to learn.
        OutputError: The state belongs to another run, is damaged, or cannot be written.
    """
    spaces = learned_spaces(plan, options)
    if not spaces:
        raise ConfigError(_nothing_learns(options))
    relaxation = Relaxation(spaces, options, config.seed, spread_on or model.device)
    optimizer = torch.optim.AdamW(relaxation.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    curvatures = None
    if fisher is not None:
        curvatures = {name: RankOneCurvature(*each.curvature(samples.positions)) for name, each in fisher.items()}
    masked = masked_model(model, plan, importances, relaxation, options, config, curvatures, keep_masked, spread_on)
    with masked as masks:
        trainer = OrderTrainer(model, masks, relaxation, optimizer, samples, objective, options, config)
        result = resume.load(relaxation, optimizer) if resume else None
        if result is None:
            base = {space.name: identity(space.units) for space in spaces}
            result = LearnedOrder(base, [Epoch(0, trainer.hard_loss(base), 0, options.tau_start, 0.0)])
        else:
            progress.say(f"continuing after epoch {result.history[-1].epoch} of an interrupted run")
        with progress.stage("learn", options.epochs * trainer.steps_per_epoch) as advance:
            done = result.history[-1].epoch
            advance(done * trainer.steps_per_epoch)
            for number in range(done + 1, options.epochs + 1):
                _learn_epoch(trainer, number, result, options, advance)
                if resume:
                    resume.save(relaxation, optimizer, result)
    return result


def _learn_epoch(
    trainer: "OrderTrainer", number: int, result: LearnedOrder, options: Learning, advance: Callable[..., None]
) -> None:
    """Trains one epoch and records it in ``result``."""
    started = time.perf_counter()
    for loss in trainer.epoch(number):
        advance(1, f"loss {loss:.4f}, base {result.history[0].loss:.4f}")
    done = number * trainer.steps_per_epoch
    indices = trainer.indices(done)
    epoch = Epoch(
        epoch=number,
        loss=trainer.hard_loss(indices),
        moved=sum(moved(index) for index in indices.values()),
        tau=trainer.tau(done),
        seconds=time.perf_counter() - started,
    )
    best = result.history[result.kept].loss
    result.history.append(epoch)
    if options.keep == "last" or epoch.loss < best:
        result.indices, result.kept = indices, number


def _nothing_learns(options: Learning) -> str:
    why = (
        "none of this model's channels may move (see permtriton inspect)"
        if options.last_layers is None
        else f"with learn_layers {options.layers}, all channels that may move are read in earlier layers, too"
    )
    return f"no permutation is left to learn: {why}; leave the step learned out"


class OrderTrainer:
    """Steps, losses and schedules of one learning run; to be used inside `masked_model`, whose masks it sets.

    Args:
        model: Masked model.
        objective: The loss, with the dense model's outputs on ``samples``.
        config: Options of the compilation; the seed is that of the order of sequences.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        masks: Masks,
        relaxation: Relaxation,
        optimizer: torch.optim.Optimizer,
        samples: Samples,
        objective: Objective,
        options: Learning,
        config: CommonConfig,
    ) -> None:
        self._model, self._masks, self._relaxation, self._optimizer = model, masks, relaxation, optimizer
        self._samples, self._objective = samples.to(model.device, model.dtype), objective
        self._options, self._seed, self._micro_batch_size = options, config.seed, config.micro_batch_size
        self._micro_batch = MicroBatch(config.micro_batch_size)
        self.steps_per_epoch = math.ceil(len(samples) / options.batch_size)

    def tau(self, step: int) -> float:
        """Returns the temperature at a step, from ``tau_start`` to ``tau_end``.

        It falls with every step and reaches the end at the last one, or with every epoch, and would reach it after the
        last one.
        """
        epochs, steps = self._options.epochs, self.steps_per_epoch
        if self._options.tau_falls == "epoch":
            fraction = min(step // steps, epochs - 1) / epochs
        else:
            fraction = min(step / max(epochs * steps - 1, 1), 1.0)
        return self._options.tau_start + (self._options.tau_end - self._options.tau_start) * fraction

    def indices(self, step: int) -> dict[str, Tensor]:
        """Returns space name -> unit index, int64 ``[units]``: the hard permutations at the temperature of a step."""
        with torch.no_grad():
            return ranks.on_first(lambda: self._relaxation.harden(self._relaxation.soft(self.tau(step))))

    def epoch(self, number: int) -> Iterator[float]:
        """Trains one epoch and yields each step's loss.

        The order of sequences depends on the seed and the epoch's number alone, so that a resumed run repeats it.
        """
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        order = torch.randperm(len(self._samples), generator=generator)
        for offset, rows in enumerate(order.split(self._options.batch_size)):
            yield self.step(rows, (number - 1) * self.steps_per_epoch + offset)

    def step(self, rows: Tensor, step: int) -> float:
        """Takes one optimizer step on the sequences ``rows`` and returns their loss.

        Raises:
            CalibrationError: The loss is not finite, or the gradients are zero or not finite.
        """
        total = self._options.epochs * self.steps_per_epoch
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * 0.5 * (1 + math.cos(math.pi * step / total))
        soft = self._relaxation.soft(self.tau(step))
        index = self._relaxation.assign(soft)
        ranks.send_from_first([index])
        scale = loss_scale(rows.numel() * self._samples.tokens)

        def backward(size: int) -> list[Tensor]:
            # As much curvature as there is gradient: that of the whole batch, once over all passes and ranks.
            passes = min(ranks.count(), rows.numel()) * (1 if self._masks.keep else len(ranks.parts(rows, size)) or 1)
            self._masks.set(
                index, soft, scale / passes
            )  # drops the gradients of an attempt for which memory was too small
            return [loss for loss, _ in self._objective.backward(self._model, self._samples, rows, size, scale)]

        losses = self._run(backward)
        losses.append(self._masks.backward(scale))
        *parts, largest = torch.stack(losses).tolist()  # the host waits only here, where all work is queued
        loss_sum = self._check(ranks.total(sum(parts)))
        if not 0 < largest < math.inf:
            raise CalibrationError(
                f"the largest gradient of the permutations is {largest}: nothing can be learned in this dtype; try "
                "`dtype=float32` or bfloat16"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss_sum

    @torch.no_grad()
    def hard_loss(self, indices: Mapping[str, Tensor]) -> float:
        """Returns the mean loss over all sequences under hard permutations.

        Raises:
            CalibrationError: The loss is not finite.
        """
        index = self._relaxation.join(indices)

        def mean(size: int) -> float:
            self._masks.set(index, None)
            return self._objective.mean(self._model, self._samples, size)

        return self._check(self._run(mean))

    def _run(self, work: Callable[[int], Result]) -> Result:
        """Returns ``work(size)`` for a size that fits in memory, in the last resort without keeping masked weights."""
        try:
            return self._micro_batch.run(work)
        except MemoryTooSmallError:
            if not self._masks.keep:
                raise
        self._masks.stop_keeping()
        self._micro_batch = MicroBatch(self._micro_batch_size)
        return self._micro_batch.run(work)

    def _check(self, loss: float) -> float:
        return finite(loss, "learning loss", self._model.dtype)

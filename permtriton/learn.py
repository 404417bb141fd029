"""Learning the permutations: PermLLM's learnable channel permutation on the model itself (eq. 2-10).

The model's weights stay as they are, in base order; each pruned linear sees its weight through an N:M mask that moves
with the permutations. Only the logits of the permutations learn, from the cosine distance between the last hidden
states of the masked and the dense model.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton.config import LearnConfig
from permtriton.errors import CalibrationError, ConfigError
from permtriton.forward import cosine_loss, last_hidden_state
from permtriton.importance import Importance
from permtriton.kernels.nm_mask import nm_mask
from permtriton.permutation import identity, moved
from permtriton.plan import ChannelSpace, Plan, layer_modules, linear_module
from permtriton.progress import Progress
from permtriton.relaxation import Relaxation, SiteBlocks
from permtriton.resume import Epoch, Learned, ResumeFile
from permtriton.sparsity import NMPattern


def learned_spaces(plan: Plan, config: LearnConfig) -> list[ChannelSpace]:
    """Returns the spaces that learn: not frozen, and read in the last layers only where ``learn_layers`` says so."""
    first = 0
    if config.last_layers is not None:
        first = max(site.layer for site in plan.sites) + 1 - config.last_layers
    return [
        space for space in plan.spaces if not space.frozen and all(site.layer >= first for site in plan.sites_of(space))
    ]


@torch.enable_grad()
def learn(
    model: PreTrainedModel,
    plan: Plan,
    importances: Mapping[str, Importance],
    ids: Tensor,
    target: Tensor,
    config: LearnConfig,
    pattern: NMPattern,
    seed: int,
    progress: Progress,
    resume: ResumeFile | None = None,
) -> Learned:
    """Learns a unit index for every space that may move.

    Args:
        model: dense, its channels already in base order; comes back unchanged.
        plan: of the model.
        importances: of every pruned linear, by name.
        ids: int64 ``[sequences, tokens]``.
        target: the dense model's last hidden states ``[sequences, tokens, hidden]``.
        config: the recipe.
        pattern: what the masks keep.
        seed: of the start and the order of sequences.
        progress: told of each step.
        resume: where to keep state between epochs, and to continue from.

    Raises:
        CalibrationError: the loss is not finite.
        ConfigError: no permutation is left to learn.
        OutputError: the state between epochs cannot be written.
    """
    spaces = learned_spaces(plan, config)
    if not spaces:
        raise ConfigError(_nothing_learns(config))
    relaxation = Relaxation(spaces, config, seed, model.device)
    optimizer = torch.optim.AdamW(relaxation.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    with masked_model(model, plan, importances, pattern, relaxation, config) as masks:
        trainer = Trainer(model, masks, relaxation, optimizer, ids, target, config, seed)
        result = resume.load(relaxation, optimizer) if resume else None
        if result is None:
            base = {space.name: identity(space.units) for space in spaces}
            result = Learned(base, [Epoch(0, trainer.evaluate(base), 0, config.tau_start, 0.0)])
        else:
            progress.say(f"continuing after epoch {result.history[-1].epoch} of an interrupted run")
        with progress.stage("learn", config.epochs * trainer.steps_per_epoch) as advance:
            done = result.history[-1].epoch
            advance(done * trainer.steps_per_epoch)
            for number in range(done + 1, config.epochs + 1):
                _learn_epoch(trainer, number, result, config, advance)
                if resume:
                    resume.save(relaxation, optimizer, result)
    return result


def _learn_epoch(
    trainer: "Trainer", number: int, result: Learned, config: LearnConfig, advance: Callable[..., None]
) -> None:
    """Trains one epoch and notes in ``result`` what it found."""
    started = time.perf_counter()
    for loss in trainer.epoch(number):
        advance(1, f"loss {loss:.4f}, base {result.history[0].loss:.4f}")
    done = number * trainer.steps_per_epoch
    indices = trainer.indices(done)
    epoch = Epoch(
        epoch=number,
        loss=trainer.evaluate(indices),
        moved=sum(moved(index) for index in indices.values()),
        tau=trainer.tau(done),
        seconds=time.perf_counter() - started,
    )
    best = result.history[result.kept].loss
    result.history.append(epoch)
    if config.keep_epoch == "last" or epoch.loss < best:
        result.indices, result.kept = indices, number


def _nothing_learns(config: LearnConfig) -> str:
    why = (
        "none of this model's channels may move (see permtriton inspect)"
        if config.last_layers is None
        else f"with learn_layers {config.learn_layers}, every one that may move is read in earlier layers too"
    )
    return f"no permutation is left to learn: {why}; use --permutation none or heuristic"


class Trainer:
    """Steps, losses and schedules of one run; made inside `masked_model`, whose masks it moves."""

    def __init__(
        self,
        model: PreTrainedModel,
        masks: "Masks",
        relaxation: Relaxation,
        optimizer: torch.optim.Optimizer,
        ids: Tensor,
        target: Tensor,
        config: LearnConfig,
        seed: int,
    ) -> None:
        self._model, self._masks, self._relaxation, self._optimizer = model, masks, relaxation, optimizer
        self._ids, self._target = ids.to(model.device), target.to(model.device)
        self._config, self._seed = config, seed
        self.steps_per_epoch = math.ceil(ids.shape[0] / config.batch_size)

    def tau(self, step: int) -> float:
        """Temperature, linear over all steps."""
        total = max(self._config.epochs * self.steps_per_epoch - 1, 1)
        part = min(step / total, 1.0)
        return self._config.tau_start + (self._config.tau_end - self._config.tau_start) * part

    def indices(self, step: int) -> dict[str, Tensor]:
        """The hard permutations at the temperature of ``step``."""
        with torch.no_grad():
            return self._relaxation.harden(self._relaxation.soft(self.tau(step)))

    def epoch(self, number: int) -> Iterator[float]:
        """Trains one epoch, whose order depends on the seed and its number alone; yields each step's loss."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        order = torch.randperm(self._ids.shape[0], generator=generator)
        for offset, rows in enumerate(order.split(self._config.batch_size)):
            yield self.step(rows, (number - 1) * self.steps_per_epoch + offset)

    def step(self, rows: Tensor, step: int) -> float:
        """One optimiser step on the sequences ``rows``; returns their loss."""
        total = self._config.epochs * self.steps_per_epoch
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * 0.5 * (1 + math.cos(math.pi * step / total))
        soft = self._relaxation.soft(self.tau(step))
        self._masks.set(self._relaxation.assign(soft), soft)
        rows = rows.to(self._ids.device, non_blocking=True)
        scale = 2.0 ** round(math.log2(rows.numel() * self._ids.shape[1]))  # float16 gradients of a mean vanish
        losses = []
        for part in rows.split(self._config.micro_batch_size):
            loss = cosine_loss(last_hidden_state(self._model, self._ids[part]), self._target[part])
            loss = loss * (part.numel() / rows.numel())
            (loss * scale).backward()
            losses.append(loss.detach())
        loss_sum = self._check(sum(torch.stack(losses).tolist()))
        self._masks.backward(scale)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss_sum

    @torch.no_grad()
    def evaluate(self, indices: Mapping[str, Tensor]) -> float:
        """Mean cosine distance over all sequences under hard permutations."""
        self._masks.set(self._relaxation.join(indices), None)
        size = self._config.micro_batch_size
        parts = list(zip(self._ids.split(size), self._target.split(size), strict=True))
        losses = torch.stack([cosine_loss(last_hidden_state(self._model, ids), target) for ids, target in parts])
        total = sum(loss * ids.shape[0] for loss, (ids, _) in zip(losses.tolist(), parts, strict=True))
        return self._check(total / self._ids.shape[0])

    def _check(self, loss: float) -> float:
        if not math.isfinite(loss):
            raise CalibrationError(
                f"the learning loss is {loss} in {self._model.dtype}: activations overflow (try --dtype float32), or "
                "the weights are damaged"
            )
        return loss


class _MaskedWeight(nn.Module):
    """The parametrization of a pruned linear's weight."""

    def __init__(
        self, importance: Importance, sizes: Sequence[int], pattern: NMPattern, group_scale: bool, in_out: bool
    ) -> None:
        super().__init__()
        self._importance, self._sizes, self._pattern = importance, list(sizes), pattern
        self._group_scale, self._in_out = group_scale, in_out
        self.index = identity(importance.scale.numel()).to(importance.scale.device)
        self.soft = importance.scale.new_empty(0)

    def forward(self, weight: Tensor) -> Tensor:
        factors = self._importance
        masked = nm_mask(
            weight.t() if self._in_out else weight,
            factors.scale,
            factors.row,
            factors.column,
            factors.power,
            self.index,
            self.soft,
            self._sizes,
            self._pattern.kept,
            self._pattern.group,
            self._group_scale,
        )
        return masked.t() if self._in_out else masked


class Masks:
    """The masks of all pruned linears whose order learns, set together at every step.

    Args:
        entries: each site's blocks, and the masked weights that read it.
    """

    def __init__(self, entries: Sequence[tuple[SiteBlocks, Sequence[_MaskedWeight]]]) -> None:
        self._entries = list(entries)
        self._soft: Sequence[Tensor] = ()
        self._leaves: list[tuple[SiteBlocks, Tensor]] = []  # each stands for its site's soft blocks
        self._channels = [blocks.units.numel() for blocks, _ in entries]
        self._units = torch.cat([blocks.units for blocks, _ in entries])
        channels = [torch.arange(count, device=self._units.device) for count in self._channels]
        self._shifts = torch.cat(channels) - self._units  # the same all over a block: its channels move as its units

    @torch.no_grad()
    def set(self, index: Tensor, soft: Sequence[Tensor] | None) -> None:
        """Puts every site's channels in the order of its space.

        Args:
            index: of the units of all spaces, as `Relaxation.assign` returns it.
            soft: what it was assigned from, for `backward` to send gradients to; None where there is no such pass.
        """
        self._soft, self._leaves = soft or (), []
        orders = (index[self._units] + self._shifts).split(self._channels)
        leaf = torch.empty(0, device=index.device)
        for (blocks, weights), order in zip(self._entries, orders, strict=True):
            if soft is not None:
                leaf = blocks.flat(soft).detach().requires_grad_()
                self._leaves.append((blocks, leaf))
            for weight in weights:
                weight.index, weight.soft = order, leaf

    def backward(self, scale: float) -> None:
        """Sends what the forward and backward passes since `set` left at the leaves on to the soft permutations.

        Args:
            scale: by which the loss was multiplied; gradients are divided by it.

        Raises:
            CalibrationError: the gradients are all zero, or not finite: nothing would be learned.
        """
        grads = [torch.zeros_like(matrices) for matrices in self._soft]
        for blocks, leaf in reversed(self._leaves):
            if leaf.grad is not None:
                blocks.add_gradient(leaf.grad, grads)
        largest = float(torch.stack([grad.div_(scale).abs().amax() for grad in grads]).amax())
        if not 0 < largest < math.inf:
            raise CalibrationError(
                f"the largest gradient of the permutations is {largest}: nothing can be learned in this dtype; try "
                "--dtype float32 or bfloat16"
            )
        torch.autograd.backward(self._soft, grads)


@contextmanager
def masked_model(
    model: PreTrainedModel,
    plan: Plan,
    importances: Mapping[str, Importance],
    pattern: NMPattern,
    relaxation: Relaxation,
    config: LearnConfig,
) -> Iterator[Masks]:
    """Masks every pruned linear for a while, freezes the model and recomputes activations a layer at a time.

    Weights of ``nn.Linear`` are stored input-major meanwhile, so that the masks gather whole rows.
    """
    entries = []
    learning = {space.name for space in learned_spaces(plan, config)}
    with ExitStack() as stack:
        stack.enter_context(_frozen(model))
        if config.activation_checkpointing:
            stack.enter_context(checkpointed(layer_modules(model, plan)))
        for site in plan.sites:
            blocks = relaxation.blocks_of(site) if site.space.name in learning else None
            sizes = blocks.sizes if blocks else [pattern.group] * (site.channels // pattern.group)
            weights = []
            for name in site.linears:
                module = linear_module(model, name)
                in_out = isinstance(module, Conv1D)
                weights.append(_MaskedWeight(importances[name], sizes, pattern, config.group_scale, in_out))
                stack.enter_context(_parametrized(module, weights[-1], in_out))
            if blocks:
                entries.append((blocks, weights))
        yield Masks(entries)


@contextmanager
def _parametrized(module: nn.Module, masked: _MaskedWeight, in_out: bool) -> Iterator[None]:
    weight, order = module.get_parameter("weight"), list(module._parameters)
    if not in_out:
        weight.data = weight.data.t().contiguous().t()
    parametrize.register_parametrization(module, "weight", masked, unsafe=True)
    try:
        yield
    finally:
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
        weight = module.get_parameter("weight")
        weight.data = weight.data.contiguous()
        for name in order:
            module._parameters[name] = module._parameters.pop(name)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    needed = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in needed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in needed:
            parameter.requires_grad_(True)


@contextmanager
def checkpointed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Recomputes each layer in the backward pass. transformers' own switch would need train mode, and so dropout."""
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward

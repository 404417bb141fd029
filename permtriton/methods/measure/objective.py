"""What makes a pruned model a good one: the distance of its outputs from the dense model's, lower is better.

``cosine`` is the paper's: the mean over tokens of ``1 - cos`` of the last hidden states (eq. 10). ``kl`` is the mean
over tokens of ``KL(dense || pruned)`` of the next token's distribution, in nats, for models with a language-model head.
The dense model's logits are not stored: they follow from its last hidden states, a chunk of tokens at a time.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from permtriton.config import ObjectiveKind
from permtriton.data.samples import Samples
from permtriton.errors import ConfigError
from permtriton.model.checks import TOLERANCE, relative_difference
from permtriton.model.core import body_of, core_of, has_head
from permtriton.model.forward import (
    cosine_loss,
    hidden_states,
    last_hidden_state,
    replaced_forwards,
    to_numbers,
    without_cache,
)
from permtriton.running import ranks

LOGITS_AT_ONCE = 1 << 24  # logits of one chunk of tokens; a few float32 copies of them are alive at once
PROBE_TOKENS = 8
CHOOSE = "choose the loss cosine (such as `search_loss=cosine`)"


class Head:
    """What a model computes of its last hidden state: the language-model head, with its scaling and soft-capping.

    Raises:
        ConfigError: the model has no such head, or its logits do not follow from its last hidden state.
    """

    def __init__(self, model: PreTrainedModel, samples: Samples) -> None:
        if not has_head(model):
            raise ConfigError(f"objective kl needs a language-model head; {type(model).__name__} has none: {CHOOSE}")
        self._model = model
        probe = samples.start(1, PROBE_TOKENS).to(model.device, model.dtype).inputs
        self._arguments = tuple(probe)
        core = core_of(model)
        with torch.no_grad(), without_cache(model):
            with _recorded(body_of(model)) as self._outputs:
                expected = model(**probe).logits
            if core not in self._outputs:  # a head may call only what is inside its backbone
                self._outputs[core] = core(**probe)
            found = self(self._outputs[core][0])
        self.vocabulary = expected.shape[-1]
        if found.shape != expected.shape or relative_difference(expected, found) > TOLERANCE[model.dtype]:
            raise ConfigError(
                f"objective kl: the logits of {type(model).__name__} do not follow from its last hidden state: {CHOOSE}"
            )

    def on(self, model: PreTrainedModel) -> "Head":
        """Returns the head of another model of the same class."""
        other = copy.copy(self)
        names = {module: name for name, module in self._model.named_modules()}
        other._outputs = {model.get_submodule(names[module]): output for module, output in self._outputs.items()}
        other._model = model
        return other

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the logits ``[sequences, tokens, vocabulary]`` of hidden states ``[sequences, tokens, hidden]``."""
        core = core_of(self._model)
        output = copy.copy(self._outputs[core])
        output["last_hidden_state"] = hidden
        with _returning({**self._outputs, core: output}):
            ids = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
            return self._model(**dict.fromkeys(self._arguments, ids)).logits


@contextmanager
def _recorded(modules: Sequence[Any]) -> Iterator[dict[Any, Any]]:
    """Yields a dict that a run inside the context fills with the output of each module."""
    outputs: dict[Any, Any] = {}
    handles = [m.register_forward_hook(lambda module, _, output: outputs.update({module: output})) for m in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _returning(outputs: Mapping[Any, Any]) -> Iterator[None]:
    """Inside the context, modules and their decoders, which OPT's head calls, return outputs and compute nothing."""
    inner = {module.get_decoder(): output for module, output in outputs.items() if module.get_decoder() is not None}
    given = {**inner, **outputs}
    with replaced_forwards(given, lambda module: lambda *arguments, **named: given[module]):
        yield


class _ChunkedKL(torch.autograd.Function):
    """The sum over tokens of ``KL(dense || pruned)``; its gradient is computed with it, a chunk of tokens at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, target: Tensor, head: Head) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        grads = []
        tokens = max(LOGITS_AT_ONCE // head.vocabulary, 1)
        pairs = zip(hidden.flatten(0, 1).split(tokens), target.flatten(0, 1).split(tokens), strict=True)
        for pruned, dense in pairs:
            expected = log_softmax(head(dense.unsqueeze(0)).float(), -1)
            leaf = pruned.unsqueeze(0).detach().requires_grad_(ctx.needs_input_grad[0])
            with torch.set_grad_enabled(ctx.needs_input_grad[0]):
                found = log_softmax(head(leaf).float(), -1)
                loss = kl_div(found, expected, reduction="sum", log_target=True)
            if ctx.needs_input_grad[0]:
                grads += torch.autograd.grad(loss, leaf)
            total += loss.detach()
        if grads:
            ctx.save_for_backward(torch.cat(grads, 1).view_as(hidden))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * grad, None, None


@dataclass(frozen=True)
class Objective:
    """The distance of a model from the dense one on the calibration sequences.

    Attributes:
        kind: ``kl`` or ``cosine``.
        target: dense model's last hidden states, ``[sequences, tokens, hidden]``, their channels in the order in which
            the model has them.
        head: the model's head; None unless ``kind`` is ``kl``.
    """

    kind: ObjectiveKind
    target: Tensor
    head: Head | None = None

    def loss(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Returns the mean loss over the tokens of some sequences, float32 ``[]``.

        Args:
            hidden: the pruned model's last hidden states, ``[len(rows), tokens, hidden]``.
            rows: numbers of the sequences, int64 ``[...]``.
        """
        dense = self.target[rows.to(self.target.device)].to(hidden.device, non_blocking=True)
        if self.head is None:
            return cosine_loss(hidden, dense)
        total: Tensor = _ChunkedKL.apply(hidden, dense, self.head)
        return total / hidden.shape[:-1].numel()

    @torch.no_grad()
    def mean(self, model: PreTrainedModel, samples: Samples, batch: int, rows: Tensor | None = None) -> float:
        """Returns the mean loss over samples, of which each rank runs its share.

        Args:
            rows: numbers of the samples to measure, int64 ``[...]``; all by default.
        """
        rows = torch.arange(len(samples)) if rows is None else rows
        parts = ranks.parts(rows, batch)
        losses = [self.loss(last_hidden_state(model, samples[part]), part) for part in parts]
        sums = [loss * part.numel() for loss, part in zip(to_numbers(losses), parts, strict=True)]
        return ranks.total(sum(sums)) / rows.numel()

    def on(self, model: PreTrainedModel) -> "Objective":
        """Returns the objective with the head of ``model``, a twin of the one that it was made with."""
        return replace(self, head=self.head and self.head.on(model))

    def reordered(self, order: Tensor | None) -> "Objective":
        """Returns the objective of a model whose last hidden state has its channels in another order.

        Args:
            order: int64 ``[hidden]``, from the present order; None if the channels stay.
        """
        return self if order is None else replace(self, target=self.target[..., order.to(self.target.device)])


def dense_objective(model: PreTrainedModel, kind: ObjectiveKind, samples: Samples, batch: int) -> Objective:
    """Returns the objective with the present, dense outputs of ``model`` as its target.

    Args:
        model: dense model; its head must not change while the objective is used.
        kind: ``kl`` or ``cosine``.

    Raises:
        ConfigError: ``kl`` of a model without a language-model head.
    """
    head = Head(model, samples) if kind == "kl" else None
    return Objective(kind, hidden_states(model, samples, batch), head)


def objective_kind(objective: str, model: PreTrainedModel) -> ObjectiveKind:
    """Returns what a step minimises on a model: the objective that it names, or for ``auto`` the default one."""
    return default_objective(model) if objective == "auto" else cast(ObjectiveKind, objective)


def default_objective(model: PreTrainedModel) -> ObjectiveKind:
    """Returns ``kl`` where the model has a language-model head, else ``cosine``."""
    return "kl" if has_head(model) else "cosine"

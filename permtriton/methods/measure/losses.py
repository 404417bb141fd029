"""The objectives: distances of a pruned model's outputs from the dense model's; lower is better.

``cosine`` is the paper's: the mean over tokens of ``1 - cos`` of the last hidden states (eq. 10); ``before_norm`` is
the same distance of the final norm's inputs, as in the published code. ``kl`` is the mean over tokens of
``KL(dense || pruned)`` of the next token's distribution, in nats, for models with a language-model head.
The dense model's logits are not stored: they are computed from its last hidden states, a chunk of tokens at a time.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, normalize
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, ConfigError, reading
from permtriton.model.checks import TOLERANCE, relative_difference
from permtriton.model.core import body_of, core_of, has_head
from permtriton.model.forward import (
    cosine_loss,
    hidden_before_norm,
    hidden_states,
    last_hidden_state,
    replaced_forwards,
    to_numbers,
    without_cache,
)
from permtriton.util import ranks
from permtriton.util.hooks import hooked
from permtriton.util.store import MEMORY, Store

ObjectiveKind = Literal["kl", "cosine"]
LossKind = Literal[ObjectiveKind, "before_norm"]
LOSS_WORDS: Mapping[str, str] = {"kl": "of the logits", "cosine": "of the last hidden state"}
LOGITS_AT_ONCE = 1 << 24  # logits of one chunk of tokens; a few float32 copies of them are alive at once
PROBE_TOKENS = 8
SPARSEST = 4  # largest stride of the positions that a loss of logits uses
CHOOSE = "choose the loss cosine (by the option of the step, such as `distill_loss=cosine`)"


def minimises(**first: str) -> str:
    """Returns the help of an option that chooses a loss; ``first``: loss -> words, for losses to name first."""
    losses: dict[str, str] = {**first, **LOSS_WORDS, **first}
    words = ", ".join(f"{name} ({of})" for name, of in losses.items())
    return f"What it minimises: {words}, or auto: kl where there is a language-model head."


class Head:
    """The computation from last hidden states to logits: the language-model head, with its scaling and soft-capping."""

    def __init__(self, model: PreTrainedModel, samples: Samples) -> None:
        if not has_head(model):
            raise ConfigError(f"objective kl needs a language-model head; {type(model).__name__} has none: {CHOOSE}")
        self._model = model
        probe = samples.start(1, PROBE_TOKENS).to(model.device, model.dtype).inputs
        self._arguments = tuple(probe)
        core, names = core_of(model), {module: name for name, module in model.named_modules()}
        with torch.no_grad(), without_cache(model):
            outputs: dict[str, Any] = {}  # name of each module of the body -> its output for the probe
            hooks = (
                module.register_forward_hook(lambda module, _, output: outputs.update({names[module]: output}))
                for module in body_of(model)
            )
            with hooked(hooks):
                expected = model(**probe).logits
            if names[core] not in outputs:  # a model may call a module inside its backbone instead, as OPT does
                outputs[names[core]] = core(**probe)
            self._outputs = outputs
            self.vocabulary = expected.shape[-1]
            fewer = max(expected.shape[1] - 1, 1)  # leaving out a token reveals a head that needs all tokens at once
            expected = expected[:, :fewer]
            problem = f"objective kl: the head of a {type(model).__name__} cannot run alone, so {CHOOSE}"
            with reading(problem, ConfigError):
                logits = self(outputs[names[core]][0][:, :fewer])
        if logits.shape != expected.shape or relative_difference(expected, logits) > TOLERANCE[model.dtype]:
            raise ConfigError(
                f"objective kl: the logits of {type(model).__name__} do not follow from its last hidden state: {CHOOSE}"
            )

    def on(self, model: PreTrainedModel) -> "Head":
        head = copy.copy(self)
        head._model = model
        return head

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the logits ``[sequences, tokens, vocabulary]`` of hidden states ``[sequences, tokens, hidden]``."""
        outputs = {self._model.get_submodule(name): output for name, output in self._outputs.items()}
        core = core_of(self._model)
        outputs[core] = copy.copy(outputs[core])
        outputs[core]["last_hidden_state"] = hidden
        # Each module, and its decoder (which OPT calls), returns its output and computes nothing.
        inner = {module.get_decoder(): output for module, output in outputs.items() if module.get_decoder() is not None}
        results = {**inner, **outputs}
        with replaced_forwards(results, lambda module: lambda *arguments, **named: results[module]):
            ids = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
            return self._model(**dict.fromkeys(self._arguments, ids)).logits


class _ChunkedKL(torch.autograd.Function):
    """The sum over tokens of ``KL(dense || pruned)``, computed with its gradient, a chunk of tokens at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, target: Tensor, head: Head) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        grads = []
        tokens = max(LOGITS_AT_ONCE // head.vocabulary, 1)
        pairs = zip(hidden.flatten(0, 1).split(tokens), target.flatten(0, 1).split(tokens), strict=True)
        for pruned, dense in pairs:
            log_dense = log_softmax(head(dense.unsqueeze(0)).float(), -1)
            leaf = pruned.unsqueeze(0).detach().requires_grad_(ctx.needs_input_grad[0])
            with torch.set_grad_enabled(ctx.needs_input_grad[0]):
                logits = head(leaf)
            got, probabilities = log_softmax(logits.detach().float(), -1), log_dense.exp()
            total += log_dense.sub_(got).mul_(probabilities).sum()
            if ctx.needs_input_grad[0]:
                gradient = got.exp_().sub_(probabilities).to(logits.dtype)
                grads += torch.autograd.grad(logits, leaf, gradient)
        if grads:
            ctx.save_for_backward(torch.cat(grads, 1).view_as(hidden))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * grad, None, None


Draw = Callable[[Callable[..., Tensor], Tensor], Tensor]  # (torch.rand or randn, like) -> numbers of the shape of like


@dataclass(frozen=True)
class Loss:
    """A loss that training can minimise. **Add one to** `LOSSES`, and its name to the types above."""

    # called with the pruned and the dense model's hidden states ``[sequences, tokens, hidden]``, as ``hidden`` returns
    # them, and with the head; returns the mean over tokens, float32 ``[]``
    mean: Callable[[Tensor, Tensor, Any], Tensor]
    # called with the dense model, samples and `Draw`; returns a random sum over tokens. The expected square of its
    # gradient is the second derivative of the loss, see `permtriton.methods.measure.fisher`.
    drawn: Callable[[PreTrainedModel, Samples, Draw], Tensor]
    of_logits: bool
    # called with a model and samples; returns the hidden states that ``mean`` takes
    hidden: Callable[[PreTrainedModel, Samples], Tensor] = last_hidden_state


def _mean_kl(hidden: Tensor, dense: Tensor, head: Head) -> Tensor:
    total: Tensor = _ChunkedKL.apply(hidden, dense, head)
    return total / hidden.shape[:-1].numel()


def _drawn_label(model: PreTrainedModel, samples: Samples, draw: Draw) -> Tensor:
    """Returns the cross-entropy of labels drawn from the model's own prediction."""
    with without_cache(model):
        logits = model(**samples.to(model.device, model.dtype).inputs).logits[:, samples.counted].float()
    noise = draw(torch.rand, logits).log_().neg_().log_()
    labels = torch.sub(logits.detach(), noise, out=noise).argmax(-1)  # the Gumbel-max draw from softmax(logits)
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _cosine_of(hidden_of: Callable[[PreTrainedModel, Samples], Tensor]) -> Loss:
    def drawn(model: PreTrainedModel, samples: Samples, draw: Draw) -> Tensor:
        """Returns the sum over tokens of the normalised hidden state's product with a normally distributed vector."""
        hidden = normalize(hidden_of(model, samples)[:, samples.counted].float(), dim=-1)
        return (hidden * draw(torch.randn, hidden)).sum()

    return Loss(lambda hidden, dense, _: cosine_loss(hidden, dense), drawn, of_logits=False, hidden=hidden_of)


LOSSES: Mapping[LossKind, Loss] = {
    "kl": Loss(_mean_kl, _drawn_label, of_logits=True),
    "cosine": _cosine_of(last_hidden_state),
    "before_norm": _cosine_of(hidden_before_norm),
}


@dataclass(frozen=True)
class Objective:
    """The distance of a model's outputs from the dense model's, on the samples that a step reads."""

    kind: LossKind
    model: PreTrainedModel
    samples: Samples
    # dense model's hidden states that the loss reads, ``[sequences, tokens, hidden]``, with the channels in the present
    # order of the model
    target: Tensor
    head: Head | None = None  # the model's head; None if the loss does not need it
    # one in ``stride`` of the samples' ``counted`` positions is used; the first one depends on the sequence's number
    stride: int = 1

    def loss(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Returns the mean loss over the tokens of the sequences ``rows``, whose hidden states are ``hidden``."""
        dense = self.target[rows.to(self.target.device)].to(hidden.device, non_blocking=True)
        return LOSSES[self.kind].mean(self._taken(hidden, rows), self._taken(dense, rows), self.head)

    def _taken(self, states: Tensor, rows: Tensor) -> Tensor:
        states = states[:, self.samples.counted]
        if self.stride == 1 or states.shape[1] < self.stride:
            return states
        index = self.stride * torch.arange(states.shape[1] // self.stride) + rows.cpu()[:, None] % self.stride
        return states[torch.arange(len(rows))[:, None], index]

    def of(self, rows: Tensor) -> Tensor:
        """Returns the mean loss over the tokens of the samples ``rows``, float32 ``[]``."""
        return self.loss(LOSSES[self.kind].hidden(self.model, self.samples[rows]), rows)

    @torch.no_grad()
    def mean(self, batch: int) -> float:
        """Returns the mean loss over all samples; each rank runs its share of them."""
        count, parts = len(self.samples), ranks.parts(torch.arange(len(self.samples)), batch)
        losses = to_numbers([self.of(part) for part in parts])
        return ranks.total(sum(loss * part.numel() for loss, part in zip(losses, parts, strict=True))) / count

    def backward(self, rows: Tensor, batch: int, scale: float) -> Iterator[tuple[Tensor, int]]:
        """Runs backward passes of ``scale`` times the mean loss over ``rows``; each rank runs its share of the rows.

        After each pass, yields that pass's part of the mean loss, float32 ``[]``, and its number of sequences.
        """
        for part in ranks.parts(rows, batch):
            loss = self.of(part) * (part.numel() / rows.numel())
            (loss * scale).backward()
            yield loss.detach(), part.numel()

    def finite(self, loss: float, name: str) -> float:
        """Returns a loss of the model; refuses one that is not finite."""
        if not math.isfinite(loss):
            raise CalibrationError(
                f"the {name} is {loss} in {self.model.dtype}: activations overflow (try `dtype=float32`), or the "
                "weights are damaged"
            )
        return loss

    def on(self, model: PreTrainedModel) -> "Objective":
        """Returns the objective of ``model``, a twin of the model that the objective was made with."""
        samples = self.samples.to(model.device, model.dtype)
        return replace(self, model=model, samples=samples, head=self.head and self.head.on(model))

    def reordered(self, order: Tensor | None, store: Store = MEMORY) -> "Objective":
        """Returns the objective of a model whose last hidden state has its channels in ``order``; None is no change."""
        if order is None:
            return self
        target, order = store.empty(self.target.shape, dtype=self.target.dtype), order.to(self.target.device)
        for reordered_state, state in zip(target, self.target, strict=True):
            reordered_state.copy_(state[..., order])
        return replace(self, target=target)


def dense_objective(
    model: PreTrainedModel, kind: LossKind, samples: Samples, batch: int, store: Store = MEMORY
) -> Objective:
    """Returns the objective with the present, dense outputs of ``model`` as its target.

    The head of the model must not change while the objective is used.
    """
    head = Head(model, samples) if LOSSES[kind].of_logits else None
    target = hidden_states(model, samples, batch, store, LOSSES[kind].hidden)
    stride = 1 if head is None else stride_of(model, head.vocabulary * target.shape[-1])
    return Objective(kind, model, samples, target, head, stride)


def stride_of(model: PreTrainedModel, head: int) -> int:
    """Returns the stride of the positions that the loss uses: 2 * ``head`` / weights of layers, from 1 to `SPARSEST`.

    Logits of a vocabulary of 250,000, computed three times per step, take longer than all layers of a small model,
    forward and backward. One position in three costs a third of that, and its gradient reaches all tokens before it.
    """
    embedded = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    output = model.get_output_embeddings()
    embedded |= {id(p) for p in output.parameters()} if output is not None else set()
    layers = sum(p.numel() for p in model.parameters() if id(p) not in embedded)
    return min(max(round(2 * head / max(layers, 1)), 1), SPARSEST)


def objective_kind(objective: str, model: PreTrainedModel) -> LossKind:
    default: LossKind = "kl" if has_head(model) else "cosine"
    return default if objective == "auto" else cast(LossKind, objective)

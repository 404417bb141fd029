"""Running a model up to its last hidden state."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, first_line
from permtriton.model.core import core_of, divides_text, takes_decoder_ids
from permtriton.model.seq2seq import arguments_of
from permtriton.util import ranks
from permtriton.util.hooks import hooked
from permtriton.util.micro_batch import MicroBatch, is_out_of_memory
from permtriton.util.store import MEMORY, Store

TOKENS_WITHOUT_LOGITS = 4096  # per forward pass without gradients, up to the last hidden state
TOKENS_WITH_LOGITS = 2048  # per forward pass with logits


def windows_at_once(tokens: int) -> int:
    """Returns how many windows of ``tokens`` tokens are evaluated at once; their logits take much memory."""
    return max(TOKENS_WITH_LOGITS // tokens, 1)


@contextmanager
def in_eval_mode(*models: nn.Module) -> Iterator[None]:
    """Puts all modules into eval mode inside the ``with`` block, and back into their earlier modes at its end."""
    before = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def without_cache(model: PreTrainedModel) -> Iterator[None]:
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    with ExitStack() as stack:
        for config in configs.values():
            stack.enter_context(mock.patch.object(config, "use_cache", False, create=True))
        yield


@contextmanager
def replaced_forwards(
    modules: Iterable[nn.Module], replacement: Callable[[nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Inside the ``with`` block, each module's ``forward`` is what ``replacement`` returns for the module."""
    modules = list(modules)
    before = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = replacement(module)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def last_hidden_state(model: PreTrainedModel, samples: Samples) -> Tensor:
    """Returns the last hidden state ``[samples, tokens, hidden]``: after the final norm, before any head."""
    core = core_of(model)
    arguments = samples.to(model.device, model.dtype).inputs
    with without_cache(model):
        if core is model.base_model:
            return core(**arguments)[0]
        try:
            with core.register_forward_hook(_end):
                model(**arguments)
        except _Reached as reached:
            hidden: Tensor = reached.args[0]
            return hidden
    raise AssertionError(f"{type(model).__name__} does not run its decoder")


def hidden_before_norm(model: PreTrainedModel, samples: Samples) -> Tensor:
    """Returns the input of the final norm; the last hidden state if no child of the core is that norm."""
    core, runs = core_of(model), []

    def record(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(output, Tensor) and inputs[0].shape == output.shape:
            runs.append((inputs[0], output.data_ptr()))

    with hooked(module.register_forward_hook(record) for module in core.children()):
        hidden = last_hidden_state(model, samples)
    return next((before for before, after in runs if after == hidden.data_ptr()), hidden)


class _Reached(Exception):
    """Ends a forward pass at the last hidden state, its argument, so that no logits are computed."""


def _end(_module: nn.Module, _inputs: object, output: Any) -> None:
    raise _Reached(output[0])


@torch.no_grad()
def with_tokens(model: PreTrainedModel, samples: Samples) -> Samples:
    """Returns samples with known ``tokens`` and ``longest``; to find them, runs the model on the first sample."""
    if samples.tokens:
        return samples
    try:
        first = Samples(arguments_of(model, samples[:1].inputs))
        lengths = [0]
        encoder = model.get_encoder() if takes_decoder_ids(model) else nn.Identity()
        with encoder.register_forward_hook(lambda _module, _inputs, output: lengths.append(output[0].shape[1])):
            tokens = last_hidden_state(model, first).shape[1]
        return replace(samples, tokens=tokens, longest=max(tokens, *lengths))
    except Exception as error:  # the model's code may raise any exception
        if is_out_of_memory(error):
            raise
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in samples.inputs.items())
        raise CalibrationError(
            f"{type(model).__name__} does not run on samples of {shapes}: {first_line(error)}"
        ) from error


@torch.no_grad()
def hidden_states(
    model: PreTrainedModel,
    samples: Samples,
    batch: int,
    store: Store = MEMORY,
    hidden_of: Callable[[PreTrainedModel, Samples], Tensor] = last_hidden_state,
) -> Tensor:
    """Returns what ``hidden_of`` returns for every sample, ``[samples, tokens, hidden]``, in ``store``."""
    rows_here = ranks.own_rows(len(samples))

    def run(size: int) -> Tensor:
        states = torch.empty(0)
        for rows in ranks.parts(torch.arange(len(samples)), size):
            hidden = hidden_of(model, samples[rows])
            if not states.numel():
                states = store.empty((rows_here.numel(), *hidden.shape[1:]), dtype=hidden.dtype)
            states[rows - rows_here[0]] = hidden.cpu()
        return states

    return ranks.join(MicroBatch(batch).run(run), len(samples))


def max_tokens(model: PreTrainedModel) -> int | None:
    """Returns the number of tokens in the longest sequence that the model can take; None if there is no limit.

    In an encoder-decoder that divides a text, this is twice the positions, as encoder and decoder read half of it each.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not limit or limit < 0:
        return None
    if divides_text(model):
        return 2 * limit
    for module in model.modules():  # in RoBERTa the first token has position padding_idx + 1
        if isinstance(module, nn.Embedding) and module.num_embeddings == limit and module.padding_idx is not None:
            return limit - module.padding_idx - 1
    return limit


def check_length(model: PreTrainedModel, tokens: int, *, of_a_half: bool = False) -> None:
    limit = max_tokens(model)
    if limit is not None and of_a_half:
        limit //= 2
    if limit is not None and limit < tokens:
        raise CalibrationError(
            f"sequence_length is {tokens}, but the model has {limit} positions: use `sequence_length={limit}` or less"
        )


def cosine_loss(hidden: Tensor, target: Tensor) -> Tensor:
    """Returns the mean over tokens of ``1 - cos(hidden, target)`` (eq. 10), float32 ``[]``.

    Args:
        hidden: ``[sequences, tokens, hidden]``.
        target: dense model's hidden states, of the same shape; moved to the device of ``hidden``.
    """
    return 1 - torch.cosine_similarity(hidden.float(), target.to(hidden.device).float(), dim=-1).mean()


@torch.no_grad()
def mean_cosine_loss(
    model: PreTrainedModel, samples: Samples, target: Tensor, batch: int, order: Tensor | None = None
) -> float:
    """Returns the mean of `cosine_loss` over samples.

    Args:
        target: dense model's last hidden states, ``[samples, tokens, hidden]``.
        order: int64 ``[hidden]``, from the target's channel order to the model's; None where they are equal.
    """
    losses, parts = [], ranks.parts(torch.arange(len(samples)), batch)
    for rows in parts:
        dense = target[rows] if order is None else target[rows][..., order]
        hidden = last_hidden_state(model, samples[rows])
        losses.append(cosine_loss(hidden[:, samples.counted], dense[:, samples.counted]))
    sums = [loss * rows.numel() for loss, rows in zip(to_numbers(losses), parts, strict=True)]
    return ranks.total(sum(sums)) / len(samples)


def to_numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Returns the values of tensors ``[]``, with one wait for their device in place of one per tensor."""
    return torch.stack(list(scalars)).tolist() if scalars else []

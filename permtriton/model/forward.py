"""Running a model up to its last hidden state."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.errors import CalibrationError
from permtriton.micro_batch import MicroBatch

TOKENS_WITHOUT_LOGITS = 4096  # at once, in forward passes without gradients up to the last hidden state


@contextmanager
def without_cache(model: PreTrainedModel) -> Iterator[None]:
    """Turns the key/value cache off inside the ``with`` block."""
    before = getattr(model.config, "use_cache", None)
    model.config.use_cache = False
    try:
        yield
    finally:
        if before is None:
            del model.config.use_cache
        else:
            model.config.use_cache = before


@contextmanager
def replaced_forwards(
    modules: Iterable[nn.Module], replacement: Callable[[nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Inside the ``with`` block, each module runs what ``replacement`` makes of it in place of its ``forward``."""
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


def last_hidden_state(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Returns the last hidden state ``[sequences, tokens, hidden]``: after the final norm, before any head.

    Args:
        model: model to run.
        ids: int64 ``[sequences, tokens]``.
    """
    with without_cache(model):
        return model.base_model(input_ids=ids.to(model.device))[0]


@torch.no_grad()
def hidden_states(model: PreTrainedModel, ids: Tensor, batch: int) -> Tensor:
    """Returns the last hidden state of every sequence, ``[sequences, tokens, hidden]`` on the CPU.

    Args:
        model: model to run.
        ids: int64 ``[sequences, tokens]``.
        batch: sequences per forward pass.
    """

    def run(size: int) -> Tensor:
        states = torch.empty(0)
        for start in range(0, ids.shape[0], size):
            hidden = last_hidden_state(model, ids[start : start + size])
            if not start:
                states = torch.empty((ids.shape[0], *hidden.shape[1:]), dtype=hidden.dtype)
            states[start : start + size] = hidden
        return states

    return MicroBatch(batch).run(run)


def max_tokens(model: PreTrainedModel) -> int | None:
    """Returns the number of tokens in the longest sequence that the model can take; None if there is no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not limit or limit < 0:
        return None
    for module in model.modules():  # in RoBERTa the first token has position padding_idx + 1
        if isinstance(module, nn.Embedding) and module.num_embeddings == limit and module.padding_idx is not None:
            return limit - module.padding_idx - 1
    return limit


def check_length(model: PreTrainedModel, tokens: int) -> None:
    """Refuses sequences that are longer than the model can take.

    Raises:
        CalibrationError: ``tokens`` is above the limit, which the message names.
    """
    limit = max_tokens(model)
    if limit is not None and limit < tokens:
        raise CalibrationError(
            f"sequence_length is {tokens}, but the model has {limit} positions: use --sequence-length {limit} or less"
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
    model: PreTrainedModel, ids: Tensor, target: Tensor, batch: int, order: Tensor | None = None
) -> float:
    """Returns the mean of `cosine_loss` over sequences.

    Args:
        model: model whose last hidden states are compared.
        ids: int64 ``[sequences, tokens]``.
        target: dense model's last hidden states, ``[sequences, tokens, hidden]``.
        batch: sequences per forward pass.
        order: int64 ``[hidden]``, from the target's channel order to the model's; None where they are equal.
    """
    losses = []
    for rows, dense in zip(ids.split(batch), target.split(batch), strict=True):
        losses.append(cosine_loss(last_hidden_state(model, rows), dense if order is None else dense[..., order]))
    sizes = [rows.shape[0] for rows in ids.split(batch)]
    return sum(loss * size for loss, size in zip(torch.stack(losses).tolist(), sizes, strict=True)) / ids.shape[0]

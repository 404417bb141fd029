"""Running a model up to its last hidden state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel


@contextmanager
def without_cache(model: PreTrainedModel) -> Iterator[None]:
    """Switches the key/value cache off for a while."""
    before = getattr(model.config, "use_cache", None)
    model.config.use_cache = False
    try:
        yield
    finally:
        if before is None:
            del model.config.use_cache
        else:
            model.config.use_cache = before


def last_hidden_state(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Returns the backbone's last hidden state ``[sequences, tokens, hidden]``, after the final norm, no head."""
    with without_cache(model):
        return model.base_model(input_ids=ids.to(model.device))[0]


@torch.no_grad()
def hidden_states(model: PreTrainedModel, ids: Tensor, batch: int) -> list[Tensor]:
    """Returns the last hidden state of every batch of ``ids``, on the CPU in the model's dtype."""
    return [last_hidden_state(model, rows).cpu() for rows in ids.split(batch)]


def cosine_loss(hidden: Tensor, target: Tensor) -> Tensor:
    """Returns the mean over tokens of ``1 - cos`` (eq. 10)."""
    return 1 - torch.cosine_similarity(hidden.float(), target.to(hidden.device).float(), dim=-1).mean()

"""Running a model up to its last hidden state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
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
def hidden_states(model: PreTrainedModel, ids: Tensor, batch: int) -> Tensor:
    """Returns the last hidden states ``[sequences, tokens, hidden]`` on the CPU, ``batch`` sequences at once."""
    found = torch.empty(0)
    for start in range(0, ids.shape[0], batch):
        hidden = last_hidden_state(model, ids[start : start + batch])
        if not start:
            found = torch.empty((ids.shape[0], *hidden.shape[1:]), dtype=hidden.dtype)
        found[start : start + batch] = hidden
    return found


def max_tokens(model: PreTrainedModel) -> int | None:
    """Returns the longest sequence that the model's positions allow, or None where there is no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not limit or limit < 0:
        return None
    for module in model.modules():  # RoBERTa counts its positions from behind the padding's
        if isinstance(module, nn.Embedding) and module.num_embeddings == limit and module.padding_idx is not None:
            return limit - module.padding_idx - 1
    return limit


def cosine_loss(hidden: Tensor, target: Tensor) -> Tensor:
    """Returns the mean over tokens of ``1 - cos`` (eq. 10)."""
    return 1 - torch.cosine_similarity(hidden.float(), target.to(hidden.device).float(), dim=-1).mean()

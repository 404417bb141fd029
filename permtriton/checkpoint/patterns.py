"""Is a model N:M that says so of itself? What is the pattern of one that says nothing?"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton.checkpoint.names import loaded_names
from permtriton.errors import listed
from permtriton.util.sparsity import NMPattern

KNOWN = (NMPattern(2, 4), NMPattern(4, 8))  # that other tools prune to


@torch.no_grad()
def broken_claim(model: PreTrainedModel, record: Mapping[str, Any]) -> str:
    """Returns in a sentence which weights are not N:M although ``permtriton.json`` says so; empty if all are.

    Args:
        record: content of the file that lies beside the model's weights.
    """
    own, sparsity = record.get("patterns", {}), str(record["config"]["sparsity"])
    parameters = dict(model.named_parameters())
    names = loaded_names(model, record["pruned_weights"], parameters)
    broken = []
    for stored, dim in record["pruned_weights"].items():
        weight = parameters.get(names[stored])  # None where it is packed, which is N:M by its form
        pattern = NMPattern.parse(own.get(stored, sparsity))
        if weight is not None and dim < weight.ndim and not _has(weight.movedim(dim, -1), pattern):
            broken.append(stored)
    if not broken:
        return ""
    return (
        f"{len(broken)} of {len(names)} weights that permtriton.json lists as {sparsity} are not ({listed(broken)}): "
        "they were changed after they were pruned. Quantizers that choose their rounding, such as GPTQ of "
        "llm-compressor, fill zeros"
    )


@torch.no_grad()
def pattern_in_words(model: nn.Module) -> str:
    """Returns how many linears, apart from an output head, are N:M: ``2:4 in 14 of 15 linears``, or ``dense``."""
    weights = list(_weights(model))
    for pattern in KNOWN:
        if count := sum(_has(weight, pattern) for weight in weights):
            return f"{pattern} in {count} of {len(weights)} linears"
    return "dense"


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """Yields the weights ``[..., in]`` of linears and of stacked experts."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head and isinstance(module.weight, nn.Parameter):
            yield module.weight.t() if isinstance(module, Conv1D) else module.weight


def _has(weight: Tensor, pattern: NMPattern) -> bool:
    """Whether a weight ``[..., in]`` keeps at most N of every M, and some."""
    if not weight.numel() or weight.shape[-1] % pattern.group:
        return False
    kept = (weight.float() != 0).unflatten(-1, (-1, pattern.group)).sum(-1)
    return 0 < int(kept.max()) <= pattern.kept

"""Checks that a model is N:M as it claims, and finds the pattern of a model that claims none."""

from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.checkpoint.names import loaded_names
from permtriton.checkpoint.read_record import Record, recorded_weights
from permtriton.errors import listed
from permtriton.model.expert_linears import stacks
from permtriton.model.modules import LINEAR_MODULES
from permtriton.util.sparsity import MAX_GROUP, NMPattern

REGULAR = 0.9  # more than this share of a weight's groups must hold N nonzero values; the others may hold fewer


def broken_claim(model: PreTrainedModel, record: Record) -> str:
    """Returns in a sentence which weights are not N:M although ``permtriton.json`` says so; empty if all are."""
    parameters, pruned = dict(model.named_parameters()), recorded_weights(record)
    names = loaded_names(model, pruned, parameters)
    broken = []
    for stored, name in names.items():
        weight, dim, pattern = parameters.get(name), pruned[stored].dim, pruned[stored].pattern
        if weight is None or dim >= weight.ndim:  # packed, and so N:M by its form
            continue
        whole = weight.numel() and weight.shape[dim] % pattern.group == 0
        if not (whole and 0 < int(kept_in_groups(weight, dim, pattern.group).max()) <= pattern.kept):
            broken.append(stored)
    if not broken:
        return ""
    return (
        f"{len(broken)} of {len(names)} weights that permtriton.json lists as {record['config']['sparsity']} are not "
        f"({listed(broken)}): they were changed after they were pruned. Quantizers that choose their rounding, such as "
        "GPTQ of llm-compressor, fill zeros"
    )


def linear_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the weight of each linear and of each stack of experts; shared ones once."""
    for name, parameter in model.named_parameters():
        path, _, key = name.rpartition(".")
        owner = model.get_submodule(path)
        if (key == "weight" and isinstance(owner, LINEAR_MODULES)) or key in stacks(owner):
            yield name, parameter


def pattern_of(weight: Tensor, dim: int) -> NMPattern | None:
    """Returns the N:M pattern, with the smallest M, that almost all groups of a weight have; None if there is none."""
    if not float((weight == 0).float().mean()) >= 1 / MAX_GROUP:  # NaN for a weight without elements
        return None
    for group in range(2, MAX_GROUP + 1):
        if weight.shape[dim] % group == 0:
            counts = kept_in_groups(weight, dim, group)
            most = int(counts.max())
            if 0 < most < group and float((counts == most).float().mean()) > REGULAR:
                return NMPattern(most, group)
    return None


def kept_in_groups(weight: Tensor, dim: int, group: int) -> Tensor:
    """Returns the number of nonzero weights in each group along ``dim``, int64 ``[..., groups]``."""
    return (weight != 0).movedim(dim, -1).unflatten(-1, (-1, group)).sum(-1)

"""The N:M weights of a loaded model: those of ``permtriton.json`` or, without it, those whose zeros have a pattern."""

from collections.abc import Iterator

from torch import Tensor, nn

from permtriton.checkpoint.names import loaded_names, resolve_name
from permtriton.checkpoint.read_record import Record, check_recorded, recorded_weights
from permtriton.errors import listed
from permtriton.model.experts import input_dim, stacks
from permtriton.model.modules import LINEAR_MODULES
from permtriton.util.sparsity import MAX_GROUP, NMPattern, PrunedWeight

REGULAR = 0.9  # more than this share of a weight's groups must hold N nonzero values; the others may hold fewer
BASE_LAYER = ".base_layer"  # where PEFT puts the linear that it wraps


def recorded_in(model: nn.Module, record: Record) -> Iterator[tuple[str, str | None, PrunedWeight]]:
    """Yields each weight that a record lists: its name in the record, its name in the model, and its pattern.

    The name in the model is None if the model does not have the weight as a parameter: it is packed, or belongs to the
    head of another class. Where PEFT wraps a linear, the name is that of the linear inside.
    """
    pruned = recorded_weights(record)
    known = {name.replace(BASE_LAYER, ""): name for name, _ in model.named_parameters()}
    for stored, name in loaded_names(model, pruned, known).items():
        plain = resolve_name(name, known, getattr(model, "base_model_prefix", ""))
        if plain:
            check_recorded(stored, pruned[stored], model.get_parameter(known[plain]).shape)
        yield stored, plain and known[plain], pruned[stored]


def regular_weights(model: nn.Module) -> Iterator[tuple[str, PrunedWeight]]:
    """Yields each weight of a linear and each stack of experts whose zeros have a pattern; shared ones once."""
    for name, parameter in model.named_parameters():
        path, _, key = name.rpartition(".")
        owner = model.get_submodule(path)
        if (key == "weight" and isinstance(owner, LINEAR_MODULES)) or key in stacks(owner):
            dim = input_dim(model, name)
            if pattern := _pattern_of(parameter.detach(), dim):
                yield name, PrunedWeight(dim, pattern)


def fullest_group(weight: Tensor, pruned: PrunedWeight) -> int:
    """Returns the largest number of nonzero weights in a group."""
    return int(_kept_in_groups(weight, pruned.dim, pruned.pattern.group).max())


def broken_claim(model: nn.Module, record: Record) -> str:
    """Returns in a sentence which weights are not N:M although ``permtriton.json`` says so; empty if all are."""
    weights = list(recorded_in(model, record))
    broken = [
        stored
        for stored, name, pruned in weights
        if name and fullest_group(model.get_parameter(name), pruned) > pruned.pattern.kept
    ]
    if not broken:
        return ""
    return (
        f"{len(broken)} of {len(weights)} weights that permtriton.json lists as {record['config']['sparsity']} are not "
        f"({listed(broken)}): they were changed after they were pruned. Quantizers that choose their rounding, such as "
        "GPTQ of llm-compressor, fill zeros"
    )


def _pattern_of(weight: Tensor, dim: int) -> NMPattern | None:
    """Returns the N:M pattern, with the smallest M, that almost all groups of a weight have; None if there is none."""
    if not float((weight == 0).float().mean()) >= 1 / MAX_GROUP:  # NaN for a weight without elements
        return None
    for group in range(2, MAX_GROUP + 1):
        if weight.shape[dim] % group == 0:
            counts = _kept_in_groups(weight, dim, group)
            most = int(counts.max())
            if 0 < most < group and float((counts == most).float().mean()) > REGULAR:
                return NMPattern(most, group)
    return None


def _kept_in_groups(weight: Tensor, dim: int, group: int) -> Tensor:
    """Returns the number of nonzero weights in each group along ``dim``, int64 ``[..., groups]``."""
    return (weight != 0).movedim(dim, -1).unflatten(-1, (-1, group)).sum(-1)

"""Builds models without weights; refuses configs whose sizes are impossible, or are not those of the weights."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from permtriton.errors import ModelError, reading, shown
from permtriton.model.headers import StoredTensor

# Names of config entries that count parts, for which config classes make lists; the last alternative is for GGUF.
COUNTS = re.compile(r"(\w+_)?(layers?|depths?|experts?|labels)|.+\.(block|expert)_count")
MOST_PARTS = 100_000
MOST_ELEMENTS = 2**43  # of a model whose weights are not on this machine
ELEMENTS_PER_STORED, MORE_ELEMENTS = 16, 2**24  # a packed weight stores fewer elements than the model has


def check_counts(value: Any, where: str, key: str = "") -> None:
    """Refuses a config with more layers, experts or labels than any model has, before its class makes lists of them."""
    if isinstance(value, dict):
        for name, inner in value.items():
            check_counts(inner, where, str(name))
    elif isinstance(value, list):
        for inner in value:
            check_counts(inner, where, key)
    elif isinstance(value, int) and value > MOST_PARTS and COUNTS.fullmatch(key):
        raise ModelError(f"{where}: {key} is {shown(value)}: expected at most {MOST_PARTS}; the file is damaged")


def build_empty(model_class: Any, config: Any, stored: Mapping[str, StoredTensor] | None, name: str) -> Any:
    """Builds a model on the meta device, in eval mode, and refuses one that is far larger than its checkpoint.

    Args:
        stored: tensors of the checkpoint, by name; None if the weights are not on this machine.
    """
    with reading(f"{name}: {model_class.__name__} cannot be built from config.json", ModelError), torch.device("meta"):
        model = model_class._from_config(deepcopy(config)).eval()  # _from_config changes the config
        total = sum(parameter.numel() for parameter in model.parameters())
    most = MOST_ELEMENTS
    if stored is not None:
        most = ELEMENTS_PER_STORED * sum(math.prod(tensor.shape) for tensor in stored.values()) + MORE_ELEMENTS
    if total > most:
        there = "models have" if stored is None else "its checkpoint can fill"
        raise ModelError(
            f"{name}: config.json describes a model of {total:,} parameters, more than {there} (at most {most:,}): a "
            "size in it is damaged, or it belongs to other weights"
        )
    return model


def refuse_shapes(name: str, model_class: type, differing: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Refuses a checkpoint with tensors of other shapes than its model needs.

    Args:
        name: the checkpoint.
        differing: name, stored shape and needed shape of each such tensor.
    """
    if not (listed := sorted(differing)):
        return
    tensor, stored, needed = listed[0]
    raise ModelError(
        f"{name}: {tensor} has the shape {list(stored)}, but {model_class.__name__} with this config.json needs "
        f"{list(needed)}{f', and {len(listed) - 1} more differ' if listed[1:] else ''}: a size in config.json is "
        "damaged, or it belongs to other weights"
    )

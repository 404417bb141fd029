"""Does a config ask for a model that can exist, and that the weights beside it can fill? Checked before it is built."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from permtriton.errors import ModelError, reading, shown
from permtriton.model.headers import StoredTensor

# Entries that say how many parts of a kind there are, for which the config classes make lists; the others are GGUF's.
COUNTS = re.compile(r"(\w+_)?(layers?|depths?|experts?|labels)|.+\.(block|expert)_count")
MOST_PARTS = 100_000
LARGEST_DIMENSION = 2**24  # BLT has an embedding of 3,000,012 rows
MOST_ELEMENTS = 2**43  # without weights to compare with
MODULES_PER_TENSOR, MORE_MODULES = 50, 10_000
ELEMENTS_PER_STORED, MORE_ELEMENTS = 16, 2**24  # packed weights have fewer elements than they stand for


def check_counts(value: Any, where: str, key: str = "") -> None:
    """Refuses a config that counts more layers, experts or labels than any model has, before its class is made of it.

    Args:
        value: content of config.json, or of an entry of it.
        where: path of the file, for errors.
        key: name of the entry.

    Raises:
        ModelError: naming the entry.
    """
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
        stored: tensors of the checkpoint, by name; None where the weights are not there.
        name: name of the model, for errors.

    Raises:
        ModelError: the class cannot be built from this config, or a size is 0 or too large.
    """
    limit = MOST_PARTS if stored is None else MODULES_PER_TENSOR * len(stored) + MORE_MODULES
    with (
        reading(f"{name}: {model_class.__name__} cannot be built from config.json", ModelError),
        _at_most(limit, name),
        torch.device("meta"),
    ):
        model = model_class._from_config(config).eval()
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
    for each, parameter in model.named_parameters():
        if any(not 0 < size <= LARGEST_DIMENSION for size in parameter.shape):
            raise ModelError(
                f"{name}: config.json gives {each} the shape {list(parameter.shape)}, but sizes are at least 1 and at "
                f"most {LARGEST_DIMENSION}: a number in it is damaged"
            )
    return model


@contextmanager
def _at_most(limit: int, name: str) -> Iterator[None]:
    """Inside the ``with`` block, refuses to add more than ``limit`` modules to others, however they are made."""
    count = 0

    def added(_parent: nn.Module, _name: str, _module: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > limit:
            raise ModelError(
                f"{name}: config.json describes a model of more than {limit:,} modules, which its checkpoint cannot "
                "fill: a number in it is damaged, or it belongs to other weights"
            )

    with register_module_module_registration_hook(added):
        yield

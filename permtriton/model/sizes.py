"""Does a config ask for a model that can exist, and that the weights beside it can fill? Checked before it is built."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from permtriton.errors import ModelError, reading, shown
from permtriton.model.headers import StoredTensor

# Entries that say how many parts of a kind there are, for which the config classes and models make lists.
LAYERS = re.compile(r"(\w+_)?(?<!per_)(layers?|depths?)")
PARTS = re.compile(r"(\w+_)?(experts?|labels)")
# Entries that are numbers of at least 0: sizes, counts, and what norms and rotary angles are computed with.
SIZES = re.compile(
    r"(num|n)_\w*(layers?|heads?|experts?)(_per_tok)?|(en|de)coder_(layers|attention_heads|ffn_dim)|n_embd|d_(model|ff|kv)"
    r"|(\w+_)?((hidden|intermediate|vocab)_size|head_dim|eps|epsilon|theta|factor)"
)
NO_COUNTS = ("quantization_config", "label2id", "id2label", "task_specific_params")  # whose keys are other names
MORE_LAYERS = 128  # margin beside the layers that tensors name; Qwen2-VL claims 80 that only bound a window
MOST_LAYERS, MOST_PARTS = 1000, 100_000  # without weights to compare with; the deepest models have 100 to 200 layers
MOST_ELEMENTS, LARGEST_DIMENSION = 2**43, 2**24  # the same; BLT has an embedding of 3,000,012 rows
MODULES_PER_TENSOR, MORE_MODULES = 50, 10_000
ELEMENTS_PER_STORED, MORE_ELEMENTS = 16, 2**24  # packed weights have fewer elements than they stand for


def check_numbers(config: Mapping[str, Any], names: Collection[str] | None, where: str = "config.json") -> None:
    """Refuses a config with numbers that no model has, or far more layers than the checkpoint names.

    The config classes make lists of as many layers and parts, and what NaN leads to shows only in a model's outputs, so
    this comes before they are built.

    Args:
        config: content of config.json.
        names: names of the checkpoint's tensors, in which layers are integers between dots; None where the weights are
            not there.
        where: path of config.json, for errors.

    Raises:
        ModelError: a number is NaN, or a size is negative, too large or no number; the message names the entry.
    """
    for key, value in _entries(config):
        nan = isinstance(value, float) and math.isnan(value)
        if nan or (SIZES.fullmatch(key) and (isinstance(value, str) or not 0 <= value < math.inf)):
            raise ModelError(f"{where}: {key} is {shown(value)}: expected a finite number of at least 0")
    numbers = [int(number) for name in names or () for number in re.findall(r"\.(\d{1,9})\.", name)]
    largest = max(numbers, default=0)
    for key, value in _entries(config):
        if not isinstance(value, int):
            continue
        layers = LAYERS.fullmatch(key) is not None
        if layers and names is not None and value > 4 * largest + MORE_LAYERS:
            raise ModelError(
                f"{where}: {key} is {shown(value)}, but the checkpoint names no layer beyond {largest}: one of the "
                "files is damaged"
            )
        limit = MOST_LAYERS if layers and names is None else MOST_PARTS
        if (layers or PARTS.fullmatch(key)) and value > limit:
            raise ModelError(f"{where}: {key} is {shown(value)}: expected at most {limit}; the file is damaged")


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
        total = _check_parameters(model, LARGEST_DIMENSION if stored is None else math.inf, name)
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


def _entries(value: Any, key: str = "") -> Iterator[tuple[str, int | float | str]]:
    """Yields every number and text in a JSON value with the name of the entry that it stands in."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in NO_COUNTS:
                yield from _entries(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _entries(inner, key)
    elif type(value) in (int, float, str):
        yield key, value


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


def _check_parameters(model: nn.Module, largest: float, name: str) -> int:
    """Returns how many elements the parameters have, after checking that no dimension is 0 or above ``largest``."""
    total = 0
    for parameter_name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if 0 in shape or max(shape, default=1) > largest:
            expected = "at least 1" if 0 in shape else f"at most {largest}"
            raise ModelError(
                f"{name}: config.json gives {parameter_name} the shape {shape}, but sizes are {expected}: a number "
                "in it is damaged"
            )
        total += parameter.numel()
    return total

"""The names under which a checkpoint stores a model's tensors, some of which transformers renames.

A model that was published with other names than its class in transformers uses (LLaVA, Qwen2-VL) is saved under the
published names, so that other programs read it, too. Where transformers does more than rename, such as dividing a
tensor of query, key and value (NomicBERT) or stacked experts, the published form would not hold the pruned weights
unchanged. Such a model is saved under the names of its modules, which transformers loads as well.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from permtriton.checkpoint.quantization_config import WHERE
from permtriton.errors import ModelError, listed
from permtriton.util.sparsity import PrunedWeight

PACKED_PARTS = ("_values", "_positions", "_scale")


@dataclass(frozen=True)
class StoredNames:
    """The names under which a model is saved."""

    original: bool  # whether they are the published ones, by transformers' ``save_original_format``
    pruned: dict[str, PrunedWeight]  # pruned weights, by their names in the checkpoint

    def tensors(self, model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of a state dict by the names that ``save_pretrained`` writes."""
        return _published_state(model, state) if self.original else dict(state)


def stored_names(model: Any, pruned: Mapping[str, PrunedWeight], *, original: bool = True) -> StoredNames:
    """Returns the names under which a model is saved; its weights may be on the meta device.

    Args:
        pruned: pruned weights, by the names of the parameters.
        original: whether the names of the published checkpoint may be used.
    """
    if original and (stored := _published(model, pruned)) and _load_again(model, stored):
        return StoredNames(True, {stored[name]: weight for name, weight in pruned.items()})
    loaded = loaded_names(model, pruned, known=pruned)
    if changed := [name for name in pruned if loaded[name] != name]:
        raise ModelError(
            f"transformers reads {listed(changed)} as {listed(loaded[name] for name in changed)}, so that a "
            f"{type(model).__name__} cannot be saved such that it loads again with its pruned weights: it is not "
            "supported"
        )
    return StoredNames(False, dict(pruned))


def loaded_names(model: Any, stored: Iterable[str], known: Iterable[str] = ()) -> dict[str, str]:
    """Returns stored name -> the name by which transformers loads it, but a base model's prefix may differ.

    A tensor that transformers converts, and does not only rename, keeps its name here.

    Args:
        model: model that is loaded, with or without weights.
        stored: names of tensors or modules in the checkpoint.
        known: names that the model has besides those in its state dict.
    """
    # Imported late, because transformers may import this module while it imports its own.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    in_model = {*model.state_dict(), *known}
    in_model |= {name + part for name in in_model for part in PACKED_PARTS}
    loaded = {}
    for name in stored:
        renamed, converter = rename_source_key(name, renamings, converters)
        loaded[name] = name if converter is not None or (name in in_model and renamed not in in_model) else renamed
    return loaded


def resolve_name(name: str, known: Any, prefix: str) -> str | None:
    """Returns the one of a model's ``known`` names that a checkpoint's tensor or module has; None if it has none.

    The names differ by ``prefix``, a base model's, if only the saved or only the loaded model has a head.
    """
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate in known), None)


def find_name(name: str, known: set[str], model: Any) -> str | None:
    """Returns what `resolve_name` returns; refuses an unknown name unless it may be of another class's head."""
    resolved = resolve_name(name, known, model.base_model_prefix)
    same_class = type(model).__name__ in (model.config.architectures or ())
    if resolved is None and (same_class or name.startswith(f"{model.base_model_prefix}.")):
        raise ModelError(
            f"{WHERE} lists {name}, which the {type(model).__name__} of config.json does not have: the file is damaged"
        )
    return resolved


def _published(model: Any, pruned: Collection[str]) -> dict[str, str]:
    """Returns pruned parameter -> its published name; empty unless the published form holds all of them unchanged."""
    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    try:
        reverted = _published_state(model, state)
    except Exception:  # an operation of transformers that this model's shapes do not fit
        return {}
    names = {id(tensor): name for name, tensor in reverted.items()}
    stored = {name: names[id(state[name])] for name in pruned if name in state and id(state[name]) in names}
    return stored if len(stored) == len(pruned) else {}


def _published_state(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, dict(state))
    return reverted


def _load_again(model: Any, stored: Mapping[str, str]) -> bool:
    """Whether pruned parameters, plain and packed, are loaded from their stored names."""
    parts = ("", *PACKED_PARTS)
    loaded = loaded_names(model, [name + part for name in stored.values() for part in parts])
    return all(loaded[stored[name] + part] == name + part for name in stored for part in parts)

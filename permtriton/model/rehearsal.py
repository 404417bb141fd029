"""Rehearses saving: all but the weights is saved at the start, into a temporary folder, to find what fails."""

from copy import deepcopy
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from permtriton.errors import ModelError, reading


def rehearse_saving(name: str, model: PreTrainedModel, tokenizer: Any) -> None:
    """Refuses a model that could not be saved at the end: saves all but its weights, and resolves which are tied.

    transformers checks some values of configs, and whether a class declares its tied weights, only when it saves.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    with reading(f"{name} could not be saved again", ModelError), TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        model.save_pretrained(folder, state_dict={}, is_main_process=False)
        remove_tied_weights_from_state_dict(model.state_dict(), model)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def check_made_by_config(model: PreTrainedModel) -> None:
    """Refuses a model whose parameters differ from those that its class makes: saved, it would load as another model.

    Added modules are accepted, and saved though no class reads them; so are untied weights, which are loaded as such.
    """
    try:
        with torch.device("meta"):
            made = type(model)._from_config(deepcopy(model.config))  # _from_config changes it
    except Exception:  # a class may read values, which meta tensors lack; the saved folder is loaded at the end
        return
    expected: dict[str, list[int] | None] = {name: list(weight.shape) for name, weight in made.named_parameters()}
    for prefix, module in made.named_modules():
        expected |= {f"{prefix}.{name}": None for name, weight in module._parameters.items() if weight is None}
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            raise ModelError(
                f"this {type(model).__name__} differs from what its class makes of its config, so that it could not be "
                f"loaded again: {name} is {shapes.get(name, 'missing or tied')}, expected {shape or 'none'}: "
                "change the config, give a model of the class that is made so, or undo what changed this one (merge "
                "adapters, remove parametrizations, compile no module inside)"
            )

"""Can a model be saved at the end? All but its weights are saved at the start, into a temporary folder."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedModel

from permtriton.errors import ModelError, OutputError, reading
from permtriton.util.output_files import disk_error


def rehearse_saving(name: str, model: PreTrainedModel, tokenizer: Any) -> None:
    """Refuses now what could not be saved at the end: saves all but the weights, and asks which of these are shared.

    Transformers checks some values of configs, and whether a class declares the weights that it shares, only there.

    Args:
        name: what the model is called in the error.
        tokenizer: tokenizer or processor; None for none.

    Raises:
        ModelError: a config, the tokenizer or the weights could not be saved.
        OutputError: the folder for temporary files cannot be written.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    parts: dict[str, Callable[[str], object]] = {
        "its config.json cannot be saved again": model.config.save_pretrained,
        "with this config.json, it cannot be saved again": lambda folder: model.save_pretrained(
            folder, state_dict={}, is_main_process=False
        ),
        "weights that share their values, which its class does not declare, cannot be saved (give each a copy)": (
            lambda folder: remove_tied_weights_from_state_dict(model.state_dict(), model)
        ),
    }
    if model.can_generate():
        parts["its generation_config.json cannot be saved again"] = model.generation_config.save_pretrained
    if tokenizer is not None:
        parts["its tokenizer cannot be saved again"] = tokenizer.save_pretrained
    with _temporary_folder() as folder:
        for problem, save in parts.items():
            with reading(f"{name}: {problem}", ModelError), _temporary_files():
                save(folder)


def check_made_by_config(model: PreTrainedModel) -> None:
    """Refuses a model in memory whose class makes other parameters of its config: saved, it would load as another one.

    A module that was added is saved though no class reads it; weights that were untied are loaded as they are.

    Raises:
        ModelError: a parameter is missing, tied, replaced, of another shape, or a bias
            that the class leaves out.
    """
    try:
        with torch.device("meta"):
            made = type(model)._from_config(deepcopy(model.config))  # it writes to the config
    except Exception:  # a class with code of its own, which reads values; the saved folder is loaded at the end
        return
    expected: dict[str, list[int] | None] = {each: list(weight.shape) for each, weight in made.named_parameters()}
    for prefix, module in made.named_modules():
        expected |= {f"{prefix}.{each}": None for each, weight in module._parameters.items() if weight is None}
    found = {each: list(weight.shape) for each, weight in model.named_parameters()}
    for each, shape in expected.items():
        if found.get(each) != shape:
            raise ModelError(
                f"this {type(model).__name__} differs from what its class makes of its config, so that it could not be "
                f"loaded again: {each} is {found.get(each, 'missing or tied')}, expected {shape or 'none'}: "
                "change the config, give a model of the class that is made so, or undo what changed this one (merge "
                "adapters, remove parametrizations, compile no module inside)"
            )


@contextmanager
def _temporary_folder() -> Iterator[str]:
    with ExitStack() as stack:
        with _temporary_files():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        yield folder


@contextmanager
def _temporary_files() -> Iterator[None]:
    """Says of an error of the disk which folder it is about."""
    try:
        yield
    except Exception as error:  # transformers raises many kinds
        if (reported := disk_error(error)) is None:
            raise
        named = "the folder for temporary files"
        with suppress(OSError):  # where there is none
            named = f"{named}, {tempfile.gettempdir()},"
        raise OutputError(f"{named} cannot be written: {reported.strerror}") from error

"""Can a model be saved at the end? All but its weights are saved at the start, into a temporary folder."""

from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel

from permtriton.errors import ModelError, reading


def rehearse_saving(name: str, model: PreTrainedModel, tokenizer: Any) -> None:
    """Refuses now what could not be saved at the end: saves all but the weights, and asks which of these are shared.

    Transformers checks some values of configs, and whether a class declares the weights that it shares, only there.
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

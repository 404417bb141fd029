"""Which module of a model computes the last hidden state, and whether the model is an encoder-decoder.

The last hidden state is what a head reads; in an encoder-decoder, it is the decoder's.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from permtriton.errors import ModelError
from permtriton.util.hooks import hooked

DECODER_IDS = "decoder_input_ids"
ENCODER_STATE = "encoder_last_hidden_state"  # in the output of an encoder-decoder


def takes_decoder_ids(model: PreTrainedModel) -> bool:
    """Whether a model is an encoder-decoder whose decoder reads token ids; T5EncoderModel, for example, is not one."""
    if getattr(model.config, "use_decoder_only_language_model", False):  # BLIP-2 with a decoder-only model
        return False
    return DECODER_IDS in inspect.signature(model.forward).parameters


def divides_text(model: PreTrainedModel) -> bool:
    """Whether a text is divided between encoder and decoder; in a classifier, both read the whole text."""
    return takes_decoder_ids(model) and (model.can_generate() or is_headless(model))


def core_of(model: PreTrainedModel) -> nn.Module:
    """Returns the module whose first output is the last hidden state: the model without its head.

    The core is the decoder if the class with the head holds encoder and decoder side by side, as T5's does.
    """
    if is_headless(model) and model.main_input_name not in inspect.signature(model.base_model.forward).parameters:
        return model  # `base_model` is only a part of the model, such as DINOv3's encoder without embeddings
    if model.base_model is not model or not takes_decoder_ids(model) or model.get_output_embeddings() is None:
        return _backbone(model) or model.base_model
    decoder = model.get_decoder()
    return getattr(decoder, "base_model", decoder)


def body_of(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the modules that compute the last hidden state: the core, and the encoder if it is outside the core."""
    core = core_of(model)
    beside = takes_decoder_ids(model) and core is not model.base_model  # otherwise get_encoder may return the model
    return [core, model.get_encoder()] if beside else [core]


def _backbone(model: PreTrainedModel) -> nn.Module | None:
    """Returns the only inner model where ``base_model`` finds none, as in WhisperForAudioClassification; else None."""
    inner = [module for module in model.children() if isinstance(module, PreTrainedModel)]
    if model.base_model is not model or is_headless(model) or takes_decoder_ids(model) or len(inner) != 1:
        return None
    return inner[0] if inner[0].main_input_name == model.main_input_name else None


def is_headless(model: PreTrainedModel) -> bool:
    """Whether transformers knows the model's class as a base model, which returns hidden states."""
    known = (names if isinstance(names, tuple) else (names,) for names in MODEL_MAPPING_NAMES.values())
    return any(type(model).__name__ in names for names in known)


def has_head(model: PreTrainedModel) -> bool:
    """Whether the model has a language-model head, so that the objective may be ``kl``."""
    return core_of(model) is not model and model.get_output_embeddings() is not None


def check_towers(model: PreTrainedModel) -> None:
    """Refuses a model that only compares the outputs of inner models, as CLIP does: there is no last hidden state."""
    inner = {name: child for name, child in model.named_children() if isinstance(child, PreTrainedModel)}
    returned = inspect.signature(model.forward).return_annotation
    outputs = [kind for kind in get_args(returned) or (returned,) if dataclasses.is_dataclass(kind)]
    embeddings = [field.name for output in outputs for field in dataclasses.fields(output) if "_embeds" in field.name]
    if len(inner) > 1 and len(embeddings) > 1:
        first = next(iter(inner))
        towers = " and ".join(f"{name} ({type(child).__name__})" for name, child in inner.items())
        raise ModelError(
            f"{type(model).__name__} compares the outputs of {towers}, which are compiled one by one: save one as a "
            f'model of its own, as by model.{first}.save_pretrained("{first}"), and compile that'
        )


@contextmanager
def recorded_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yields a list to which a forward pass appends hidden states, the last hidden state of the model at the end.

    Some heads call the decoder of their backbone directly, so every backbone has a hook; the outermost returns last.
    """
    states: list[Tensor] = []

    def append(_module: nn.Module, _inputs: object, output: Any) -> None:
        states.append(output[0])

    inner = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model]
    backbones = [module for module in inner if module.base_model is module]  # a decoder with a head returns logits
    if core_of(model) is model and is_headless(model):
        backbones = [model]  # a model inside it may lack the final norm, as DINOv2's encoder does
    with hooked(module.register_forward_hook(append) for module in backbones or [model]):
        yield states


def embedding_of(model: PreTrainedModel) -> Any:
    """Returns the module that transformers calls the input embeddings, of tokens or patches; None if there is none."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


@contextmanager
def recorded_embeddings(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yields a list to which a forward pass appends its input embeddings, if ``inputs_embeds`` could replace them."""
    embedded: list[Tensor] = []
    table = embedding_of(model)
    taken = "inputs_embeds" in inspect.signature(model.forward).parameters

    def add(_module: nn.Module, _inputs: object, output: object) -> None:
        embedded.extend([output] if isinstance(output, Tensor) else [])

    tables = [table] if taken and isinstance(table, nn.Module) else []
    with hooked(module.register_forward_hook(add) for module in tables):
        yield embedded

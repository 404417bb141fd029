"""Calls of a model with more than token ids: random images, or random hidden states of an encoder.

A trace sees token ids only. If it leaves parameters unused, a compilation also compares the dense and the permuted
model on these calls, and lists the arguments for which it cannot make one.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.model.forward import without_cache

STATES = ("encoder_hidden_states", "cross_attention_states")
STATE_TOKENS = 5
# Arguments of forward that bring in no further weights: they describe tokens, or control the call.
CONTROLS = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "token_type_ids", "head_mask",
    "labels", "use_cache", "logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits",
    "vision_feature_layer", "vision_feature_select_strategy", "return_dict", "cache_position", "next_sentence_label",
    "encoder_attention_mask", "cross_attention_mask",
}  # fmt: skip
Arguments = dict[str, Tensor]


@torch.no_grad()
def other_inputs(model: PreTrainedModel, samples: Samples) -> tuple[dict[str, Arguments], dict[str, str]]:
    """Returns one call per further argument of ``forward``, and the arguments for which no call can be made.

    Returns:
        Argument -> keyword arguments of a call that runs, beside the first sample; argument -> why there is none.
    """
    first = dict(samples[:1].to(model.device, model.dtype).inputs)
    makers: dict[str, Callable[[PreTrainedModel, Arguments], list[Arguments]]] = {
        **{name: lambda model, call, name=name: [_with_states(model, call, name)] for name in STATES},  # type: ignore[misc]
        "pixel_values": _with_images,
    }
    calls: dict[str, Arguments] = {}
    missing: dict[str, str] = {}
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if name in CONTROLS or name in first or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        if name not in makers:
            missing[name] = "permtriton cannot make up values for it"
            continue
        try:
            calls[name] = _first_that_runs(model, makers[name](model, first))
        except Exception as error:  # model code may raise anything on random inputs
            missing[name] = f"random values were refused: {next(iter(str(error).splitlines()), type(error).__name__)}"
    return calls, missing


def _first_that_runs(model: PreTrainedModel, candidates: list[Arguments]) -> Arguments:
    for number, arguments in enumerate(candidates):
        try:
            with without_cache(model):
                finite = bool(model(**arguments)[0].isfinite().all())
            if not finite:
                raise ValueError("the model's outputs on them are not finite")
            return arguments
        except Exception:
            if number == len(candidates) - 1:
                raise
    raise ValueError("the config does not say how large an image is, or which token stands for one")


def _random(model: PreTrainedModel, *shape: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return values.to(model.device, model.dtype)


def _with_states(model: PreTrainedModel, call: Arguments, name: str) -> Arguments:
    text = model.config.get_text_config()
    width = getattr(text, "cross_attention_hidden_size", None) or text.hidden_size
    return {**call, name: _random(model, 1, STATE_TOKENS, width)}


def _with_images(model: PreTrainedModel, call: Arguments) -> list[Arguments]:
    """Returns calls with one image, with and without a dimension for images, and with one token per image feature."""
    vision: Any = getattr(model.config, "vision_config", None)
    token = getattr(model.config, "image_token_id", None) or getattr(model.config, "image_token_index", None)
    size = getattr(vision, "image_size", None)
    image_features: Any = getattr(model, "get_image_features", None)
    ids = call.get("input_ids")
    if token is None or size is None or image_features is None or ids is None:
        return []
    height, width = (size, size) if isinstance(size, int) else size
    calls = []
    for shape in ((1, 3, height, width), (1, 1, 3, height, width)):
        pixels = _random(model, *shape)
        try:
            count = _feature_count(image_features(pixels))
        except Exception:  # this model takes images of another shape
            continue
        images = torch.full((1, count), token, device=ids.device)
        calls.append({"input_ids": torch.cat([images, ids], 1), "pixel_values": pixels})
    return calls


def _feature_count(features: Any) -> int:
    if isinstance(features, Mapping):
        features = features["pooler_output"]
    if isinstance(features, list | tuple):
        return sum(_feature_count(part) for part in features)
    return features.numel() // features.shape[-1]

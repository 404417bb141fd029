"""Checks samples before a model is called with them."""

import inspect
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from permtriton.data.media import Processor
from permtriton.data.samples import Inputs, Samples
from permtriton.data.special_tokens import special_tokens_of
from permtriton.errors import CalibrationError
from permtriton.model.core import DECODER_IDS, core_of, divides_text, embedding_of, takes_decoder_ids
from permtriton.model.forward import check_length
from permtriton.model.seq2seq import arguments_of
from permtriton.model.tokenizer import tokenizer_of

OF_IDS = ("input_ids", DECODER_IDS, "labels")  # the arguments that hold token ids


def check_samples(model: PreTrainedModel, inputs: Inputs) -> Samples:
    """Returns samples after `check_inputs`, with the arguments that the model's ``forward`` takes."""
    samples = check_inputs(model, inputs)
    surplus = None if samples.surplus is None else check_samples(model, samples.surplus)
    return replace(samples, inputs=arguments_of(model, samples.inputs), surplus=surplus)


def check_inputs(model: PreTrainedModel, inputs: Inputs) -> Samples:
    """Returns samples, labels included, after checking that the model can take them; token ids become int64."""
    samples = Samples.of(inputs)
    ids = {name: values for name, values in samples.inputs.items() if name in OF_IDS and not values.is_floating_point()}
    samples = replace(samples, inputs={**samples.inputs, **{name: values.long() for name, values in ids.items()}})
    reader = model if core_of(model) is model else model.base_model
    parameters = inspect.signature(reader.forward).parameters.values()
    taken = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    made = {"labels"} if divides_text(model) else set[str]()
    made |= {DECODER_IDS} if takes_decoder_ids(model) else set()
    unknown = [name for name in samples.inputs if name not in (*taken, *made)]
    if taken and unknown:  # a ``forward`` without named arguments passes all of them on
        raise CalibrationError(f"{unknown[0]} is no argument of {type(reader).__name__}: it takes {', '.join(taken)}")
    for name, values in samples.inputs.items():
        if name in OF_IDS:
            vocabulary = vocabulary_of(model)
            if values.dtype != torch.int64 or values.ndim != 2 or values.min() < 0 or values.max() >= vocabulary:
                raise CalibrationError(
                    f"{name} have shape {tuple(values.shape)} and dtype {values.dtype}: expected integers "
                    f"[samples, tokens] with values from 0 to {vocabulary - 1}"
                )
            check_length(model, values.shape[1], of_a_half=divides_text(model) and samples.ids is None)
        elif not bool(values.isfinite().all()):
            bad = int((~values.isfinite()).sum())
            raise CalibrationError(f"{name}: {bad} of {values.numel()} values are NaN or infinite")
        elif name.endswith("attention_mask") and not bool(values.all()):
            raise CalibrationError(
                f"{name}: {int((values == 0).sum())} of {values.numel()} positions are padding, which would be "
                "measured like all others: give samples of one length without padding"
            )
    return samples


def line_of_ids_without(samples: Samples, tokenizer: Processor | None) -> str:
    """Returns a warning if a user's token ids lack the token that the tokenizer puts before a text; else empty."""
    ids = None if samples.special is not None else samples.inputs.get("input_ids")
    if ids is None or not (special := special_tokens_of(tokenizer)).before or bool((ids == special.before[0]).any()):
        return ""
    name = tokenizer_of(tokenizer).convert_ids_to_tokens(special.before[0])
    return (
        f"the token ids hold no {name}, which the tokenizer puts before a text: the model is measured without it, "
        "but is usually run with it"
    )


def vocabulary_of(model: PreTrainedModel) -> int:
    """Returns the size of a model's vocabulary: the number of rows of its smallest embedding.

    If the model names no embedding, as some models of characters or speech do, the config's ``vocab_size`` counts.
    """
    try:
        embedding = embedding_of(model)
        tables = embedding if isinstance(embedding, nn.ModuleList) else [embedding]
        return min(int(table.get_parameter("weight").shape[0]) for table in tables)
    except AttributeError:
        count = getattr(model.config.get_text_config(), "vocab_size", None)
    if not isinstance(count, int) or count < 1:
        raise CalibrationError(f"a {type(model).__name__} does not say which token ids it knows: give other samples")
    return count

"""What an encoder-decoder reads: how token ids are divided between its encoder and its decoder.

A text is cut in the middle: the encoder reads the first half and the decoder continues it. Both then read natural text
of equal length, and the decoder cannot copy what the encoder read, as it could if both had the same ids.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError
from permtriton.model.core import DECODER_IDS, divides_text, takes_decoder_ids


def arguments_of(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the arguments of ``forward``: for an encoder-decoder, with the decoder's ids; else ``inputs`` unchanged.

    Args:
        inputs: for an encoder-decoder, ``input_ids`` alone (int64 ``[rows, tokens]``), which are cut in the middle, or
            read whole by encoder and decoder of a classifier; or the encoder's inputs, and ``decoder_input_ids`` or
            ``labels``, from which the decoder's ids are made.
    """
    inputs = dict(inputs)
    if not takes_decoder_ids(model):
        return inputs
    if all(name == "labels" or name.startswith("decoder_") for name in inputs):
        raise CalibrationError(
            f"the inputs are {', '.join(inputs)} alone, which {type(model).__name__}'s decoder reads: add "
            f"{model.main_input_name} for its encoder, or give {model.main_input_name} alone, which is then divided"
        )
    labels = inputs.pop("labels", None)
    if any(name.startswith("decoder_input") for name in inputs):
        return inputs
    if labels is None and not divides_text(model):
        labels = inputs.get("input_ids")
    elif labels is None and list(inputs) == ["input_ids"]:
        inputs["input_ids"], labels = divided(inputs["input_ids"])
    if labels is None:
        raise CalibrationError(
            f"the inputs are {', '.join(inputs)} alone: give labels or {DECODER_IDS} beside them, which "
            f"{type(model).__name__}'s decoder reads"
        )
    return {**inputs, DECODER_IDS: shifted(model, labels)}


def end_token(model: PreTrainedModel) -> int | None:
    """Returns the token at which the head of a classifier reads the decoder's state; None for all other models."""
    if not takes_decoder_ids(model) or not type(model).__name__.endswith("ForSequenceClassification"):
        return None
    end = model.config.eos_token_id
    if not isinstance(end, int):
        raise CalibrationError(
            f"eos_token_id is {end} in the config of this {type(model).__name__}: expected the id of the token that "
            "ends a text, where its head reads the decoder's state"
        )
    return end


def check_ends(model: PreTrainedModel, samples: Samples) -> None:
    """Refuses samples without the end token at which a classifier's head reads the decoder's state, as BART's does."""
    if (end := end_token(model)) is None:
        return
    missing = (samples.inputs["input_ids"][:, -2:] != end).all(1)  # a language token may follow the end token
    if bool(missing.any()):
        raise CalibrationError(
            f"{int(missing.sum())} of {len(samples)} sequences do not end with the end token (eos_token_id={end}), "
            f"whose state the head of {type(model).__name__} reads: give text and a tokenizer that puts it at the end "
            "of a text, with `special_tokens=auto`, or input_ids that end with it"
        )


def predicted(model: PreTrainedModel, samples: Samples) -> Tensor | None:
    """Returns the tokens of ``samples`` that a language model predicts, whether it reads them or not.

    Returns:
        int64 ``[samples, predicted tokens]``: in a causal model all tokens of a sample but the first, in an
        encoder-decoder the labels; both without the special tokens around the text. None if the model predicts no next
        token, or if its labels are unknown.
    """
    if not model.can_generate():
        return None
    counted = samples.counted
    if not takes_decoder_ids(model):
        return None if samples.ids is None else samples.ids[:, max(counted.start, 1) : counted.stop]
    labels = samples.inputs.get("labels") if samples.ids is None else divided(samples.ids)[1]
    return None if labels is None else labels[:, counted]


def first_predicted(model: PreTrainedModel, samples: Samples) -> int:
    """Returns the position of the logits that predict the first of the tokens that `predicted` returns."""
    start = samples.counted.start
    return start if takes_decoder_ids(model) else max(start - 1, 0)


def divided(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the halves of rows of token ids: what the encoder reads, and the decoder's labels.

    Args:
        ids: int64 ``[rows, tokens]``; of an odd number of tokens, the decoder gets one more.
    """
    half = ids.shape[1] // 2
    if not half:
        raise CalibrationError("a sequence holds 1 token: an encoder-decoder needs at least 2, one for each half")
    return ids[:, :half], ids[:, half:]


def shifted(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """Returns the decoder's inputs for labels ``[rows, tokens]``, as transformers makes them in training."""
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None and getattr(model.config, "decoder_start_token_id", None) is not None:
        ids: Tensor = prepare(labels=labels)
        return ids
    return torch.cat([labels.new_full((labels.shape[0], 1), _start_token(model)), labels[:, :-1]], 1)


def _start_token(model: PreTrainedModel) -> int:
    configs = (getattr(model, "generation_config", None), model.config, model.config.get_text_config())
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    tokens = (getattr(config, name, None) for config in configs for name in names)
    return next((token for token in tokens if isinstance(token, int)), 0)

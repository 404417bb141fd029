"""Reads and prepares the held-out samples on which models are measured."""

from typing import Any

from transformers import PreTrainedModel

from permtriton.data.check_samples import check_inputs, line_of_ids_without, vocabulary_of
from permtriton.data.documents import named_documents
from permtriton.data.in_memory import Data, documents_of, is_named, name_of
from permtriton.data.media import is_media, stored_samples, tensors_of
from permtriton.data.samples import Inputs, Samples
from permtriton.data.tokenize import Encoder
from permtriton.errors import CalibrationError, ConfigError, MissingExtraError, shown
from permtriton.model.core import check_towers, divides_text
from permtriton.model.forward import max_tokens, with_tokens
from permtriton.model.name import DEMO
from permtriton.util.progress import Progress

EVALUATION_WINDOWS = {"c4": 256}  # source -> most windows that are evaluated
EVALUATION_TOKENS = 2048  # per window, or the model's limit if that is lower


def read_held_out(
    model_name: str,
    data: Data | None,
    tokenizer: Any,
    model: Any,
    window: int | None = None,
    count: int | None = None,
    special_tokens: str = "auto",
    progress: Progress | None = None,
) -> tuple[Samples | None, str]:
    """Returns held-out samples, not yet checked, and the name of their source; or None and why there are none.

    Args:
        model_name: name of the model; the demo model is evaluated on the demo text by default.
        data: what `permtriton.evaluate` takes as ``eval_data``; of datasets, what
            `permtriton.data.in_memory.selected` returns. None for the default text, which may be missing.
        window: tokens per window; None for `EVALUATION_TOKENS`, or the model's limit if that is lower.
        count: number of windows or other samples to take, the first ones; None for all.
    """
    if count is not None and (type(count) is not int or count < 1):
        raise ConfigError(f"`eval_windows=` is {shown(count)}: expected a number of windows, at least 1")
    if isinstance(data, str) and data == "none":
        _refuse_window(window, "with `eval_data=none`")
        return None, "turned off"
    check_towers(model)
    if data is None and model.main_input_name != "input_ids":
        return None, f"{type(model).__name__} has no default text; name held-out data to compare the hidden states on"
    is_default = data is None
    data = (DEMO if model_name == DEMO else "wikitext2") if data is None else data
    name, documents = name_of(data), None if is_named(data) else documents_of(data)
    no_text = is_media(model, name) if is_named(data) else documents is None
    if no_text:
        _refuse_window(window, f"on {name}, which is no text")
        samples = stored_samples(name, model) if is_named(data) else tensors_of(data, model)
    else:
        length, vocabulary, halves = _window_of(model, window), vocabulary_of(model), divides_text(model)
        try:
            documents = named_documents(name, held_out=True) if documents is None else documents
            samples = held_out_windows(Encoder(documents, name, tokenizer, vocabulary, special_tokens, halves), length)
        except (CalibrationError, MissingExtraError) as error:
            if not is_default:
                raise
            return None, str(error)
    if progress is not None and (line := line_of_ids_without(samples, tokenizer)):
        progress.say(line)
    return samples[:count], name


def prepared(model: PreTrainedModel, inputs: Inputs) -> Samples:
    """Returns held-out samples after checking them, with the number of tokens that the model makes of each."""
    return with_tokens(model, check_inputs(model, inputs))


def held_out_windows(encoder: Encoder, sequence_length: int) -> Samples:
    """Returns held-out text as consecutive windows, at most `EVALUATION_WINDOWS`, each with special tokens around it.

    Args:
        sequence_length: tokens per window; a shorter text gives one shorter window.
    """
    length = encoder.special.room(sequence_length, "window")
    stream, _ = encoder.stream()
    length = min(length, stream.numel())
    if length + len(encoder.special) < 2:
        raise CalibrationError(f"{encoder.source} holds {stream.numel()} tokens: at least 2 are needed to evaluate")
    rows = stream[: stream.numel() // length * length].view(-1, length)[: EVALUATION_WINDOWS.get(encoder.source)]
    return encoder.samples(rows)


def _window_of(model: Any, window: int | None) -> int:
    longest = max_tokens(model)
    if window is None:
        return min(longest or EVALUATION_TOKENS, EVALUATION_TOKENS)
    if window < 2 or window > (longest or window):
        raise ConfigError(
            f"`window={window}`: expected at least 2 tokens"
            + (f", and at most the {longest:,} that a {type(model).__name__} of this config takes" if longest else "")
        )
    return window


def _refuse_window(window: int | None, where: str) -> None:
    if window is not None:
        raise ConfigError(f"`window={window}` has no effect {where}: leave it out")

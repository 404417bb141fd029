"""Reads and prepares the held-out samples on which models are measured."""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton.data.check_samples import check_inputs, line_of_ids_without, vocabulary_of
from permtriton.data.documents import Documents, named_documents
from permtriton.data.in_memory import Data, documents_of, is_named, name_of, tensors_of
from permtriton.data.media import is_media, stored_samples
from permtriton.data.samples import Inputs, Samples
from permtriton.data.special_tokens import special_tokens_around
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
        data: demo, wikitext2, c4, a file, or the text none for no samples; or what
            `permtriton.data.in_memory.documents_of` and `tensors_of` take. None for the default, which may be missing.
        window: tokens per window; None for `EVALUATION_TOKENS`, or the model's limit if that is lower.
    """
    if count is not None and (type(count) is not int or count < 1):
        raise ConfigError(f"`eval_windows=` is {shown(count)}: expected a number of windows, at least 1")
    windows, name = _all_windows(model_name, data, tokenizer, model, window, special_tokens)
    if progress is not None and (line := line_of_ids_without(windows, tokenizer)):
        progress.say(line)
    return windows if windows is None or count is None else windows[:count], name


def prepared(model: PreTrainedModel, inputs: Inputs) -> Samples:
    """Returns held-out samples after checking them, with the number of tokens that the model makes of each."""
    return with_tokens(model, check_inputs(model, inputs))


def _all_windows(
    model_name: str, data: Data | None, tokenizer: Any, model: Any, window: int | None, special_tokens: str
) -> tuple[Samples | None, str]:
    if isinstance(data, str) and data == "none":
        _refuse_window(window, "with `eval_data=none`")
        return None, "turned off"
    check_towers(model)
    if model.main_input_name != "input_ids" and data is None:
        return None, f"{type(model).__name__} has no default text; name held-out data to compare the hidden states on"
    documents, name = None, name_of(data)
    if data is None:
        name = DEMO if model_name == DEMO else "wikitext2"
    elif not is_named(data):
        documents = documents_of(data)
        if documents is None:
            _refuse_window(window, "on samples in memory")
            return tensors_of(data, model), name
    elif is_media(model, name):
        _refuse_window(window, f"on {name}, which is no text")
        return stored_samples(name, model), name
    length = _window_of(model, window)
    try:
        windows = held_out_windows(
            name, tokenizer, vocabulary_of(model), length, documents,
            halves=divides_text(model), special_tokens=special_tokens,
        )  # fmt: skip
        return windows, name
    except (CalibrationError, MissingExtraError) as error:
        if data is not None:
            raise
        return None, str(error)


def held_out_windows(
    source: str,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    sequence_length: int,
    documents: Documents | None = None,
    *,
    halves: bool = False,
    special_tokens: str = "auto",
) -> Samples:
    """Returns held-out text as consecutive windows, each with the special tokens that surround a text.

    Args:
        source: ``demo``, ``wikitext2``, ``c4`` or a local file.
        sequence_length: Tokens per window; a shorter text gives one shorter window.
    """
    if documents is None:
        documents = named_documents(source, held_out=True)
    special = special_tokens_around(documents, tokenizer, special_tokens, halves=halves)
    encoder = Encoder(documents, source, tokenizer, vocabulary, special)
    length = encoder.special.room(sequence_length, "window")
    stream, _ = encoder.stream()
    length = min(length, stream.numel())
    if length + len(encoder.special) < 2:
        raise CalibrationError(f"{source} holds {stream.numel()} tokens: at least 2 are needed to evaluate")
    rows = stream[: stream.numel() // length * length].view(-1, length)[: EVALUATION_WINDOWS.get(source)]
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

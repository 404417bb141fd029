"""The held-out text of the commands ``compile`` and ``compare``."""

from typing import Any

from permtriton.data.media import is_media, media_samples
from permtriton.data.text import check_inputs, evaluation_ids, vocabulary_of
from permtriton.errors import CalibrationError
from permtriton.model.core import check_towers
from permtriton.model.forward import max_tokens
from permtriton.model.load import Source

EVALUATION_TOKENS = 2048  # per window, or the model's limit if that is lower


def held_out_windows(source: Source, eval_text: str | None, tokenizer: Any, model: Any) -> tuple[Any, str]:
    """Returns held-out samples and the name of their source, or None and the reason why there are none.

    Args:
        source: source of the model; the demo model is evaluated on the demo text by default.
        eval_text: demo, wikitext2, c4, a file, or none; of a model that reads images or sound, a folder. None for the
            default, which may be missing.

    Returns:
        Token ids, int64 ``[windows, tokens]``, or `Samples`, or None; and the name of the source, or the reason.

    Raises:
        CalibrationError: the text that the user named cannot be read.
        ModelError: the model only compares the outputs of others, as CLIP does.
    """
    if eval_text == "none":
        return None, "turned off by --eval-text (or --eval-data) none"
    check_towers(model)
    if model.main_input_name != "input_ids" and eval_text is None:
        return None, "give --eval-data a folder to compare the hidden states on"
    if eval_text is not None and is_media(model, eval_text):
        return check_inputs(model, media_samples(eval_text, model, tokenizer, None)), eval_text
    name = eval_text or ("demo" if source.name == "demo" else "wikitext2")
    limit = max_tokens(model) or EVALUATION_TOKENS
    vocabulary = vocabulary_of(model)
    try:
        return evaluation_ids(name, tokenizer, vocabulary, min(limit, EVALUATION_TOKENS)), name
    except CalibrationError as error:
        if eval_text is not None:
            raise
        return None, str(error)

"""Text that the dense model generates: further samples for the steps that fit a pruned model to the dense one.

The only labels of these steps are the dense model's outputs, so any text serves, and the model writes any amount.
"""

from math import ceil, exp
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from permtriton.data.check_samples import vocabulary_of
from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, first_line
from permtriton.model.core import takes_decoder_ids
from permtriton.util import ranks
from permtriton.util.micro_batch import MicroBatch, is_out_of_memory
from permtriton.util.progress import Advance, Progress

BEGINNING = 8  # ratio of a text's length to the length of its beginning, which is calibration text
KEPT = 0.9  # share of the texts that are kept: the texts with the lowest perplexity
AT_ONCE = 4 * 2**30  # most bytes in memory for texts that are written together; a single text may take more


def generation_refusal(model: PreTrainedModel, samples: Samples) -> str:
    """Returns why a model cannot write further samples; empty if it can."""
    name = type(model).__name__
    if takes_decoder_ids(model):
        return f"{name} is an encoder-decoder, which writes only what belongs to the text that its encoder reads"
    if not model.can_generate():
        return f"{name} does not generate text token by token"
    if model.main_input_name != "input_ids" or samples.ids is None:
        return f"{name} writes token ids alone, but reads {', '.join(samples.inputs)}"
    return ""


def written(count: int) -> int:
    """Returns how many texts the model writes so that ``count`` are kept."""
    return ceil(count / KEPT)


def kept_of_text(model: PreTrainedModel, tokens: int) -> int:
    """Returns the bytes that are in memory for one text of ``tokens`` tokens while the model writes it."""
    text = model.config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    cached = 2 * size * int(getattr(text, "num_key_value_heads", None) or heads)  # keys and values
    if latent := getattr(text, "kv_lora_rank", None):  # DeepSeek computes keys and values from a latent
        cached = latent + text.qk_rope_head_dim
    logits = vocabulary_of(model) * (2 * 4 + 3 * 8)  # two float32 tensors, and `_Drawing`: up to three of float64
    return tokens * text.num_hidden_layers * cached * model.dtype.itemsize + logits


def texts_at_once(model: PreTrainedModel, tokens: int, count: int) -> int:
    """Returns how many of ``count`` texts of ``tokens`` tokens are written together."""
    return min(max(AT_ONCE // kept_of_text(model, tokens), 1), count)


def beginnings(samples: Samples, count: int, tokens: int) -> Tensor:
    """Returns the beginnings of all texts to write so that ``count`` are kept, int64 ``[written, first tokens]``.

    They are the first ``tokens`` tokens of each sample in turn, then the next ``tokens`` of each, and so on. The
    special tokens that the sample begins with come before them.
    """
    assert samples.ids is not None, "see `generation_refusal`"
    text, before = samples.ids[:, samples.counted], samples.ids[:, : samples.counted.start]
    number = torch.arange(written(count))
    row, tokens = number % len(samples), min(tokens, text.shape[1])
    starts = number // len(samples) * tokens % (text.shape[1] - tokens + 1)
    return torch.cat([before[row], text[row[:, None], starts[:, None] + torch.arange(tokens)]], 1)


@torch.no_grad()
def generated_text(
    model: PreTrainedModel, starts: Tensor, count: int, tokens: int, seed: int, progress: Progress
) -> Tensor:
    """Writes texts at temperature 1, with a cache of keys and values; returns the ``count`` of the lowest perplexity.

    Up to rounding, a text depends only on its beginning, the seed and its number, not on how many texts are written
    together or on the number of ranks, which share the texts.

    Args:
        starts: first tokens of the texts, int64 ``[texts, first tokens]``.

    Returns:
        int64 ``[count, tokens]``, on the CPU.
    """
    every, length = torch.arange(len(starts)), tokens - starts.shape[1]
    numbers = torch.rand(len(starts), tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with progress.stage("generate", ranks.own(every).numel() * length) as advance:

        def write(size: int) -> tuple[Tensor, Tensor]:
            parts = [_write(model, starts[rows], numbers[rows], advance) for rows in ranks.parts(every, size)]
            texts, surprises = zip(*parts, strict=True) if parts else ([starts[:0]], [numbers[:0, 0]])
            return torch.cat(texts), torch.cat(surprises)

        share = MicroBatch(texts_at_once(model, tokens, len(starts))).run(write)
    texts, surprises = (ranks.join(parts, len(starts)) for parts in share)
    if not bool(surprises.isfinite().all()):
        raise CalibrationError(
            "the text that the dense model writes is not finite: activations overflow (try "
            "`dtype=float32`), or the weights are damaged"
        )
    kept = surprises.argsort(stable=True)[:count].sort().values
    perplexity = exp(float(surprises[kept].mean()) / length)
    progress.say(f"the dense model wrote {len(starts)} texts of {tokens} tokens: {count} are used, of perplexity "
                 f"{perplexity:.2f}")  # fmt: skip
    return texts[kept]


def _write(model: PreTrainedModel, starts: Tensor, numbers: Tensor, advance: Advance) -> tuple[Tensor, Tensor]:
    """Returns ``starts`` continued to as many tokens as ``numbers`` has columns, and each text's surprisal in nats."""
    drawing = _Drawing(numbers.to(model.device), advance)
    plain = GenerationConfig(max_length=numbers.shape[1], do_sample=False, use_cache=True)
    generate: Any = model.generate
    starts = starts.to(model.device)
    try:
        with mock.patch.object(model, "generation_config", GenerationConfig()):  # the model's own may end a text early
            texts = generate(starts, plain, LogitsProcessorList([drawing]), attention_mask=torch.ones_like(starts))
    except Exception as error:  # the model's code may raise any exception
        if is_out_of_memory(error):
            raise
        raise CalibrationError(
            f"the dense model itself, {type(model).__name__}, cannot generate text: {type(error).__name__}: "
            f"{first_line(error)}. Give calibration text and `generated=0`, so that it need not"
        ) from error
    return texts.cpu(), drawing.surprises.cpu()


class _Drawing(LogitsProcessor):
    """Samples each next token by random numbers that were drawn before, so that a text does not depend on its batch.

    Args:
        numbers: from 0 to 1, one per token, float64 ``[texts, tokens]``.

    Attributes:
        surprises: negative logarithm of the probability of a text's drawn tokens, float64 ``[texts]``.
    """

    def __init__(self, numbers: Tensor, advance: Advance) -> None:
        self._numbers, self._advance, self.surprises = numbers, advance, torch.zeros_like(numbers[:, 0])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logs = scores.double().log_softmax(-1)
        sums = logs.exp().cumsum_(-1)
        drawn = torch.searchsorted(sums, self._numbers[:, input_ids.shape[1], None] * sums[:, -1:], right=True)
        drawn.clamp_max_(scores.shape[-1] - 1)  # where the probabilities are not finite
        self.surprises -= logs.gather(1, drawn).squeeze(1)
        self._advance(len(input_ids))
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)

"""Measures a model: perplexity, fidelity to the dense model, zero-shot tasks."""

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton.data.media import is_media
from permtriton.data.samples import Inputs, Samples
from permtriton.data.text import check_inputs
from permtriton.errors import ConfigError
from permtriton.evaluation.fidelity import DISTANCES, Fidelity, fidelity
from permtriton.evaluation.perplexity import Stopwatch, perplexity, windows_at_once, with_perplexity
from permtriton.model.core import takes_decoder_ids
from permtriton.model.forward import in_eval_mode, with_tokens
from permtriton.model.seq2seq import predicted, with_decoder_ids
from permtriton.util.machine import device_name
from permtriton.util.progress import Progress

if TYPE_CHECKING:  # it imports lm_eval, which takes seconds
    from permtriton.evaluation.tasks import TaskResult, Tasks


@dataclass(frozen=True, kw_only=True)
class Evaluated(Fidelity):
    """What is known of a model after an evaluation; None or 0 stands for what was not measured.

    Attributes:
        tasks: results of the tasks.
        windows: number of windows.
        window: tokens per window.
        seconds: time of the whole evaluation, the dense model's part included.
        tokens_per_second: speed of the model's own forward passes over the windows.
        text: name of the held-out text; None without windows.
        protocol: what was measured on which samples, in words; None without windows.
        dtype: dtype of the model.
        device: the machine.
    """

    tasks: tuple["TaskResult", ...]
    windows: int
    window: int
    seconds: float
    tokens_per_second: float
    text: str | None
    protocol: str | None
    dtype: str
    device: str

    def __str__(self) -> str:
        numbers = {"perplexity": self.perplexity, "dense": self.dense_perplexity}
        numbers |= {distance.short: getattr(self, name) for name, distance in DISTANCES.items()}
        scores = {f"{task.name} {name}": score.value for task in self.tasks for name, score in task.scores.items()}
        parts = [f"{name} {value:.4g}" for name, value in (numbers | scores).items() if value is not None]
        return ", ".join(parts) + (f" on {self.text} ({self.protocol})" if self.text else "")

    @property
    def tokens(self) -> int:
        """Number of tokens in all windows."""
        return self.windows * self.window


def measure_model(  # noqa: PLR0913
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    windows: Inputs | None = None,
    text: str = "samples",
    dense: PreTrainedModel | None = None,
    hidden_order: Tensor | None = None,
    tasks: "Tasks | None" = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> Evaluated:
    """Measures a model, dense or compiled in any format, as it is in memory, but without dropout.

    Args:
        tokenizer: its tokenizer, which the tasks need.
        windows: held-out token ids, int64 ``[windows, tokens]``, or other samples as `permtriton.compile` takes them;
            None measures the tasks only.
        text: name of the windows.
        dense: dense model to compare with on ``windows``; None measures the perplexity only.
        hidden_order: index ``[C]`` from the dense model's channels of the last hidden state to the model's, such as
            ``compiled.plan.hidden_order(compiled.indices)``; None where they did not move.
        tasks: tasks to run.
        batch: windows, or requests of tasks, per forward pass; by default 8 requests, and as many windows as make 2048
            tokens.

    Raises:
        ConfigError: there is nothing to measure, or the model has no perplexity and there is no dense model, or it is
            an encoder and there are tasks.
        ModelError: the models cannot be compared.
        CalibrationError: a measure is not finite.
        TaskError: a task cannot be run.
    """
    windows = None if windows is None else check_inputs(model, windows)
    started, watch = time.perf_counter(), Stopwatch()
    measured, count, window = Fidelity(), 0, 0
    with in_eval_mode(*filter(None, (model, dense))):
        _check(model, tokenizer, windows, dense, tasks, batch)
        if windows is not None:
            samples = with_tokens(model, with_decoder_ids(dense or model, windows))
            count, window = len(samples), samples.tokens
            at_once = batch or windows_at_once(samples.longest)
            if dense is not None:
                measured = fidelity(model, dense, samples, at_once, hidden_order, progress, watch)
            else:
                measured = Fidelity(perplexity=perplexity(model, samples, at_once, progress, watch))
        options = {} if batch is None else {"batch": batch}
        results = tasks.run(model, tokenizer, **options, progress=progress) if tasks and tokenizer else ()
    return Evaluated(
        **asdict(measured),
        tasks=results,
        windows=count,
        window=window,
        seconds=time.perf_counter() - started,
        tokens_per_second=count * window / watch.seconds if watch.seconds else 0.0,
        text=text if count else None,
        protocol=_protocol(model, text, samples, measured) if count else None,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device_name(model.device),
    )


def _protocol(model: PreTrainedModel, text: str, samples: Samples, measured: Fidelity) -> str:
    """Returns in words what was measured on which samples."""
    count, window = len(samples), samples.tokens
    if is_media(model, text):
        return f"{count} samples of {window} positions"
    around = "" if samples.special is None else f", {samples.special.words}"
    windows = f"{count} windows of {window} tokens that do not overlap{around}"
    if measured.perplexity is None:
        return windows
    if takes_decoder_ids(model) and samples.ids is None:
        return f"{count} samples; the decoder predicts the {window} labels of each"
    if takes_decoder_ids(model):
        return f"{windows}; the encoder reads the first half of each, and the decoder predicts the second"
    begins = samples.special and samples.special.before
    return f"{windows}; {'special tokens are' if begins else 'the first token of each is'} not predicted"


def _check(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    windows: Samples | None,
    dense: PreTrainedModel | None,
    tasks: "Tasks | None",
    batch: int | None,
) -> None:
    kind = type(model).__name__
    if batch is not None and batch < 1:
        raise ConfigError(f"batch size is {batch}: expected at least 1")
    if windows is None and tasks is None:
        raise ConfigError("nothing to evaluate: give `eval_data=`, `tasks=` or both")
    if windows is None and dense is not None:
        raise ConfigError("`against=` compares two models on a text: with `eval_data=none` there is none: name one")
    if not (model.can_generate() and model.main_input_name == "input_ids") and tasks is not None:
        why = f"reads {model.main_input_name}, not text" if model.can_generate() else "predicts no next token"
        raise ConfigError(f"{kind} {why}, so it has no tasks: leave `tasks=` out")
    if windows is not None and dense is None and with_perplexity(model, windows) is None:
        why = "is given no labels to predict" if model.can_generate() else "predicts no next token"
        why = why if predicted(model, windows) is None else "reads the whole text"
        raise ConfigError(
            f"{kind} {why}, so it has no perplexity: give the dense model with `against=` for the cosine of the hidden "
            "states"
        )
    if tasks is not None and tokenizer is None:
        raise ConfigError("tasks need the model's tokenizer, and this model has none: add its files to the folder")

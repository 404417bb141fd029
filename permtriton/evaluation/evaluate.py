"""Measures a model that a user names or holds: on held-out samples, against a dense model, and by zero-shot tasks."""

import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton.arguments import EvaluateArgs, MeasureArgs
from permtriton.checkpoint.nm_weights import broken_claim
from permtriton.checkpoint.plan_entries import hidden_order_of
from permtriton.checkpoint.read_record import find_record
from permtriton.data.held_out import prepared, read_held_out
from permtriton.data.in_memory import selected
from permtriton.data.media import is_media
from permtriton.data.samples import Inputs, Samples
from permtriton.errors import CalibrationError, ConfigError, MemoryTooSmallError, ModelError
from permtriton.evaluation.measures import DISTANCES, Distances, measure_samples, predicted_tokens
from permtriton.model import load
from permtriton.model.core import takes_decoder_ids
from permtriton.model.forward import in_eval_mode, windows_at_once
from permtriton.model.name import DEMO, location_of
from permtriton.model.prunable import check_loaded
from permtriton.model.seq2seq import predicted
from permtriton.model.source import Source, source_of
from permtriton.model.tokenizer import load_processor, tokenizer_of
from permtriton.util import machine
from permtriton.util.bars import reporter
from permtriton.util.extras import require
from permtriton.util.machine import available_memory, device_name, format_bytes
from permtriton.util.progress import Progress

if TYPE_CHECKING:  # the import of lm_eval takes seconds
    from permtriton.evaluation.tasks import TaskResult, Tasks

Model: TypeAlias = PreTrainedModel | str | Path
Against: TypeAlias = PreTrainedModel | Source | str | Path | None


@dataclass(frozen=True, kw_only=True)
class Evaluated(Distances):
    """The results of an evaluation; None or 0 for values that were not measured.

    Attributes:
        perplexity: perplexity of the model; None where the model predicts no next token (encoders) or sees the tokens
            that it should predict, or where these are unknown (sound without labels).
        dense_perplexity: the same of the dense model.
        tasks: results of the tasks.
        windows: number of windows.
        window: tokens per window.
        seconds: time of the whole evaluation, the dense model's part included.
        tokens_per_second: speed of the model's own forward passes over the windows.
        text: name of the held-out text; None without windows.
        protocol: what was measured on which samples, in words; None without windows.
        dtype: dtype of the model.
        device: name of the model's device.
    """

    perplexity: float | None = None
    dense_perplexity: float | None = None
    tasks: tuple["TaskResult", ...]
    windows: int = 0
    window: int = 0
    seconds: float
    tokens_per_second: float = 0.0
    text: str | None = None
    protocol: str | None = None
    dtype: str
    device: str

    def __str__(self) -> str:
        numbers = {"perplexity": self.perplexity, "dense": self.dense_perplexity}
        numbers |= {distance.short: getattr(self, name) for name, distance in DISTANCES.items()}
        parts = [f"{name} {value:.4g}" for name, value in (numbers | self.task_scores).items() if value is not None]
        return ", ".join(parts) + (f" on {self.text} ({self.protocol})" if self.text else "")

    @property
    def task_scores(self) -> dict[str, float | None]:
        """Scores, with names of task and metric as keys, such as ``arc_easy acc``."""
        return {f"{task.name} {name}": score.value for task in self.tasks for name, score in task.scores.items()}

    @property
    def tokens(self) -> int:
        """Number of tokens in all windows."""
        return self.windows * self.window


def load_tasks(args: MeasureArgs, progress: Progress) -> "Tasks | None":
    names = args.task_names
    if not names:
        if args.limit is not None or args.tasks_dir is not None:
            raise ConfigError("`limit=` and `tasks_dir=` have no effect without `tasks=`: name tasks")
        return None
    require("an evaluation by tasks", "lm_eval", "accelerate")
    progress.say(f"loading tasks {', '.join(names)}")
    with progress.stage("load", 0):
        from permtriton.evaluation.tasks import Tasks

        return Tasks(names, args.limit, None if args.tasks_dir is None else Path(args.tasks_dir))


def versions(args: MeasureArgs) -> dict[str, str]:
    return machine.versions() | ({"lm_eval": metadata.version("lm_eval")} if args.task_names else {})


def evaluate_with(model: Model, args: EvaluateArgs) -> Evaluated:
    """Measures a model; `permtriton.evaluate` says what each argument is."""
    args, progress = args.with_protocol(model if isinstance(model, str) else ""), reporter(args.progress)
    tasks = load_tasks(args, progress)
    eval_data = selected(args.eval_data, args.text_column)
    name, tokenizer, dense = "", args.tokenizer, args.against
    hidden_order = None if args.hidden_order is None else torch.as_tensor(args.hidden_order).cpu()
    location = {"gguf_file": args.gguf_file, "revision": args.revision}
    loading = {name: value for name, value in args.loading.items() if name not in location}
    if isinstance(dense, str | Path):
        dense = Source(location_of(dense), **loading)
    elif not isinstance(dense, Source | PreTrainedModel | None):
        raise ConfigError(
            f"against is a {type(dense).__name__}: expected a folder, a hub name, demo, or a transformers model"
        )
    of_the_dense = dense is not None and isinstance(model, PreTrainedModel)  # then ``loading`` is for the dense model
    source = source_of(model, **({} if of_the_dense else loading), **location)
    if isinstance(source, Source):
        name = source.name
        measured = load.load_model(source, progress=progress)
        # In a folder with a GGUF file, permtriton.json describes other weights: `find_record` returns None.
        record = find_record(source)
        if record is not None and (problem := broken_claim(measured, record)):
            progress.say(f"warning: {problem}")
        tokenizer = tokenizer or load_processor(source, measured, progress)
        if record is not None and hidden_order is None:
            hidden_order = hidden_order_of(record)
    else:
        measured = source
    if isinstance(dense, Source):
        name = DEMO if dense.name == DEMO else name
        dense = _loaded_beside(measured, tokenizer, dense, progress)
    for loaded in filter(None, (measured, dense)):
        check_loaded(loaded)
    held_out, text = read_held_out(
        name, eval_data, tokenizer, measured, args.window, args.eval_windows, args.special_tokens or "auto", progress
    )
    if held_out is None and eval_data is None:
        if tasks is None or dense is not None:
            raise CalibrationError(text)
        progress.say(f"no perplexity, tasks only: {text}")
    return measure_model(
        measured,
        tokenizer,
        held_out=held_out,
        text=text,
        dense=dense,
        hidden_order=hidden_order,
        tasks=tasks,
        batch=args.batch_size,
        progress=progress,
    )


def _loaded_beside(model: PreTrainedModel, tokenizer: Any, against: Source, progress: Progress) -> PreTrainedModel:
    """Loads the dense model; refuses if the GPU of ``model`` has no room for it. On a CPU, weights are mapped."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    if model.device.type == "cuda" and size > (free := available_memory(model.device)):
        raise MemoryTooSmallError(
            f"the dense model {against.name} needs {format_bytes(size)} beside the measured one, but "
            f"{format_bytes(free)} are free: measure on a CPU, or the perplexity alone (without `against=`)"
        )
    dense, dense_tokenizer = load.load_original(against, progress=progress)
    tokenizers = map(tokenizer_of, (tokenizer, dense_tokenizer))
    vocabularies = [tokenizer.get_vocab() for tokenizer in tokenizers if hasattr(tokenizer, "get_vocab")]
    if len(vocabularies) == 2 and vocabularies[0] != vocabularies[1]:
        raise ModelError(
            "the tokenizers of both models have different vocabularies, so the same text is not the same for them: "
            "give the dense model that the model was compiled from"
        )
    return dense


def measure_model(  # noqa: PLR0913
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    held_out: Inputs | None = None,
    text: str = "samples",
    dense: PreTrainedModel | None = None,
    hidden_order: Tensor | None = None,
    tasks: "Tasks | None" = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> Evaluated:
    """Measures a model in memory, dense or compiled in any format, without dropout.

    Args:
        held_out: held-out token ids, int64 ``[windows, tokens]``, or other samples as `permtriton.compile` takes them;
            None measures the tasks only.
        dense: dense model to compare with on ``held_out``; None measures the perplexity only.
        hidden_order: index ``[C]`` from the dense model's channels of the last hidden state to the model's, such as
            ``compiled.plan.hidden_order(compiled.indices)``; None where they did not move.
        batch: windows, or requests of tasks, per forward pass; by default 8 requests, and as many windows as make 2048
            tokens.
    """
    started, measured = time.perf_counter(), dict[str, Any]()
    with in_eval_mode(*filter(None, (model, dense))):
        _check(model, tokenizer, held_out, dense, tasks, batch)
        if held_out is not None:
            samples = prepared(model, held_out)
            tokens = predicted_tokens(model, samples)
            if dense is None and tokens is None:
                raise _no_perplexity(model, samples)
            at_once = batch or windows_at_once(samples.longest)
            measures, seconds = measure_samples(model, samples, tokens, at_once, dense, hidden_order, progress)
            measured = {
                **measures,
                "windows": len(samples),
                "window": samples.tokens,
                "tokens_per_second": samples.positions / seconds,
                "text": text,
                "protocol": _protocol(model, text, samples, tokens),
            }
        results = tasks.run(model, tokenizer, batch, progress) if tasks and tokenizer else ()
    return Evaluated(
        **measured,
        tasks=results,
        seconds=time.perf_counter() - started,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device_name(model.device),
    )


def _protocol(model: PreTrainedModel, text: str, samples: Samples, tokens: Tensor | None) -> str:
    """Returns in words what was measured on which samples; ``tokens`` are as `predicted_tokens` returns them."""
    count, window = len(samples), samples.tokens
    if is_media(model, text):
        return f"{count} samples of {window} positions"
    around = "" if samples.special is None else f", {samples.special.words}"
    windows = f"{count} windows of {window} tokens that do not overlap{around}"
    if tokens is None:
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
    held_out: Inputs | None,
    dense: PreTrainedModel | None,
    tasks: "Tasks | None",
    batch: int | None,
) -> None:
    kind = type(model).__name__
    if batch is not None and batch < 1:
        raise ConfigError(f"batch size is {batch}: expected at least 1")
    if held_out is None and tasks is None:
        raise ConfigError("nothing to evaluate: give `eval_data=`, `tasks=` or both")
    if held_out is None and dense is not None:
        raise ConfigError("`against=` compares two models on a text: with `eval_data=none` there is none: name one")
    if not (model.can_generate() and model.main_input_name == "input_ids") and tasks is not None:
        why = f"reads {model.main_input_name}, not text" if model.can_generate() else "predicts no next token"
        raise ConfigError(f"{kind} {why}, so it has no tasks: leave `tasks=` out")
    if tasks is not None and tokenizer is None:
        raise ConfigError("tasks need the model's tokenizer, and this model has none: add its files to the folder")


def _no_perplexity(model: PreTrainedModel, samples: Samples) -> ConfigError:
    why = "is given no labels to predict" if model.can_generate() else "predicts no next token"
    why = why if predicted(model, samples) is None else "reads the whole text"
    return ConfigError(
        f"{type(model).__name__} {why}, so it has no perplexity: give the dense model with `against=` for the cosine "
        "of the hidden states"
    )

"""Zero-shot tasks, run by lm-eval on a model in memory. Importing this module imports lm_eval, which takes seconds."""

import copy
import difflib
import io
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from lm_eval import evaluate
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton.data.special_tokens import special_tokens_of
from permtriton.errors import ConfigError, PermTritonError, TaskError, first_line, reading
from permtriton.model.core import takes_decoder_ids
from permtriton.model.forward import max_tokens
from permtriton.model.tokenizer import tokenizer_of
from permtriton.util.progress import NoProgress, Progress, without_other_bars

REQUESTS_AT_ONCE = 8
BOOTSTRAPS = 1000  # resamples for the standard error of metrics that are no means; lm-eval's 100,000 take minutes


@dataclass(frozen=True)
class Score:
    """One metric of one task.

    Attributes:
        value: the metric over all samples; None where it is no finite number, such as a mean over no answers.
        stderr: its standard error; None where lm-eval knows none, as for perplexities.
    """

    value: float | None
    stderr: float | None


@dataclass(frozen=True)
class TaskResult:
    """The result of one task, or of a group of tasks.

    Attributes:
        name: lm-eval's name of the task.
        version: the task's version.
        shots: examples before each question.
        samples: documents that were evaluated.
        scores: metric -> score, such as ``acc``; where the task has a filter, ``exact_match,strict``.
        group: name of the group that contains this task or group, if the containing group has a score; else None.
    """

    name: str
    version: str
    shots: int
    samples: int
    scores: dict[str, Score]
    group: str | None = None


class Tasks:
    """Tasks with their data, ready to be run on any number of models.

    Args:
        names: names of tasks, groups or tags, which may have wildcards.
        limit: documents per task; None for all.
        folder: folder with more tasks: YAML files as lm-eval takes them, in which paths are relative to this folder. If
            the folder has all of ``names``, lm-eval's own tasks are not read. A task may run code.
    """

    def __init__(self, names: Sequence[str], limit: int | None = None, folder: Path | None = None) -> None:
        if not names or not all(names):
            raise ConfigError("no task: give names separated by commas, such as arc_easy,hellaswag")
        if limit is not None and limit < 1:
            raise ConfigError(f"limit is {limit}: expected at least one document per task")
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"tasks folder {folder} does not exist: give a folder with lm-eval's YAML files")
        self.names, self.limit = tuple(names), limit
        with _quiet():
            manager, task_names = _find(self.names, folder)
            _seed()
            hint = "check the files in the folder" if folder else "check the network, or use local tasks"
            with reading(f"tasks {', '.join(names)} cannot be loaded ({hint})", TaskError), chdir(folder or "."):
                self._loaded = manager.load(task_names)
        for task in self._loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", 0)

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch: int | None = None,
        progress: Progress | None = None,
    ) -> tuple[TaskResult, ...]:
        """Runs the tasks on a model, with lm-eval's seeds, so that equal models get equal scores."""
        progress = progress or NoProgress()
        harness = _Harness(model, tokenizer_of(tokenizer), batch or REQUESTS_AT_ONCE, progress)
        _seed()
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(DEFAULT_OTHER_SEED)
        try:
            with _quiet():
                results: Any = evaluate(
                    harness, self._loaded, limit=self.limit, bootstrap_iters=BOOTSTRAPS, log_samples=False
                )
        except (PermTritonError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # templates, metrics and filters come with the tasks and may raise any kind
            raise TaskError(
                f"tasks {', '.join(self.names)} cannot be run: {type(error).__name__}: {first_line(error)}"
            ) from error
        if harness.truncated:
            progress.say(f"{harness.truncated} requests of tasks lost their beginning: longer than the model can take")
        groups = {
            member: group
            for group, members in results["group_subtasks"].items()
            if _scores(results["results"].get(group, {}))
            for member in members
        }
        return tuple(
            TaskResult(
                name,
                str(results["versions"].get(name, "N/A")),
                results["n-shot"].get(name, 0),
                values["sample_len"],
                _scores(values),
                groups.get(name),
            )
            for name, values in results["results"].items()
            if "sample_len" in values  # absent in a group that has no score
        )


class _Harness(HFLM):
    """lm-eval's view of the model, which reports progress in place of lm-eval's own bars."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: int, progress: Progress
    ) -> None:
        self._halves, limit = takes_decoder_ids(model), max_tokens(model)
        special = special_tokens_of(tokenizer)
        with _quiet():
            super().__init__(
                pretrained=model,
                backend="seq2seq" if self._halves else "causal",
                tokenizer=copy.deepcopy(tokenizer),  # HFLM may set its padding token
                batch_size=batch,
                max_length=limit // 2 if limit and self._halves else limit,
                prefix_token_id=special.before[0] if special.before else None,
            )
        self.truncated, self._after = 0, special.after
        self._progress = progress

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._reporting(super().loglikelihood, requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        with mock.patch.object(self, "add_bos_token", False):  # lm-eval itself puts prefix_token_id before the text
            return self._reporting(super().loglikelihood_rolling, requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self._reporting(super().generate_until, requests)

    def _reporting(self, answer: Callable[[list[Any]], list[Any]], requests: list[Any]) -> list[Any]:
        """Answers requests and reports progress: HFLM calls its cache hook for each answer, and ours counts them."""
        with self._progress.stage("tasks", len(requests)) as advance:
            self.set_cache_hook(SimpleNamespace(add_partial=lambda kind, request, answer: advance()))
            return answer(requests)

    def _loglikelihood_tokens(self, requests: Any, *arguments: Any, **named: Any) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise TaskError(
                    f"an answer of a task has {len(continuation)} tokens, but the model can take {self.max_length}: "
                    "choose tasks with shorter answers"
                )
            self.truncated += len(context) + (0 if self._halves else len(continuation) - 1) > self.max_length
        return super()._loglikelihood_tokens(requests, *arguments, **named)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **named: Any) -> list[int]:
        ids = super().tok_encode(string, add_special_tokens, **named)
        return ids if self._halves else self._open(torch.tensor(ids, dtype=torch.int64)).tolist()

    def _open(self, ids: Tensor) -> Tensor:
        """Removes the special tokens that the tokenizer puts after a text, because an answer follows."""
        after = torch.tensor(self._after, dtype=ids.dtype)
        ended = len(after) and ids.shape[-1] > len(after) and bool((ids[..., -len(after) :] == after).all())
        return ids[..., : -len(after)] if ended else ids

    def tok_batch_encode(self, strings: list[str], *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        limit = named.pop("left_truncate_len", None)
        ids, mask = super().tok_batch_encode(strings, *arguments, **named)
        if not self._halves:
            ids = self._open(ids)
            mask = mask[:, : ids.shape[1]]
        if limit:
            self.truncated += int((mask.sum(1) > limit).sum())
            ids, mask = ids[:, -limit:], mask[:, -limit:]
        return ids, mask


def _find(names: Sequence[str], folder: Path | None) -> tuple[TaskManager, list[str]]:
    """Returns a manager that knows the tasks, and their names without wildcards."""
    manager = TaskManager(include_path=folder.resolve(), include_defaults=False) if folder else TaskManager()
    if folder and not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=folder.resolve())
    for name in names:
        if not manager.match_tasks([name]):
            close = difflib.get_close_matches(name, manager.all_tasks, 3) or ["arc_easy", "hellaswag"]
            where = f"{folder} and lm-eval" if folder else "lm-eval"
            raise TaskError(
                f"task {name!r} is unknown to {where} {metadata.version('lm_eval')}; did you mean {', '.join(close)}?"
            )
    return manager, list(dict.fromkeys(task_name for name in names for task_name in manager.match_tasks([name])))


def _seed() -> None:
    """Sets the seeds that lm-eval's ``simple_evaluate`` sets, which also takes seconds to describe the machine."""
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)


def _scores(values: dict[str, Any]) -> dict[str, Score]:
    """Returns the scores of a task: lm-eval's keys are ``metric,filter`` and ``metric_stderr,filter``."""
    scores = {}
    for key, value in values.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        name = metric if filter_name == "none" else key
        scores[name] = Score(_number(value), _number(values.get(f"{metric}_stderr,{filter_name}")))
    return scores


def _number(value: Any) -> float | None:
    """Returns a value as a finite float; None for anything else that a metric or lm-eval may return."""
    try:
        number = float(value)
    except Exception:  # a metric of a task may return any object
        return None
    return number if math.isfinite(number) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the output and progress bars of lm-eval and datasets, whose own options do not silence everything."""
    level = logging.root.manager.disable
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(without_other_bars())
        stack.enter_context(mock.patch.dict("os.environ", {"DISABLE_MULTIPROC": "1"}))  # no fork of a torch process
        stack.callback(logging.disable, level)
        logging.disable(logging.CRITICAL)
        yield

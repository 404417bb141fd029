"""Runs a comparison: every row is a copy of the model, compiled and measured; finished results are kept."""

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton.comparison.methods import DENSE, Row
from permtriton.comparison.results import Measured, ResultFile, RowResult
from permtriton.config import ROUNDING_ONLY, CalibrationConfig
from permtriton.data.samples import Inputs, Samples
from permtriton.data.text import calibration_samples, check_samples
from permtriton.driver.identity import run_identity, text_hash
from permtriton.driver.options import CompileConfig
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ConfigError
from permtriton.evaluation.evaluate import measure_model
from permtriton.evaluation.measures import DISTANCES
from permtriton.util import machine
from permtriton.util.progress import NoProgress, Progress

if TYPE_CHECKING:  # it imports lm_eval, which takes seconds
    from permtriton.evaluation.tasks import Tasks

# None where the dense model writes all text itself, while it is compiled.
Draws = Mapping[tuple[CalibrationConfig, int, int], Samples | None]  # by source, surplus and seed


@dataclass(frozen=True)
class Benchmark:
    """What every model of a comparison is measured by.

    Attributes:
        dense: dense model.
        tokenizer: its tokenizer, which calibration texts and tasks need.
        windows: held-out samples: token ids, int64 ``[windows, tokens]``, or what else the model reads.
        tasks: zero-shot tasks, or None.
    """

    dense: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    windows: Inputs
    tasks: "Tasks | None" = None

    def identity(self, tasks: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what decides every result of a comparison.

        Args:
            tasks: what decides the scores of the tasks; empty without tasks.
        """
        present = run_identity(self.dense, self.dense.device)
        return {
            "held-out text": Samples.of(self.windows).sha256,
            "tasks": dict(tasks),
            "model weights": present["weights"],
            "version of": present["versions"],
            "machine": present["machine"],
        }

    def measured(
        self,
        model: PreTrainedModel,
        hidden_order: Tensor | None,
        progress: Progress,
        compile_seconds: float = 0.0,
        peak_bytes: int | None = None,
    ) -> Measured:
        """Measures a model.

        Args:
            model: the dense model, or a compiled copy of it.
            hidden_order: index ``[C]`` of the last hidden state's channels; None where they did not move.
            peak_bytes: peak memory during the compilation, if known.
        """
        evaluation = measure_model(
            model,
            self.tokenizer,
            held_out=self.windows,
            dense=self.dense,
            hidden_order=hidden_order,
            tasks=self.tasks,
            progress=progress,
        )
        scores = {
            f"{task.name} {metric}": score.value for task in evaluation.tasks for metric, score in task.scores.items()
        }
        accuracies = [task.scores["acc"].value for task in evaluation.tasks if "acc" in task.scores and not task.group]
        known = [each for each in accuracies if each is not None]
        seconds = compile_seconds + evaluation.seconds
        return Measured(
            perplexity=evaluation.perplexity,
            **{name: getattr(evaluation, name) for name in DISTANCES},
            tasks=scores,
            accuracy=fmean(known) if 1 < len(known) == len(accuracies) else None,
            seconds=seconds,
            compile_seconds=compile_seconds,
            peak_bytes=peak_bytes,
        )


def compare(
    benchmark: Benchmark,
    rows: Sequence[Row],
    *,
    ids: Inputs | None = None,
    seeds: Sequence[int] = (0,),
    kept: ResultFile | None = None,
    progress: Progress | None = None,
    finished: Callable[[RowResult], None] = lambda result: None,
) -> list[RowResult]:
    """Prunes a copy of the dense model for each row and seed; the model itself stays dense.

    Args:
        benchmark: dense model, and what all models are measured by.
        rows: what to compile, see `permtriton.comparison.methods`.
        ids: calibration samples as `permtriton.compile` takes them, in place of the calibration text of each row.
        seeds: seeds of the calibration draw and of learning, at least one. All rows with one calibration text share the
            sequences that a seed draws.
        kept: results of an earlier run, which are not measured again; takes each new one as soon as it is known.
        finished: function called with each row's result as soon as it is known.

    Returns:
        The dense model's result, then one result per row.

    Raises:
        ConfigError: there is no seed.
        PermTritonError: a text cannot be read, a compilation or an evaluation fails, or `kept` cannot be used.
    """
    if not seeds:
        raise ConfigError("no seed: give at least one")
    kept, progress = kept or ResultFile(None, {}), progress or NoProgress()
    draws = _draws(benchmark, rows, seeds, ids)

    def key_of(row: Row, seed: int) -> str:
        drawn = draws[_drawn_by(row.config, seed)]
        options = {name: value for name, value in row.options.items() if name not in ROUNDING_ONLY}
        text = None if drawn is None else text_hash(row.config, drawn)
        return kept.key(seed=seed, text=text, options=options)

    keys = {row: [key_of(row, seed) for seed in seeds] for row in rows}
    wanted = [kept.key(), *chain(*keys.values())]
    if kept.results:
        known = sum(key in kept.results for key in wanted)
        progress.say(f"{known} of {len(wanted)} results (a row with one seed each) are kept in {kept.path}")
    dense = kept.results.get(kept.key()) or kept.put(kept.key(), benchmark.measured(benchmark.dense, None, progress))
    results = [RowResult(DENSE, "", "", (dense,))]
    finished(results[0])
    for row in rows:
        by_seed = []
        for seed, key in zip(seeds, keys[row], strict=True):
            config = dataclasses.replace(row.config, seed=seed)
            drawn = draws[_drawn_by(row.config, seed)]
            by_seed.append(kept.results.get(key) or kept.put(key, _compiled(benchmark, config, drawn, progress)))
        results.append(RowResult(row.method, row.pattern, row.setting, tuple(by_seed), row.options))
        finished(results[-1])
    return results


def _draws(benchmark: Benchmark, rows: Sequence[Row], seeds: Sequence[int], ids: Inputs | None) -> Draws:
    """Returns the calibration samples of each text and seed.

    All are drawn before the first compilation, so that a text that cannot be read costs no work.
    """
    model = benchmark.dense
    given = None if ids is None else check_samples(model, ids)
    draws: dict[tuple[CalibrationConfig, int, int], Samples] = {}
    for row in rows:
        for seed in seeds:
            key = _drawn_by(row.config, seed)
            if key not in draws:
                config = dataclasses.replace(row.config, seed=seed)
                draws[key] = given or calibration_samples(config, benchmark.tokenizer, model)
    return draws


def _drawn_by(config: CompileConfig, seed: int) -> tuple[CalibrationConfig, int, int]:
    """Returns what decides a draw."""
    return config.calibration, config.surplus, seed


def _compiled(benchmark: Benchmark, config: CompileConfig, samples: Samples | None, progress: Progress) -> Measured:
    """Compiles a copy of the dense model on calibration samples, and measures it."""
    device = benchmark.dense.device
    started, counted = time.perf_counter(), machine.reset_peak_memory(device)
    model = copy.deepcopy(benchmark.dense)
    compiled = compile_model(model, benchmark.tokenizer, config, ids=samples, progress=progress)
    seconds, peak = time.perf_counter() - started, machine.peak_memory(device) if counted else None
    order = compiled.plan.hidden_order(compiled.indices)
    return benchmark.measured(compiled.model, order, progress, seconds, peak)

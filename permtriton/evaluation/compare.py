"""``permtriton compare``: each row is a copy of the model, compiled and measured with each seed; results are saved."""

import copy
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton.arguments import CompareArgs, Words
from permtriton.checkpoint.output import locked
from permtriton.config import ROUNDING_ONLY, CalibrationConfig
from permtriton.data.calibration import calibration_samples, fitted
from permtriton.data.held_out import prepared, read_held_out
from permtriton.data.in_memory import is_named, selected
from permtriton.data.media import is_media
from permtriton.data.samples import Samples
from permtriton.driver.identity import run_identity, text_hash
from permtriton.driver.pipeline import compile_model
from permtriton.errors import CalibrationError, ConfigError, OutputError
from permtriton.evaluation.compare_methods import Method, RowConfig, check_effect, row_configs
from permtriton.evaluation.compare_results import Measured, Options, ResultFile, Row
from permtriton.evaluation.evaluate import measure_model
from permtriton.evaluation.measures import DISTANCES
from permtriton.methods.recipe_config import CompileConfig
from permtriton.model import load
from permtriton.model.source import Source
from permtriton.recipe import config_from, overrides_of
from permtriton.util import machine
from permtriton.util.output_files import check_report_file, problem_of, real_path, write_report_file
from permtriton.util.progress import Progress
from permtriton.util.sparsity import NMPattern

if TYPE_CHECKING:  # it imports lm_eval, which takes seconds
    from permtriton.evaluation.tasks import Tasks

REPORT_KEYS = ("measure", "patterns", "rows", "versions")


@dataclass(frozen=True)
class Comparison:
    """What to compare, as the user wrote it."""

    source: Source  # the dense model
    options: Mapping[str, Any]  # options by name, those of a file and of a protocol included
    given: Mapping[str, Any]  # those of ``options`` that the user gave, by name
    patterns: Sequence[str]  # patterns to compare; empty for the one of ``options``
    args: CompareArgs  # everything else, the values of its protocol included
    calibration: CalibrationConfig  # options of the samples, which all rows share

    @classmethod
    def of(cls, model: str, args: CompareArgs, given: dict[str, Any]) -> "Comparison":
        """Returns the comparison for a model's name, the arguments, and the options that the user gave, by name."""
        patterns = _parts(args.sparsity, "sparsity")
        if len(patterns) == 1:  # a single pattern is an ordinary option
            given["sparsity"] = patterns[0]
        options = overrides_of(given, args.config, args.protocol, model)
        if "recipe" in options:
            raise ConfigError(f"config file {args.config} names a recipe: leave it out, and name it in `methods=`")
        if "seed" in options and "seed" not in given:
            raise ConfigError(f"config file {args.config} has a seed: leave it out, and give `seeds=`")
        calibration = config_from(options, model=model).calibration
        several = patterns if len(patterns) > 1 else []
        args = replace(args, eval_data=selected(args.eval_data)).with_protocol(model)
        return cls(Source(model, **args.loading), options, given, several, args, calibration)

    def row_configs(self) -> list[RowConfig]:
        if (self.args.values is None) != (self.args.ablate is None):
            raise ConfigError("`ablate=` names an option, and `values=` its values: give both, or neither")
        if self.patterns and "pattern" in self.given:
            raise ConfigError("`pattern=` needs one `sparsity=` for the other linears: name one, or drop `pattern=`")
        methods, values = _methods(self.args.methods), _parts(self.args.values, "values")
        patterns = [NMPattern.parse(pattern) for pattern in self.patterns]
        rows = row_configs(dict(self.options), methods, patterns, self.ablation, values, self.source.name)
        check_effect(dict(self.given), rows, self.ablation)
        return rows

    @property
    def ablation(self) -> str | None:
        """Name of the option whose ``values`` are compared; None or empty without an ablation."""
        return self.args.ablate and self.args.ablate.replace("-", "_")

    def seeds(self) -> list[int]:
        seeds = str(self.args.seeds) if isinstance(self.args.seeds, int) else self.args.seeds
        try:
            numbers = [int(part) for part in _parts(seeds, "seeds")]
            if min(numbers) >= 0:
                return list(dict.fromkeys(numbers))
            raise ValueError
        except ValueError:
            raise ConfigError(
                f"seeds {seeds!r}: expected non-negative integers separated by commas, such as 0,1,2"
            ) from None

    @property
    def place(self) -> Path:
        """File that keeps finished results: beside the output, or without one in the current folder."""
        first = real_path(Path(self.args.output)) if self.args.output else Path(self._stem)
        return first.with_name(f".{first.name}.rows.json")

    @property
    def _stem(self) -> str:
        return f"compare-{real_path(Path(self.source.name)).name}"

    def run(
        self,
        progress: Progress,
        finished: Callable[[Row], None] = lambda row: None,
        show: Callable[[dict[str, Any]], None] = lambda report: None,
    ) -> dict[str, Any]:
        """Compares the rows, and writes the output.

        Args:
            finished: called with each row as soon as it is complete.
            show: called with the report; without an output, the file of finished results is deleted only after that.
        """
        seeds, args, tasks = self.seeds(), self.args, self.args.task_request
        self.row_configs()  # a wrong name is found before the model is loaded
        named = [self.source.name, self.options.get("calibration"), tasks.folder, args.eval_data]
        output = None if args.output is None else Path(args.output)
        if output is not None:
            reads = [name for name in named if is_named(name) and name]
            check_report_file(output, REPORT_KEYS, overwrite=args.overwrite, reads=reads)
        with self._claimed(progress):
            loaded = tasks.load(progress)
            progress.say(f"loading {self.source.described}")
            with progress.stage("load", 0):
                model, tokenizer = load.load_original(self.source, progress=progress)
            held_out, text = read_held_out(
                self.source.name, args.eval_data, tokenizer, model, args.window, args.eval_windows,
                self.calibration.special_tokens, progress,
            )  # fmt: skip
            if held_out is None:
                raise CalibrationError(f"nothing to compare on: {text}")
            samples = prepared(model, held_out)
            benchmark = Benchmark(model, tokenizer, samples, loaded)
            with progress.stage("identify", 0):
                kept = ResultFile(self.place, benchmark.identity(tasks.identity(output)))
            if not args.overwrite:
                kept.read()
            rows = compare(benchmark, self._fitted(model, progress).row_configs(), seeds, kept, progress, finished)
            report = {
                "model": self.source.name,
                "measure": "cosine" if rows[0].by_seed[0]["perplexity"] is None else "perplexity",
                "text": text,
                "media": is_media(model, text),
                "tokens": samples.positions,
                "window": samples.tokens,
                **({} if samples.special is None else {"special_tokens": samples.special.words}),
                "seeds": seeds,
                "patterns": list(dict.fromkeys(row.pattern for row in rows if row.pattern)),
                "ablation": self.ablation,
                "config": _shared([row.config for row in rows[1:]]),
                "versions": tasks.versions(),
                "device": machine.device_name(model.device),
                "system": platform.platform(),
                "rows": [row.to_dict() for row in rows],
            }
            if output is not None:
                write_report_file(output, report)
            show(report)
            if output is None:
                self.place.unlink(missing_ok=True)
        return report

    def _fitted(self, model: PreTrainedModel, progress: Progress) -> "Comparison":
        """Returns the comparison, with the default sequence length lowered to what the model can take."""
        length = fitted(self.calibration, self.options, model, progress).sequence_length
        unchanged = length == self.calibration.sequence_length
        return self if unchanged else replace(self, options={**self.options, "sequence_length": length})

    @contextmanager
    def _claimed(self, progress: Progress) -> Iterator[None]:
        """Locks the output against other comparisons inside the ``with`` block."""
        folder = real_path(self.place).parent
        if problem := problem_of(folder):
            raise OutputError(
                f"the folder {folder}, where finished results are kept, cannot be written: {problem}; run in another "
                "folder, or give `output=` a file in another one"
            )
        with locked(real_path(Path(self.args.output or self._stem)), progress.say):
            yield


@dataclass(frozen=True)
class Benchmark:
    """The dense model, the held-out samples and the tasks by which every model of a comparison is measured."""

    dense: PreTrainedModel  # dense model
    tokenizer: PreTrainedTokenizerBase | None  # its tokenizer, which calibration texts and tasks need
    held_out: Samples  # held-out samples, as `permtriton.data.held_out.prepared` returns them
    tasks: "Tasks | None" = None  # zero-shot tasks, or None

    def identity(self, tasks: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the inputs that decide every result of a comparison, as JSON values; ``tasks`` are part of them."""
        present = run_identity(self.dense, self.dense.device)
        return {
            "held-out text": self.held_out.sha256,
            "tasks": dict(tasks),
            "model weights": present["weights"],
            "version of": present["versions"],
            "machine": present["machine"],
        }

    def compiled(self, config: CompileConfig, samples: Samples, progress: Progress) -> Measured:
        """Compiles a copy of the dense model on calibration samples, and measures it."""
        device = self.dense.device
        started, counted = time.perf_counter(), machine.reset_peak_memory(device)
        compiled = compile_model(copy.deepcopy(self.dense), self.tokenizer, config, ids=samples, progress=progress)
        seconds, peak = time.perf_counter() - started, machine.peak_memory(device) if counted else None
        order = compiled.plan.hidden_order(compiled.indices)
        return self.measured(compiled.model, order, progress, seconds, peak)

    def measured(
        self,
        model: PreTrainedModel,
        hidden_order: Tensor | None,
        progress: Progress,
        compile_seconds: float = 0.0,
        peak_bytes: int | None = None,
    ) -> Measured:
        """Measures the dense model, or a compiled copy of it.

        Args:
            hidden_order: index ``[C]`` of the last hidden state's channels; None where they did not move.
        """
        evaluated = measure_model(
            model,
            self.tokenizer,
            held_out=self.held_out,
            dense=self.dense,
            hidden_order=hidden_order,
            tasks=self.tasks,
            progress=progress,
        )
        accuracies = [task.scores["acc"].value for task in evaluated.tasks if "acc" in task.scores and not task.group]
        known = [value for value in accuracies if value is not None]
        return Measured(
            perplexity=evaluated.perplexity,
            **{name: getattr(evaluated, name) for name in DISTANCES},
            tasks=evaluated.task_scores,
            accuracy=fmean(known) if 1 < len(known) == len(accuracies) else None,
            seconds=compile_seconds + evaluated.seconds,
            compile_seconds=compile_seconds,
            peak_bytes=peak_bytes,
        )


def compare(
    benchmark: Benchmark,
    rows: Sequence[RowConfig],
    seeds: Sequence[int],
    kept: ResultFile,
    progress: Progress,
    finished: Callable[[Row], None],
) -> list[Row]:
    """Prunes a copy of the dense model for each row and seed; the model itself stays dense.

    Args:
        seeds: seeds of the calibration draw and of learning, at least one. All rows with one calibration text share the
            sequences that a seed draws.
        kept: results of an earlier run, which are not measured again; each new result is added and saved at once.
        finished: called with each row as soon as it is complete.
    Returns:
        The dense model's row, then one for each of ``rows``.
    """
    draws: dict[Any, Samples] = {}

    def run_of(row: RowConfig, seed: int) -> tuple[str, Callable[[], Measured]]:
        config = replace(row.config, seed=seed)
        drawn_by = config.calibration, config.surplus, seed
        if drawn_by not in draws:
            draws[drawn_by], _ = calibration_samples(config, benchmark.tokenizer, benchmark.dense)
        samples = draws[drawn_by]
        options = {name: value for name, value in row.options.items() if name not in ROUNDING_ONLY}
        key = kept.key(seed=seed, text=text_hash(config, samples), options=options)
        return key, partial(benchmark.compiled, config, samples, progress)

    # All texts are read before the first compilation, so that one that cannot be read costs no work.
    runs = {row: [run_of(row, seed) for seed in seeds] for row in rows}
    if kept.results:
        keys = [kept.key(), *(key for row_runs in runs.values() for key, _ in row_runs)]
        known = sum(key in kept.results for key in keys)
        progress.say(f"{known} of {len(keys)} results (a row with one seed each) are kept in {kept.path}")
    dense = kept.get(kept.key(), partial(benchmark.measured, benchmark.dense, None, progress))
    results = [Row.of(None, [dense])]
    finished(results[0])
    for row, row_runs in runs.items():
        results.append(Row.of(row, [kept.get(key, compiled) for key, compiled in row_runs]))
        finished(results[-1])
    return results


def _shared(configs: Sequence[Options]) -> Options:
    first, *others = configs
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _methods(words: Words) -> list[Method]:
    """Returns the methods: names, separated as by `_parts`, and lists of steps unchanged."""
    if words is None or isinstance(words, str):
        return list(_parts(words, "methods"))
    return [part for method in words for part in (_parts(method, "methods") if isinstance(method, str) else [method])]


def _parts(words: Words, name: str = "") -> list[str]:
    """Returns the words of a list, or of a text that separates them by commas; refuses an empty word."""
    if words is None:
        return []
    several = words.split(",") if isinstance(words, str) else words if isinstance(words, Iterable) else [words]
    parts = [str(part).strip() for part in several]
    if "" in parts:
        raise ConfigError(f"`{name}=` {words!r} has an empty name: separate names by commas, or leave `{name}=` out")
    return parts

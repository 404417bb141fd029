"""``permtriton compare``: each row is a copy of the model, compiled and measured with each seed; results are saved."""

import copy
import hashlib
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton.arguments import CompareArgs
from permtriton.checkpoint.folder import file_sha256
from permtriton.checkpoint.output import locked
from permtriton.config import ROUNDING_ONLY
from permtriton.data.calibration import calibration_samples, fitted
from permtriton.data.held_out import prepared, read_held_out
from permtriton.data.in_memory import selected
from permtriton.data.media import is_media
from permtriton.data.samples import Samples
from permtriton.driver.deciding_inputs import text_hash
from permtriton.driver.pipeline import compile_model
from permtriton.errors import CalibrationError, ConfigError
from permtriton.evaluation.compare_methods import DENSE_ENTRIES, RowConfig, check_effect, row_configs
from permtriton.evaluation.compare_results import Measured, ResultFile, measure_of, row_name, row_of
from permtriton.evaluation.evaluate import load_tasks, measure_model, versions
from permtriton.evaluation.measures import DISTANCES
from permtriton.methods.recipe_config import CompileConfig
from permtriton.model import load
from permtriton.model.checks import model_hash
from permtriton.model.source import Source
from permtriton.recipe import config_from, overrides_of
from permtriton.util import machine
from permtriton.util.output_files import check_report_file, real_path, write_report_file
from permtriton.util.progress import Progress
from permtriton.util.sparsity import NMPattern

if TYPE_CHECKING:  # the import of lm_eval takes seconds
    from permtriton.evaluation.tasks import Tasks

REPORT_KEYS = ("measure", "patterns", "rows", "versions")


def compare(model: str, args: CompareArgs, user_options: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Prunes a copy of the model for each row and seed, measures each, and returns and writes the report.

    Args:
        model: name of the dense model.
        user_options: options of a compilation that the user set, by name.
    """
    source, seeds = Source(model, **args.loading), _seeds(args.seeds)
    args = replace(args, ablate=args.ablate and args.ablate.replace("-", "_"))
    # `_rows` reads the options of the protocol, so it runs before `with_protocol`, which removes the protocol.
    options, rows_with = _rows(model, args, user_options)
    args = replace(args, eval_data=selected(args.eval_data)).with_protocol(model)
    target = None
    if args.output is not None:
        check_report_file(Path(args.output), REPORT_KEYS, overwrite=args.overwrite)
        target = real_path(Path(args.output))
    with nullcontext() if target is None else locked(target, progress.say):
        tasks = load_tasks(args, progress)
        dense, tokenizer = load.load_original(source, progress=progress)
        calibration = config_from(options, model=model).calibration
        held_out, text = read_held_out(
            model, args.eval_data, tokenizer, dense, args.window, args.eval_windows, calibration.special_tokens,
            progress,
        )  # fmt: skip
        if held_out is None:
            raise CalibrationError(f"nothing to compare on: {text}")
        samples = prepared(dense, held_out)
        benchmark = Benchmark(dense, tokenizer, samples, tasks, progress)
        with progress.stage("identify", 0):
            kept = ResultFile(target and target.with_name(f".{target.name}.rows.json"), benchmark.identity(args))
        if not args.overwrite:
            kept.read()
        length = fitted(calibration, options, dense, progress).sequence_length
        rows = _results(benchmark, rows_with({**options, "sequence_length": length}), seeds, kept)
        first, *others = (row["config"] for row in rows[1:])
        report = {
            "model": model,
            "measure": measure_of(rows[0]),
            "text": text,
            "media": is_media(dense, text),
            "tokens": samples.positions,
            "window": samples.tokens,
            **({} if samples.special is None else {"special_tokens": samples.special.words}),
            "seeds": seeds,
            "patterns": list(dict.fromkeys(row["pattern"] for row in rows[1:])),
            "ablation": args.ablate,
            "config": {name: value for name, value in first.items() if all(o.get(name) == value for o in others)},
            "versions": versions(args),
            "device": machine.device_name(dense.device),
            "system": platform.platform(),
            "rows": rows,
        }
        if target is not None:
            write_report_file(target, report)
    return report


def _rows(
    model: str, args: CompareArgs, user_options: Mapping[str, Any]
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], list[RowConfig]]]:
    """Returns the options that all rows share (user's, file's, protocol's), and a function from options to rows."""
    patterns = [NMPattern.parse(str(pattern)) for pattern in _parts(args.sparsity, "sparsity")]
    if len(patterns) == 1:  # a single pattern is an ordinary option
        user_options, patterns = {**user_options, "sparsity": patterns[0]}, []
    if patterns and "pattern" in user_options:
        raise ConfigError("`pattern=` needs one `sparsity=` for the other linears: name one, or drop `pattern=`")
    if (args.values is None) != (args.ablate is None):
        raise ConfigError("`ablate=` names an option, and `values=` its values: give both, or neither")
    options = overrides_of(user_options, args.config, args.protocol, model)
    if "recipe" in options:
        raise ConfigError(f"config file {args.config} names a recipe: leave it out, and name it in `methods=`")
    if "seed" in options and "seed" not in user_options:
        raise ConfigError(f"config file {args.config} has a seed: leave it out, and give `seeds=`")
    methods, values = _parts(args.methods, "methods"), _parts(args.values, "values")

    def rows_with(options: Mapping[str, Any]) -> list[RowConfig]:
        return row_configs(options, methods, patterns, args.ablate, values, model)

    check_effect(user_options, rows_with(options), args.ablate)
    return options, rows_with


def _seeds(words: Any) -> list[int]:
    seeds = [str(seed) for seed in _parts(words, "seeds")]
    if not seeds or not all(map(str.isdecimal, seeds)):
        raise ConfigError(f"seeds {words!r}: expected non-negative integers separated by commas, such as 0,1,2")
    return list(dict.fromkeys(map(int, seeds)))


def _parts(words: Any, name: str) -> list[Any]:
    """Returns the items of a list, or the words of a string, which commas separate; refuses an empty word."""
    parts = words.split(",") if isinstance(words, str) else words
    parts = [] if parts is None else list(parts) if isinstance(parts, Iterable) else [parts]
    parts = [part.strip() if isinstance(part, str) else part for part in parts]
    if "" in parts:
        raise ConfigError(f"`{name}=` {words!r} has an empty name: separate names by commas, or leave `{name}=` out")
    return parts


@dataclass(frozen=True)
class Benchmark:
    """The dense model, of which each row compiles a copy, and the samples and tasks that measure every model."""

    dense: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None  # which calibration texts and tasks need
    held_out: Samples  # as `permtriton.data.held_out.prepared` returns them
    tasks: "Tasks | None"
    progress: Progress

    def identity(self, args: CompareArgs) -> dict[str, Any]:
        """Returns the inputs that decide every result, as JSON values."""
        return {
            "weights": model_hash(self.dense),
            "machine": machine.device_name(self.dense.device),
            "versions": versions(args),
            "held-out text": self.held_out.sha256,
            "tasks": [args.task_names, args.limit, args.tasks_dir and _files_hash(Path(args.tasks_dir))],
        }

    def measured(self, config: CompileConfig | None = None, samples: Samples | None = None) -> Measured:
        """Measures a copy of the dense model, compiled on ``samples``; without a ``config``, the dense model itself."""
        model, order, seconds = self.dense, None, 0.0
        if config is not None:
            started = time.perf_counter()
            compiled = compile_model(copy.deepcopy(model), self.tokenizer, config, ids=samples, progress=self.progress)
            seconds = time.perf_counter() - started
            model, order = compiled.model, compiled.plan.hidden_order(compiled.indices)
        evaluated = measure_model(
            model,
            self.tokenizer,
            held_out=self.held_out,
            dense=self.dense,
            hidden_order=order,
            tasks=self.tasks,
            progress=self.progress,
        )
        accuracies = [task.scores["acc"].value for task in evaluated.tasks if "acc" in task.scores and not task.group]
        known = [value for value in accuracies if value is not None]
        return Measured(
            perplexity=evaluated.perplexity,
            **{name: getattr(evaluated, name) for name in DISTANCES},
            tasks=evaluated.task_scores,
            accuracy=fmean(known) if 1 < len(known) == len(accuracies) else None,
            seconds=seconds + evaluated.seconds,
            compile_seconds=seconds,
        )


def _files_hash(folder: Path) -> str:
    """Returns a hash of the files in a folder of tasks, without hidden ones, such as the results that are kept."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            digest.update(file_sha256(path).encode())
    return digest.hexdigest()


def _results(
    benchmark: Benchmark, configs: Sequence[RowConfig], seeds: Sequence[int], kept: ResultFile
) -> list[dict[str, Any]]:
    """Measures the dense model, and every row with every seed; takes known results from ``kept``, and adds new ones.

    All rows with the same calibration text share the sequences that a seed draws.
    """
    draws: dict[Any, Samples] = {}
    runs: list[tuple[dict[str, Any], dict[str, Callable[[], Measured]]]]
    runs = [(DENSE_ENTRIES, {kept.key(): benchmark.measured})]
    # All texts are read before the first compilation, so that an unreadable text costs no work.
    for row_config in configs:
        entries, measures = row_config.entries, dict[str, Callable[[], Measured]]()
        options = {name: value for name, value in entries["config"].items() if name not in ROUNDING_ONLY}
        for seed in seeds:
            config = replace(row_config.config, seed=seed)
            drawn_by = config.calibration, config.surplus, seed
            if drawn_by not in draws:
                draws[drawn_by], _ = calibration_samples(config, benchmark.tokenizer, benchmark.dense)
            samples = draws[drawn_by]
            key = kept.key(seed=seed, text=text_hash(samples), options=options)
            measures[key] = partial(benchmark.measured, config, samples)
        runs.append((entries, measures))
    say = benchmark.progress.say
    if kept.results:
        keys = [key for _, measures in runs for key in measures]
        known = sum(key in kept.results for key in keys)
        say(f"{known} of {len(keys)} results (a row with one seed each) are kept in {kept.path}")
    rows = []
    for entries, measures in runs:
        rows.append(row_of(entries, [kept.get(key, measure) for key, measure in measures.items()]))
        mean = f"{measure_of(rows[-1])} {rows[-1]['mean']:.3f}"
        say(f"{row_name(rows[-1])}: {mean} ({rows[-1]['seconds']:.0f} s)")
    return rows

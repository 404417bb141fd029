"""What was asked of a comparison, by a command or a call, and how is it run?"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from permtriton.checkpoint.output import locked
from permtriton.comparison.asked import AskedComparison, Words
from permtriton.comparison.methods import Method, Row, ablation_rows, check_effect, method_rows
from permtriton.comparison.report_file import check_report_file, write_report_file
from permtriton.comparison.results import ResultFile, RowResult
from permtriton.comparison.run import Benchmark, compare
from permtriton.comparison.summary import report_of
from permtriton.config import CalibrationConfig
from permtriton.data.held_out import read_held_out
from permtriton.data.in_memory import is_named, selected
from permtriton.data.text import check_inputs, fitted, line_of_ids_without
from permtriton.errors import CalibrationError, ConfigError, OutputError
from permtriton.model import load
from permtriton.model.seq2seq import with_decoder_ids
from permtriton.model.source import Source
from permtriton.recipe import config_from, given_by, resolved
from permtriton.util.output_files import problem_of, real_path
from permtriton.util.progress import Progress
from permtriton.util.sparsity import NMPattern

REPORT_KEYS = ("measure", "patterns", "rows", "versions")


@dataclass(frozen=True)
class Request:
    """What to compare, as the user wrote it.

    Attributes:
        source: the dense model.
        options: options by name, those of a file and of a protocol included.
        given: names of those that the user gave.
        patterns: patterns of the rows; none for that of the options.
        asked: everything else, what its protocol says included.
    """

    source: Source
    options: Mapping[str, Any]
    given: Mapping[str, Any]
    patterns: Sequence[str]
    asked: AskedComparison

    @classmethod
    def of(cls, model: str, asked: AskedComparison, given: dict[str, Any]) -> "Request":
        """Returns the request of a model's name, what was asked, and the options that were given.

        Raises:
            ConfigError: an unknown option, a bad value, or a file that names a recipe.
        """
        patterns = _parts(asked.sparsity, "sparsity")
        if len(patterns) == 1:  # an option as any other
            given["sparsity"] = patterns[0]
        options = given_by(asked.config, given, asked.protocol, model)
        if "recipe" in options:
            raise ConfigError(f"config file {asked.config} names a recipe: leave it out, and name it in `methods=`")
        if "seed" in options and "seed" not in given:
            raise ConfigError(f"config file {asked.config} has a seed: leave it out, and give `seeds=`")
        config_from(options, model=model)
        several = patterns if len(patterns) > 1 else []
        asked = replace(asked, eval_data=selected(asked.eval_data)).settled(model)
        return cls(Source(model, **asked.loading), options, given, several, asked)

    def rows(self) -> list[Row]:
        """Returns the rows to run.

        Raises:
            ConfigError: a name or a value is unknown, or an option has no effect.
        """
        if (self.asked.values is None) != (self.asked.ablate is None):
            raise ConfigError("`ablate=` names an option, and `values=` its values: give both, or neither")
        if self.patterns and "pattern" in self.given:
            raise ConfigError("`pattern=` needs one `sparsity=` for the other linears: name one, or drop `pattern=`")
        methods, values = _methods(self.asked.methods), _parts(self.asked.values, "values")
        patterns = [NMPattern.parse(each) for each in self.patterns]
        options, model = dict(self.options), self.source.name
        if self.ablation is None:
            rows = method_rows(options, methods, patterns, model)
        else:
            rows = ablation_rows(options, self.ablation, values, methods, patterns, model)
        check_effect(dict(self.given), rows, self.ablation)
        return rows

    @property
    def ablation(self) -> str | None:
        """Name of the option that has several values."""
        return self.asked.ablate and self.asked.ablate.replace("-", "_")

    def numbers(self) -> list[int]:
        """Returns the seeds.

        Raises:
            ConfigError: they are not non-negative integers.
        """
        seeds = str(self.asked.seeds) if isinstance(self.asked.seeds, int) else self.asked.seeds
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
        """File that keeps finished results: beside the output, else in the present folder."""
        first = real_path(Path(self.asked.output)) if self.asked.output else Path(self._stem)
        return first.with_name(f".{first.name}.rows.json")

    @property
    def _stem(self) -> str:
        return f"compare-{real_path(Path(self.source.name)).name}"

    def run(
        self,
        progress: Progress,
        finished: Callable[[RowResult], None] = lambda result: None,
        show: Callable[[dict[str, Any]], None] = lambda report: None,
    ) -> dict[str, Any]:
        """Compares the rows, and writes the output.

        Args:
            finished: function called with each row's result as soon as it is known.
            show: function called with the report; where there is no output, the kept results go only after it.

        Returns:
            The report, as `report_of` makes it.

        Raises:
            PermTritonError: as `permtriton.comparison.run.compare`, a request that makes no sense, no held-out text, or
                an output that cannot be written.
        """
        seeds, asked, tasks = self.numbers(), self.asked, self.asked.wanted_tasks
        self.rows()  # a wrong name is found before the model is loaded
        named = [self.source.name, self.options.get("calibration"), tasks.folder, asked.eval_data]
        reads = [each for each in named if is_named(each) and each]
        output = None if asked.output is None else Path(asked.output)
        if output is not None:
            check_report_file(output, REPORT_KEYS, overwrite=asked.overwrite, reads=reads)
        with self._claimed(progress):
            loaded = tasks.load(progress)
            progress.say(f"loading {self.source.described}")
            with progress.stage("load", 0):
                model, tokenizer = load.load_original(self.source, progress=progress)
            windows, text = read_held_out(
                self.source.name, asked.eval_data, tokenizer, model, asked.window, asked.eval_windows,
                self._special_tokens,
            )  # fmt: skip
            if line := line_of_ids_without(windows, tokenizer):
                progress.say(line)
            if windows is None:
                raise CalibrationError(f"nothing to compare on: {text}")
            benchmark = Benchmark(model, tokenizer, with_decoder_ids(model, check_inputs(model, windows)), loaded)
            request = self._fitted(model, progress)
            with progress.stage("identify", 0):
                kept = ResultFile(self.place, benchmark.identity(tasks.identity(output)))
            if not asked.overwrite:
                kept.read()
            report = report_of(
                compare(benchmark, request.rows(), seeds=seeds, kept=kept, progress=progress, finished=finished),
                benchmark,
                model=self.source.name,
                text=text,
                seeds=seeds,
                ablation=self.ablation,
                versions=tasks.versions(),
            )
            if output is not None:
                write_report_file(output, report)
            show(report)
            if output is None:
                self.place.unlink(missing_ok=True)
        return report

    @property
    def _special_tokens(self) -> str:
        """What stands around the windows, which all rows share."""
        return str(resolved(self.options, self.source.name)["special_tokens"])

    def _fitted(self, model: PreTrainedModel, progress: Progress) -> "Request":
        """Returns the request, with a sequence length that nobody asked for lowered to what the model can take."""
        length = resolved(self.options, self.source.name)["sequence_length"]
        usable = fitted(CalibrationConfig(sequence_length=length), self.options, model, progress).sequence_length
        return self if usable == length else replace(self, options={**self.options, "sequence_length": usable})

    @contextmanager
    def _claimed(self, progress: Progress) -> Iterator[None]:
        """Keeps other comparisons from the same output inside the ``with`` block.

        Raises:
            OutputError: another process writes it, or the folder cannot be written.
        """
        folder = real_path(self.place).parent
        if problem := problem_of(folder):
            raise OutputError(
                f"the folder {folder}, where finished results are kept, cannot be written: {problem}; run in another "
                "folder, or give `output=` a file in another one"
            )
        with locked(real_path(Path(self.asked.output or self._stem)), progress.say):
            yield


def _methods(words: Words) -> list[Method]:
    """Returns the methods: names, as `_parts`, and lists of steps."""
    if words is None or isinstance(words, str):
        return list(_parts(words, "methods"))
    return [part for each in words for part in (_parts(each, "methods") if isinstance(each, str) else [each])]


def _parts(words: Words, name: str = "") -> list[str]:
    """Returns what stands between commas, or in a list.

    Raises:
        ConfigError: a part is empty; the error has the option's ``name``.
    """
    if words is None:
        return []
    several = words.split(",") if isinstance(words, str) else words if isinstance(words, Iterable) else [words]
    parts = [str(part).strip() for part in several]
    if "" in parts:
        raise ConfigError(f"`{name}=` {words!r} has an empty name: separate names by commas, or leave `{name}=` out")
    return parts

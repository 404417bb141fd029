"""Comparisons: rows as data, one calibration set for all, results that are kept, ablations that differ."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from permtriton.comparison import run as comparison
from permtriton.comparison.methods import METHODS, ablation_rows, check_effect, method_rows
from permtriton.comparison.results import ResultFile
from permtriton.comparison.run import Benchmark, compare
from permtriton.comparison.summary import columns, report_of
from permtriton.data.samples import Samples
from permtriton.errors import ConfigError, OutputError
from permtriton.methods.prune.refit import Refit
from permtriton.recipe import RECIPES
from permtriton.util.progress import NoProgress
from permtriton.util.sparsity import NMPattern

from . import zoo

PATTERNS = (NMPattern(2, 4), NMPattern(4, 8))
IDS, WINDOWS = zoo.tiny_ids(4, 16), zoo.tiny_ids(3, 12, seed=1)
TIMES = ("seconds", "compile_seconds", "peak_bytes")
SMALL = {"samples": 4, "sequence_length": 16, "learn_epochs": 1, "learn_batch_size": 4}


def given(**options: object) -> dict[str, object]:
    return {**SMALL, **options}


def one_layer():
    return zoo.tiny_llama(initializer_range=0.4, num_hidden_layers=1)


@pytest.fixture(scope="module")
def model():
    return one_layer()


@pytest.fixture
def compiled(monkeypatch):
    """The calls of `permtriton.compile`: config and calibration samples of each."""
    calls = []

    def record(model, tokenizer, config, *, ids, progress):
        calls.append((config, ids))
        return original(model, tokenizer, config, ids=ids, progress=progress)

    original = comparison.compile_model
    monkeypatch.setattr(comparison, "compile_model", record)
    return calls


def without_times(results) -> list:
    return [
        (each.method, each.pattern, each.setting, [{**asdict(m), **dict.fromkeys(TIMES)} for m in each.measured])
        for each in results
    ]


# -- rows ----------------------------------------------------------------------------------------------------------


def test_there_is_a_row_per_method_and_pattern():
    rows = method_rows(given(), ("wanda", "ria + learned", "wanda"), PATTERNS)
    assert [(row.method, row.pattern) for row in rows] == [
        (method, pattern) for pattern in ("2:4", "4:8") for method in ("wanda", "ria + learned")
    ]
    assert [str(row.config.sparsity) for row in rows] == ["2:4", "2:4", "4:8", "4:8"]
    assert {(row.config.importance, row.config.recipe) for row in rows} == {
        ("wanda", "mask"),
        ("ria", "heuristic,learned,mask"),
    }


def test_all_methods_differ_from_each_other():
    rows = method_rows(given(), (), ())
    assert [row.method for row in rows] == list(METHODS)
    assert len({row.config for row in rows}) == len(METHODS)


def test_recipes_are_compared_where_they_are_named():
    rows = method_rows(given(), tuple(RECIPES), (), model="demo")
    assert [row.method for row in rows] == list(RECIPES)
    assert [row.config.recipe for row in rows] == [recipe.names for recipe in RECIPES.values()]
    assert [row.config.importance for row in rows] == ["obs", "obs", "obs", "wanda", "wanda"]
    fused = method_rows(given(), tuple(f"{name} (fused)" for name in RECIPES), (), model="demo")
    assert [row.config for row in fused] == [replace(row.config, layout="fused") for row in rows]
    fast = rows[list(RECIPES).index("fast")].config
    assert fast.steps == RECIPES["fast"].steps, "a method sets no option of a recipe"
    assert rows[-1].config.steps[0].clamp == RECIPES["permllm"].steps[0].clamp
    assert rows[-1].config.steps[0].epochs == 1, "the user's options win over the recipe's"


def test_the_papers_method_stands_beside_the_score_alone():
    rows = method_rows(given(), ["wanda + permllm", "ria + permllm", "ria + permllm (portable)"], (), model="demo")
    settings = [(row.config.importance, row.config.layout, row.config.steps[0].learning_rate) for row in rows]
    assert settings == [("wanda", "fused", 1e-3), ("ria", "fused", 5e-3), ("ria", "portable", 5e-3)]


ABLATIONS = {
    "learn_block_size": (("32", "64"), ("wanda + learned", "ria + learned")),
    "refit_exchanges": (("0", "2", "4", "8"), ()),
    "heuristic_row_weights": (("fisher", "none"), ("wanda + heuristic",)),
    "tune_generated": (("true", "false"), ("mask + tune",)),
    "sparsity": (("2:4", "4:8"), ("wanda",)),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_rows_of_an_ablation_differ_in_its_option_alone(name):
    values, methods = ABLATIONS[name]
    rows = ablation_rows(given(), name, values, methods, ())
    assert len(rows) == len(values) * len(methods or ("default",))
    for method in methods or ("default",):
        mine = [row for row in rows if row.method == method]
        found = [row.config.to_dict() for row in mine]
        assert [str(each.pop(name)).lower() for each in found] == list(values)
        assert all(each == found[0] for each in found)
        assert [row.setting.lower() for row in mine] == [f"{name} {value}" for value in values]
        assert [row.pattern for row in mine] == [str(row.config.sparsity) for row in mine]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("heat", ("1",), ()), "--ablate heat: no option of this name"),
        (("refit_exchange", ("1",), ()), "refit_exchange: no option.*did you mean refit_exchanges"),
        (("seed", ("0", "1"), ()), "--ablate seed: no option of this name changes results"),
        (("learn_sinkhorn_rounds", ("0", "5"), ("wanda",)), "no effect on the method wanda: choose other --methods"),
        (("refit_exchanges", ("five",), ()), "`refit_exchanges=` is 'five': expected a non-negative integer"),
        (("learn_block_size", ("30",), ("wanda + learned",)), "learn_block_size 30 is not a multiple"),
        (("learn_layers", ("first:1",), ("wanda + learned",)), "`learn_layers=` is .first:1."),
    ],
)
def test_ablations_that_make_no_sense(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ablation_rows(given(), *arguments, ())


def test_options_that_change_no_row_are_refused():
    rows = method_rows(given(), ("wanda", "wanda + learned"), ())
    check_effect(["learn_epochs", "samples"], rows, None)
    with pytest.raises(ConfigError, match="--learn-epochs has no effect on the methods wanda: "):
        check_effect(["samples", "learn_epochs"], rows[:1], None)
    with pytest.raises(ConfigError, match="--learn-block-size has no effect with --ablate learn_block_size"):
        check_effect(["learn_block_size"], rows, "learn_block_size")


# -- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_rows_of_a_seed_share_one_draw(model, compiled, tmp_path, monkeypatch):
    draws = []
    draw = comparison.calibration_samples

    def count(*arguments):
        draws.append(arguments[0].seed)
        return draw(*arguments)

    monkeypatch.setattr(comparison, "calibration_samples", count)
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"input_ids": torch.arange(40).repeat(12).tolist()}))
    rows = method_rows(given(calibration=str(text)), ("wanda",), PATTERNS)
    results = compare(Benchmark(model, None, WINDOWS), rows, seeds=(0, 5))
    assert draws == [0, 5]
    assert [(config.seed, str(config.sparsity)) for config, _ in compiled] == [
        (seed, pattern) for pattern in ("2:4", "4:8") for seed in (0, 5)
    ]
    first, second = compiled[0][1].sha256, compiled[1][1].sha256
    assert first != second
    assert all(samples.sha256 == (first, second)[config.seed == 5] for config, samples in compiled)
    assert [(each.method, each.pattern, len(each.measured)) for each in results] == [
        ("dense", "", 1), ("wanda", "2:4", 2), ("wanda", "4:8", 2),
    ]  # fmt: skip
    assert results[1].mean != results[2].mean, "the patterns differ"
    assert results[1].spread > 0


@pytest.mark.slow
def test_encoders_are_compared_by_the_cosine():
    benchmark = Benchmark(zoo.build("bert"), None, zoo.token_ids(3, 12))
    results = compare(benchmark, method_rows(given(), ("wanda",), ()), ids=zoo.token_ids(4, 16))
    report = report_of(results, benchmark, model="bert", text="", seeds=[0], ablation=None, versions={})
    assert (report["tokens"], report["window"]) == (36, 12)
    assert columns(report)[0] == ["method", "cosine", "seconds", "peak MiB"]
    dense, pruned = (each.measured[0] for each in results)
    assert (dense.perplexity, dense.kl, pruned.perplexity, pruned.kl) == (None, None, None, None)
    assert results[0].mean == pytest.approx(1, abs=1e-6)
    assert results[1].mean == pruned.cosine < 0.999
    assert results[1].average(lambda each: each.kl) is None


# -- kept results --------------------------------------------------------------------------------------------------

METHODS_RUN = ("magnitude", "wanda")


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> bytes:
    """The file of a finished comparison of magnitude with the dense model."""
    path = tmp_path_factory.mktemp("kept") / "rows.json"
    run(path, model, ("magnitude",))
    return path.read_bytes()


@pytest.fixture
def stored_rows(finished, tmp_path) -> Path:
    """A copy of it, to be changed."""
    path = tmp_path / "rows.json"
    path.write_bytes(finished)
    return path


class Lines(NoProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def kept(path, model, windows=WINDOWS, tasks=MappingProxyType({})) -> ResultFile:
    return ResultFile(path, Benchmark(model, None, windows).identity(tasks))


def run(path, model, methods=METHODS_RUN, progress=None):
    results = kept(path, model)
    results.read()
    return compare(
        Benchmark(model, None, WINDOWS), method_rows(given(), methods, ()), ids=IDS, kept=results, progress=progress
    )


def test_an_interrupted_comparison_continues_with_what_is_missing(model, compiled, tmp_path, monkeypatch):
    path, recording = tmp_path / "rows.json", comparison.compile_model
    expected = without_times(run(None, model))
    compiled.clear()

    def interrupt(*arguments, **options):
        if len(compiled) == 1:
            raise KeyboardInterrupt
        return recording(*arguments, **options)

    monkeypatch.setattr(comparison, "compile_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(path, model)
    assert len(compiled) == 1
    monkeypatch.setattr(comparison, "compile_model", recording)
    progress = Lines()
    assert without_times(run(path, model, progress=progress)) == expected
    assert [config.importance for config, _ in compiled] == ["magnitude", "wanda"]
    assert f"2 of 3 results (a row with one seed each) are kept in {path}" in progress.lines
    before = path.read_bytes()
    assert without_times(run(path, model, ("wanda", "magnitude"))) == [expected[0], expected[2], expected[1]]
    assert len(compiled) == 2
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["rows.json"]


def other_model():
    other = one_layer()
    with torch.no_grad():
        other.model.embed_tokens.weight[7, 0] += 1e-3
    return other


OTHERS = {
    "nothing": (lambda model: {}, 1),
    "model": (lambda model: {"model": other_model()}, 0),
    "held-out text": (lambda model: {"windows": WINDOWS + 1}, 0),
    "tasks": (lambda model: {"tasks": {"names": ["rte"]}}, 0),
}


@pytest.mark.parametrize("case", OTHERS)
def test_results_of_another_comparison_are_not_used(model, stored_rows, case):
    change, known = OTHERS[case]
    results = kept(stored_rows, **{"model": model, **change(model)})
    results.read()
    assert (results.key() in results.results) == known


def test_results_of_other_versions_are_measured_anew(model, stored_rows, compiled, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "1.0")
    progress = Lines()
    run(stored_rows, model, ("magnitude",), progress)
    assert f"0 of 2 results (a row with one seed each) are kept in {stored_rows}" in progress.lines
    assert len(compiled) == 1


@pytest.mark.slow
def test_what_decides_a_row_is_in_its_key(model, stored_rows, compiled):
    """`tune` draws new samples of the text; a mask alone is of the calibration samples. Recipes have own values."""
    first, other = (Samples({"input_ids": IDS}, spare=Samples.of(zoo.tiny_ids(4, 16, seed=seed))) for seed in (2, 3))
    benchmark, results = Benchmark(model, None, WINDOWS), kept(stored_rows, model)
    results.read()

    def compilations(method: str, samples: Samples, **options: object) -> int:
        compiled.clear()
        compare(benchmark, method_rows(given(**options), (method,), ()), ids=samples, kept=results)
        return len(compiled)

    assert compilations("magnitude", first) == 0
    assert compilations("magnitude", other) == 0
    assert compilations("magnitude", Samples.of(IDS.flip(0))) == 1
    assert compilations("mask + tune", first) == 1
    assert compilations("mask + tune", first) == 0
    assert compilations("mask + tune", other) == 1
    assert compilations("fast", first) == 1
    assert compilations("fast", first, refit_exchanges=4) == 1
    assert compilations("magnitude", first, seed=3, importance="ria", micro_batch_size=3) == 0
    assert compilations("magnitude", first, sparsity="4:8") == 1


@pytest.mark.slow
def test_the_report_has_what_each_row_ran_with(model):
    benchmark = Benchmark(model, None, WINDOWS)
    results = compare(benchmark, method_rows(given(), ("fast", "heuristic + refit"), ()), ids=IDS)
    report = report_of(results, benchmark, model="", text="", seeds=[0], ablation=None, versions={})
    dense, fast, refit = (row["config"] for row in report["rows"])
    assert (dense, fast["refit_exchanges"], refit["refit_exchanges"]) == ({}, 0, Refit().exchanges)
    assert report["config"]["samples"] == given()["samples"]
    assert not {"refit_exchanges", "recipe", "seed"} & report["config"].keys()


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"version": 2}', "[" * 10**5, b"\xff\xfe"])
def test_a_damaged_file_is_refused(model, tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OutputError, match=r"holds no results that can be continued.*--overwrite"):
        kept(path, model).read()


@pytest.mark.parametrize(
    ("place", "value"), [("cosine", "low"), ("tasks", []), ("peak_bytes", 1.5), ("method", 3), ("seconds", None)]
)
def test_values_of_another_type_are_refused(model, stored_rows, place, value):
    stored = json.loads(stored_rows.read_text())
    list(stored.values())[1][place] = value
    stored_rows.write_text(json.dumps(stored))
    with pytest.raises(OutputError, match=r"holds no results that can be continued.*--overwrite"):
        kept(stored_rows, model).read()

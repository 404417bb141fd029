"""Comparisons: rows as data, results that are kept and continued, ablations that differ in one option."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import permtriton
from permtriton.errors import ConfigError, ModelError, OutputError
from permtriton.evaluation.compare import _files_hash
from permtriton.evaluation.compare_methods import check_effect, row_configs
from permtriton.evaluation.compare_results import ResultFile, columns, read_comparison
from permtriton.methods.prune.refit import Refit
from permtriton.recipe import RECIPES, config_from
from permtriton.util.sparsity import NMPattern

from . import zoo

SMALL = {"samples": 4, "sequence_length": 16, "learn_epochs": 1, "learn_batch_size": 4, "distill_epochs": 1}
HELD_OUT = zoo.tiny_ids(3, 12, seed=1)
TIMES = ("seconds", "compile_seconds", "by_seed")


def settings_of(rows) -> list[tuple]:
    return [(row.config.importance, row.config.layout, row.config.recipe) for row in rows]


# -- rows ----------------------------------------------------------------------------------------------------------


def test_there_is_a_row_per_method_and_pattern():
    rows = row_configs(SMALL, ("wanda", "ria + learned", "wanda"), (NMPattern(2, 4), NMPattern(4, 8)))
    assert [(row.method, row.pattern) for row in rows] == [
        (method, pattern) for pattern in ("2:4", "4:8") for method in ("wanda", "ria + learned")
    ]
    assert [str(row.config.sparsity) for row in rows] == ["2:4", "2:4", "4:8", "4:8"]
    assert settings_of(rows[:2]) == [("wanda", "portable", "mask"), ("ria", "portable", "heuristic,learned,mask")]


def test_recipes_are_compared_where_they_are_named():
    rows = row_configs(SMALL, tuple(RECIPES), model="demo")
    assert [row.config.recipe for row in rows] == [config_from({}, name).recipe for name in RECIPES]
    fused = row_configs(SMALL, tuple(f"{name} (fused)" for name in RECIPES), model="demo")
    assert [row.config for row in fused] == [replace(row.config, layout="fused") for row in rows]
    fast = rows[list(RECIPES).index("fast")].config
    assert fast.steps == RECIPES["fast"].steps, "a method sets no option of a recipe"
    assert rows[-1].config.steps[0].clamp == RECIPES["permllm"].steps[0].clamp
    assert rows[-1].config.steps[0].epochs == 1, "the user's options win over the recipe's"


def test_the_papers_method_stands_beside_the_score_alone():
    rows = row_configs(SMALL, ["wanda + permllm", "ria + permllm", "ria + permllm (portable)"], model="demo")
    settings = [(row.config.importance, row.config.layout, row.config.steps[0].learning_rate) for row in rows]
    assert settings == [("wanda", "fused", 1e-3), ("ria", "fused", 5e-3), ("ria", "portable", 5e-3)]


ABLATIONS = {
    "learn_block_size": (("32", "64"), ("wanda + learned", "ria + learned")),
    "refit_exchanges": (("0", "2", "4", "8"), ()),
    "heuristic_row_weights": (("fisher", "none"), ("wanda + heuristic",)),
    "mixed_precision": (("true", "false"), ("mask + distill",)),
    "sparsity": (("2:4", "4:8"), ("wanda",)),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_rows_of_an_ablation_differ_in_its_option_alone(name):
    values, methods = ABLATIONS[name]
    rows = row_configs(SMALL, methods, ablate=name, values=values)
    assert len(rows) == len(values) * len(methods or ("default",))
    for method in methods or ("default",):
        own = [row for row in rows if row.method == method]
        configs = [row.config.to_dict() for row in own]
        assert [str(config.pop(name)).lower() for config in configs] == list(values)
        assert all(config == configs[0] for config in configs)
        assert [row.setting.lower() for row in own] == [f"{name} {value}" for value in values]
        assert [row.pattern for row in own] == [str(row.config.sparsity) for row in own]


@pytest.mark.parametrize(
    ("name", "value", "methods", "message"),
    [
        ("heat", "1", (), "--ablate heat: no option of this name"),
        ("refit_exchange", "1", (), "refit_exchange: no option.*did you mean refit_exchanges"),
        ("seed", "0", (), "--ablate seed: no option of this name changes results"),
        ("learn_sinkhorn_rounds", "5", ("wanda",), "no effect on the method wanda: choose other --methods"),
        ("refit_exchanges", "five", (), "`refit_exchanges=` is 'five': expected a non-negative integer"),
        ("learn_block_size", "30", ("wanda + learned",), "learn_block_size 30 is not a multiple"),
    ],
)
def test_ablations_that_make_no_sense(name, value, methods, message):
    with pytest.raises(ConfigError, match=message):
        row_configs(SMALL, methods, ablate=name, values=(value,))


def test_options_that_change_no_row_are_refused():
    rows = row_configs(SMALL, ("wanda", "wanda + learned"))
    check_effect(["learn_epochs", "samples"], rows, None)
    with pytest.raises(ConfigError, match="--learn-epochs has no effect on the methods wanda: "):
        check_effect(["samples", "learn_epochs"], rows[:1], None)
    with pytest.raises(ConfigError, match="--learn-block-size has no effect with --ablate learn_block_size"):
        check_effect(["learn_block_size"], rows, "learn_block_size")


# -- runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with a model of one layer, another one, and a calibration text of token ids."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "made").mkdir()
    model = zoo.tiny_llama(initializer_range=0.4, num_hidden_layers=1)
    model.save_pretrained(folder / "model")
    with torch.no_grad():
        model.model.embed_tokens.weight[7, 0] += 1e-3
    model.save_pretrained(folder / "other-model")
    for name, numbers in {"text": range(40), "other-text": range(39, -1, -1)}.items():
        (folder / f"{name}.jsonl").write_text(json.dumps({"input_ids": [*numbers] * 12}))
    return folder


@pytest.fixture
def here(world, tmp_path, monkeypatch) -> Path:
    for path in world.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compare(model: str = "model", **options: object) -> dict:
    base = {"calibration": "text.jsonl", "eval_data": HELD_OUT, "samples": 4, "sequence_length": 16}
    return permtriton.compare(model, **{"methods": ["magnitude", "wanda"], "output": "t.json", **base, **options})


def without_times(report: dict) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in report["rows"]]


def test_an_interrupted_comparison_continues_with_what_is_missing(here):
    expected = without_times(compare(output="whole.json"))
    evaluations = []

    def interrupt(event: permtriton.Event) -> None:
        evaluations.extend([event] * (event.stage == "evaluate" and event.done == 0))
        if len(evaluations) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(progress=interrupt)
    assert not (here / "t.json").exists()
    said = []
    assert without_times(compare(progress=lambda event: said.append(event.text))) == expected
    kept = here / ".t.json.rows.json"
    assert f"2 of 3 results (a row with one seed each) are kept in {kept}" in said
    before = kept.read_bytes()
    other_order = without_times(compare(methods=["wanda", "magnitude"]))
    assert other_order == [expected[0], expected[2], expected[1]]
    assert kept.read_bytes() == before, "nothing is measured again"


@pytest.fixture(scope="module")
def finished(world) -> bytes:
    """The file of kept results of a comparison."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world)
        compare(methods=["magnitude", "mask + distill", "fast"], output="made/t.json")
    return (world / "made" / ".t.json.rows.json").read_bytes()


# What is asked for in place of what was -> results that are known, of those that are needed.
CHANGES = {
    "nothing": ({}, "2 of 2"),
    "model": ({"model": "other-model"}, "0 of 2"),
    "held-out text": ({"eval_data": HELD_OUT.flip(1)}, "0 of 2"),
    "calibration": ({"calibration": "other-text.jsonl"}, "1 of 2"),
    "pattern": ({"sparsity": "4:8"}, "1 of 2"),
    "seed": ({"seeds": 3}, "1 of 2"),
    "what only rounds": ({"methods": ["mask + distill"], "micro_batch_size": 3}, "2 of 2"),
    "option of a recipe": ({"methods": ["fast"], "refit_exchanges": 4}, "1 of 2"),
    "recipe": ({"methods": ["fast"]}, "2 of 2"),
}


@pytest.mark.slow(but=["nothing", "model", "held-out text", "calibration"])
@pytest.mark.parametrize("case", CHANGES)
def test_what_decides_a_result_is_in_its_key(here, finished, case):
    changes, known = CHANGES[case]
    (here / ".t.json.rows.json").write_bytes(finished)
    said = []
    compare(**{"methods": ["magnitude"], **changes}, progress=lambda event: said.append(event.text))
    assert [text for text in said if " results (" in text] == [
        f"{known} results (a row with one seed each) are kept in {here / '.t.json.rows.json'}"
    ]


def test_the_report_has_what_each_row_ran_with(here):
    report = compare(methods=["fast", "heuristic + refit"])
    dense, fast, refit = (row["config"] for row in report["rows"])
    assert (dense, fast["refit_exchanges"], refit["refit_exchanges"]) == ({}, 0, Refit().exchanges)
    assert report["config"]["samples"] == 4
    assert not {"refit_exchanges", "recipe", "seed"} & report["config"].keys()
    assert read_comparison(here / "t.json") == report


@pytest.mark.slow
def test_encoders_are_compared_by_the_cosine(here):
    zoo.build("bert").save_pretrained("bert")
    report = compare("bert", methods=["wanda"])
    assert (report["tokens"], report["window"]) == (36, 12)
    assert list(columns(report)) == ["method", "cosine", "seconds"]
    dense, pruned = report["rows"]
    assert (dense["kl"], pruned["kl"], pruned["by_seed"][0]["perplexity"]) == (None, None, None)
    assert dense["mean"] == pytest.approx(1, abs=1e-6)
    assert pruned["mean"] == pruned["cosine"] < 0.999


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b'{"version": 2}', b"[" * 10**5, b"\xff\xfe"])
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(OutputError, match=r"holds no results that can be continued.*--overwrite"):
        ResultFile(path, {}).read()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"values": []}, "values is"),
        ({"compile_seconds": "7"}, "compile_seconds is '7'"),
    ],
)
def test_damaged_rows_of_a_report_are_refused(here, change, words):
    report = compare(methods=["magnitude"])
    report["rows"][1] |= change
    (here / "damaged.json").write_text(json.dumps(report))
    with pytest.raises(ModelError, match=words):
        read_comparison(here / "damaged.json")


def test_an_edited_file_of_tasks_is_another_input_but_not_what_is_kept_beside_it(tmp_path):
    (tmp_path / "task.yaml").write_text("task: mine")
    before = _files_hash(tmp_path)
    (tmp_path / ".report.json.rows.json").write_text("{}")
    assert _files_hash(tmp_path) == before
    (tmp_path / "task.yaml").write_text("task: yours")
    assert _files_hash(tmp_path) != before

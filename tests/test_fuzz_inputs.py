"""Random damage to every file that a user can give: a command works or refuses, and runs and writes nothing else."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

from permtriton.checkpoint.export import export
from permtriton.config import CalibrationConfig
from permtriton.data.text import calibration_ids
from permtriton.driver.options import CompileConfig
from permtriton.driver.planning import plan_model
from permtriton.methods.steps import STEPS
from permtriton.model.load import load_empty_model, load_model, load_original
from permtriton.model.source import Source
from permtriton.recipe import all_options, config_from, read_config_file
from permtriton.util.sparsity import NMPattern

from . import folders
from .folders import files as files_of
from .hostile import (
    CONFIG,
    ODD_VALUES,
    WEIGHTS,
    Trap,
    byte_edits,
    change_bytes,
    edit,
    explore,
    json_edits,
    judge,
    limited,
    put,
    set_trap,
)
from .sentences import SENTENCE, VOCABULARY, trained_tokenizer

pytestmark = pytest.mark.slow
PLAN = CompileConfig(sparsity=NMPattern(2, 4))
TOKENIZER_ENTRIES = ("model_max_length", "chat_template", "tokenizer_class", "unk_token", "extra_special_tokens")
CONFIG_ENTRIES = (
    "architectures", "num_labels", "quantization_config", "attn_implementation", "_attn_implementation", "dtype",
    "layer_types", "tie_word_embeddings", "is_encoder_decoder", "sliding_window", "pruned_heads", "head_dim",
    "num_experts", "text_config", "base_model_tp_plan", "_name_or_path", "rope_scaling", "rope_theta", "use_cache",
)  # fmt: skip
GENERATION_ENTRIES = ("temperature", "num_beams", "max_length", "custom_generate", "cache_implementation")


@pytest.fixture(scope="module", autouse=True)
def _limits() -> Iterator[None]:
    with limited():
        yield


@pytest.fixture(scope="module")
def trap(tmp_path_factory) -> Trap:
    return set_trap(tmp_path_factory.mktemp("fuzz") / "trap")


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def load(trap: Trap, folder) -> PreTrainedModel:
    """Reads a model and a text as a compilation does."""
    model, tokenizer = load_original(Source(str(folder), device="cpu"), saved=True)
    calibration_ids(CalibrationConfig(str(trap.text), 4, 16), tokenizer, VOCABULARY, 0)
    return model


def inspect(_trap: Trap, folder) -> None:
    plan_model(load_empty_model(Source(str(folder))), PLAN)


def damaged_json(trap: Trap, file: str, case: tuple, work) -> bool:
    folder = trap.damaged(lambda folder: edit(folder / file, lambda found: put(found, *case)))
    return trap.judge(lambda: work(trap, folder), (file, case))


@pytest.mark.parametrize(
    ("file", "more", "count", "work"),
    [
        (CONFIG, CONFIG_ENTRIES, 12, inspect),
        ("generation_config.json", GENERATION_ENTRIES, 20, load),
        ("tokenizer_config.json", TOKENIZER_ENTRIES, 25, load),
        ("tokenizer.json", (), 25, load),
    ],
)
def test_json_of_a_model_folder(trap, soak, file, more, count, work):
    """Some cases are refused and some are not, or the test shows nothing."""
    cases = json_edits(json.loads((trap.pristine / file).read_text()), more)
    results = []
    explore(cases, lambda case: results.append(damaged_json(trap, file, case, work)), count, soak)
    assert set(results) == {False, True}


def test_bytes_of_a_model_folder(trap, soak):
    files = sorted(p.name for p in trap.pristine.iterdir() if p.suffix in (".json", ".safetensors", ".jinja"))

    def check(case: tuple) -> None:
        file, change = case

        def damage(folder) -> None:
            (folder / file).write_bytes(change_bytes((folder / file).read_bytes(), change))

        folder = trap.damaged(damage)
        trap.judge(lambda: load(trap, folder), case)

    explore(st.tuples(st.sampled_from(files), byte_edits()), check, 20, soak)
    assert WEIGHTS in files


# -- folders that permtriton wrote ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Trap:
    root = tmp_path_factory.mktemp("packed")
    model = folders.model_of(
        "llama", fused=True, dtype=torch.bfloat16, hidden_size=32, intermediate_size=48, head_dim=8
    )
    (root / "trap").mkdir()
    export(folders.save(model, root / "saved"), root / "trap" / "pristine", "packed")
    return Trap(root / "trap", root / "trap" / "pristine", root / "the code ran")


def test_bytes_of_a_packed_folder(packed, soak, tmp_path):
    """Its weights have hashes, so that none of their bytes can change unseen."""
    files = [CONFIG, WEIGHTS, "permtriton.json", "generation_config.json"]
    intact = files_of(packed.pristine)

    def check(case: tuple) -> None:
        file, change = case

        def damage(folder: Path) -> None:
            (folder / file).write_bytes(change_bytes((folder / file).read_bytes(), change))

        folder, output = packed.damaged(damage), tmp_path / "out"
        shutil.rmtree(output, ignore_errors=True)
        refused = [
            packed.judge(lambda: load_model(Source(str(folder), device="cpu")), case),
            packed.judge(lambda: export(folder, output, "dense"), case),
        ]
        assert file != WEIGHTS or files_of(folder) == intact or all(refused), case

    explore(st.tuples(st.sampled_from(files), byte_edits()), check, 15, soak)


# -- texts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer()


def read_text(path, tokenizer) -> None:
    calibration_ids(CalibrationConfig(str(path), 2, 8), tokenizer, VOCABULARY, 0)


def explore_text(cases, write, tokenizer, path, count, soak) -> None:
    def check(case: object) -> None:
        write(case)
        judge(lambda: read_text(path, tokenizer), case)

    explore(cases, check, count, soak)


BYTES = st.binary(max_size=200) | byte_edits().map(lambda change: change_bytes(SENTENCE.encode() * 9, change))


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "parquet"])
def test_any_bytes_as_text(tmp_path, tokenizer, soak, kind):
    path = tmp_path / f"a.{kind}"
    explore_text(
        BYTES,
        path.write_bytes,
        tokenizer,
        path,
        20,
        soak,
    )


ROW = st.fixed_dictionaries({}, optional={"text": ODD_VALUES, "input_ids": ODD_VALUES | st.lists(st.integers())})
LINE = ROW.map(json.dumps) | ODD_VALUES.map(json.dumps) | st.text(max_size=20)


def test_rows_of_json(tmp_path, tokenizer, soak):
    path = tmp_path / "a.jsonl"

    def write(lines: list[str]) -> None:
        path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))

    explore_text(st.lists(LINE, max_size=4), write, tokenizer, path, 50, soak)


COLUMN = st.sampled_from(
    [
        pyarrow.array([SENTENCE] * 20),
        pyarrow.array([SENTENCE.encode(), b"\xff\xfe"]),
        pyarrow.array([SENTENCE, None]),
        pyarrow.array([SENTENCE] * 9).dictionary_encode(),
        pyarrow.array([[1, 2, 3] * 9]),
        pyarrow.array([[1, None, 2**40]]),
        pyarrow.array([[1.5]]),
        pyarrow.array([{"text": "a"}]),
        pyarrow.array([[["a"]]]),
        pyarrow.array([2**31 - 1], pyarrow.date32()),
        pyarrow.array([2**62], pyarrow.timestamp("us")),
        pyarrow.array([2**62], pyarrow.duration("us")),
        pyarrow.array([], pyarrow.string()),
        pyarrow.array([None], pyarrow.null()),
    ]
)
TABLE = st.lists(st.tuples(st.sampled_from(["text", "input_ids", "other"]), COLUMN), max_size=3)


def test_columns_of_parquet(tmp_path, tokenizer, soak):
    path = tmp_path / "a.parquet"

    def write(case: tuple) -> None:
        columns, change = case
        length = min((len(array) for _, array in columns), default=0)
        arrays = [array.slice(0, length) for _, array in columns]
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, [name for name, _ in columns]), path)
        if change is not None:
            path.write_bytes(change_bytes(path.read_bytes(), change))

    explore_text(st.tuples(TABLE, st.none() | byte_edits()), write, tokenizer, path, 50, soak)


# -- options -------------------------------------------------------------------------------------------------------

TOML_VALUES = st.one_of(
    st.sampled_from(["1", "-1", "nan", "inf", "1e999", "true", '"x"', "[]", "{}", "0x" + "f" * 5000, "9" * 400,
                     '"\\ud800"', '"[/red]"', "1979-05-27", "[" * 999, "9" * 5000, '"2:4"', '"8:99"', '"٢:٤"']),
    st.integers().map(str),
    st.floats().map(repr),
    st.text(max_size=8).map(json.dumps),
)  # fmt: skip
IN_TABLES = [f"{step.name}.{field.name}" for step in STEPS for field in fields(step)]
OTHER_KEYS = ["recipe", "nonsense", "[table]", "a.b", "searched.nonsense", '"\\u0000"']
TOML_KEYS = st.sampled_from([*all_options(), *IN_TABLES, *OTHER_KEYS]) | st.text(max_size=5)
TOML = st.lists(st.tuples(TOML_KEYS, TOML_VALUES), max_size=3).map(
    lambda rows: "\n".join(f"{key} = {value}" for key, value in rows).encode(errors="surrogatepass")
)


def test_files_of_options(tmp_path, soak):
    path = tmp_path / "a.toml"

    def work() -> None:
        config_from(read_config_file(path))

    def check(content: bytes) -> None:
        path.write_bytes(content)
        judge(work, content)

    explore(TOML | st.binary(max_size=60), check, 100, soak)

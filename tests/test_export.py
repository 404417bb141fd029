"""Export: the same weights bit for bit in another format, or no output at all."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from permtriton.checkpoint.export import export
from permtriton.cli.main import app
from permtriton.errors import ConfigError, OutputError, PermTritonError, VerificationError
from permtriton.model.headers import read_checkpoint

from . import folders
from .desk import RUNNER
from .folders import LAST_UP

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Pristine folders; do not write into them."""
    root = tmp_path_factory.mktemp("export")
    return {
        name: folders.save(
            folders.model_of("llama", fused=name == "fused", dtype=torch.bfloat16),
            root / name,
            shard="20KB" if name == "sharded" else "5GB",
        )
        for name in ("portable", "fused", "sharded")
    }


@pytest.fixture
def source(sources, tmp_path) -> Path:
    """A copy of the portable one, to damage."""
    return shutil.copytree(sources["portable"], tmp_path / "source")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


# -- the same weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["portable", "fused", "sharded"])
def test_there_and_back_is_bit_equal(sources, tmp_path, name):
    export(sources[name], tmp_path / "packed")
    export(tmp_path / "packed", tmp_path / "dense", "dense")
    assert folders.differing(weights(sources[name]), weights(tmp_path / "dense")) == []
    export(tmp_path / "packed", tmp_path / "repacked", "packed")
    assert folders.differing(weights(tmp_path / "packed"), weights(tmp_path / "repacked")) == []


@pytest.mark.slow(but=["gpt2-pattern0"])
@pytest.mark.parametrize(
    ("architecture", "pattern"),
    [("gpt2", (2, 4)), ("llama", (4, 8)), ("mixtral", (2, 4)), ("bert_mlm", (2, 4))],
)
def test_other_architectures_and_patterns(tmp_path, architecture, pattern):
    model = folders.model_of(architecture)
    if pattern != (2, 4):
        model = folders.model_of(architecture, intermediate_size=96)
        folders.zoo.randomize(model)
        folders.prune(model, *pattern)
    folders.save(model, tmp_path / "a", sparsity=f"{pattern[0]}:{pattern[1]}")
    result = export(tmp_path / "a", tmp_path / "packed")
    export(tmp_path / "packed", tmp_path / "dense", "dense")
    assert folders.differing(weights(tmp_path / "a"), weights(tmp_path / "dense")) == []
    assert result["weights"] == len(folders.pruned_weights(model))
    assert result["ratio"] < pattern[0] / pattern[1] + 0.1
    assert result["ratio"] == 17 / 32 or pattern != (2, 4)


# -- what it costs and reports ---------------------------------------------------------------------------------------


def test_half_precision_at_2_4_takes_9_16(sources, tmp_path):
    result = export(sources["portable"], tmp_path / "packed")
    assert (result["ratio"], result["sparsity"], result["weights"]) == (0.5625, "2:4", 14)
    stored = read_checkpoint(tmp_path / "packed")
    parts = [t for name, t in weights(tmp_path / "packed").items() if name.endswith(("_values", "_positions"))]
    assert result["stored_bytes"] == sum(part.nbytes for part in parts)
    dense = [t for name, t in weights(sources["portable"]).items() if f"{name}_values" in stored]
    assert result["dense_bytes"] == sum(tensor.nbytes for tensor in dense)
    report = json.loads((tmp_path / "packed" / "permtriton.json").read_text())
    assert {**report["export"], "files": report["files"]} == result
    for name, file in result["files"].items():
        content = (tmp_path / "packed" / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["bytes"], file["sha256"])


def test_it_copies_the_other_files(source, tmp_path):
    (source / "templates").mkdir()
    (source / "templates" / "chat.txt").write_text("hello")
    export(source, tmp_path / "out")
    assert (tmp_path / "out" / "templates" / "chat.txt").read_text() == "hello"
    kept = {"beside.json", "generation_config.json"}
    assert {name: folders.files(source)[name] for name in kept} == {
        name: folders.files(tmp_path / "out")[name] for name in kept
    }
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert len(modes) == 1


def test_what_git_and_the_hub_keep_in_a_folder_stays_there(source, tmp_path):
    """An export is a model of its own, and may be published without the history of the other."""
    for name in (".git/config", ".cache/huggingface/trees.json", "inner/.cache/log", ".gitattributes"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("theirs")
    export(source, tmp_path / "packed")
    hidden = {str(path.relative_to(tmp_path / "packed")) for path in (tmp_path / "packed").rglob(".*")}
    assert hidden == {".gitattributes"}


def test_each_file_is_written_under_its_name(sources, tmp_path):
    result = export(sources["sharded"], tmp_path / "out")
    names = {file.name for file in sources["sharded"].glob("*.safetensors")}
    assert set(result["files"]) == names == {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    assert len(names) > 4
    assert {name: tensor.file.name for name, tensor in read_checkpoint(sources["sharded"]).items()}.items() <= {
        name: tensor.file.name for name, tensor in read_checkpoint(tmp_path / "out").items()
    }.items()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights(tmp_path / "out").values())
    with safe_open(tmp_path / "out" / names.pop(), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


# -- dense ---------------------------------------------------------------------------------------------------------


def test_a_fused_model_has_no_form_that_loads_alone(sources, tmp_path):
    for folder in (sources["fused"], tmp_path / "packed"):
        with pytest.raises(ConfigError, match=r"at run time .*`layout=portable`"):
            export(folder, tmp_path / "fp8", "fp8")
        if folder is sources["fused"]:
            export(folder, tmp_path / "packed")
    result = export(tmp_path / "packed", tmp_path / "dense", "dense")
    assert result["loads_with"] == "transformers after import permtriton"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "packed"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "dense").config.quantization_config.format == "dense"


# -- refusals ------------------------------------------------------------------------------------------------------


def change_report(change):
    return lambda folder: folders.edit_json(folder / "permtriton.json", change)


def change_config(change):
    return lambda folder: folders.edit_json(folder / "config.json", change)


def third_weight(weight):
    weight[5, 8:12] = torch.tensor([1.0, 0.0, 2.0, 3.0])
    return weight


BAD = {
    "no report": (lambda f: (f / "permtriton.json").unlink(), ["not written by permtriton", "permtriton.json"]),
    "no sparsity": (change_report(lambda r: r["config"].pop("sparsity")), ["config", "sparsity"]),
    "another hash": (
        change_report(lambda r: r.update(files={"model.safetensors": {"bytes": 1, "sha256": "0" * 64}})),
        ["SHA-256"],
    ),
    "a weight not there": (change_report(lambda r: r["pruned_weights"].update(other=1)), ["other", "does not hold"]),
    "a dimension not there": (
        change_report(lambda r: r["pruned_weights"].update({LAST_UP: 2})),
        [LAST_UP, "dimension 2"],
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["model.safetensors"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json"]),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-7]),
        ["truncated"],
    ),
    "another's format": (
        change_config(lambda c: c.update(quantization_config={"quant_method": "gptq"})),
        ["not permtriton's"],
    ),
    "not N:M": (folders.change_tensor(LAST_UP, third_weight), ["row 5", "more nonzero weights in a group than 2:4"]),
    "minus zero": (
        folders.change_tensor(LAST_UP, lambda w: torch.where(w == 0, torch.tensor(-0.0, dtype=w.dtype), w)),
        ["-0.0"],
    ),
    "not finite": (folders.change_tensor(LAST_UP, lambda w: w * torch.inf), ["not finite"]),
    "another shape": (folders.change_tensor(LAST_UP, lambda w: w[:, :-1]), [LAST_UP, "[112, 63]"]),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named_and_nothing_is_left(source, tmp_path, case):
    damage, words = BAD[case]
    damage(source)
    with pytest.raises(PermTritonError) as caught:
        export(source, tmp_path / "out", "packed")
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_where_it_may_write(sources, source, tmp_path):
    before = folders.files(tmp_path)
    for output in (source, tmp_path, source / ".." / "source"):
        with pytest.raises(OutputError, match="choose another folder"):
            export(source, output, overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="exists"):
        export(source, tmp_path / "mine")
    with pytest.raises(OutputError, match="not written by permtriton"):
        export(source, tmp_path / "mine", overwrite=True)
    (tmp_path / "mine" / "thesis.txt").unlink()
    export(source, tmp_path / "mine", overwrite=True)
    export(source, tmp_path / "mine", "dense", overwrite=True)
    assert weights(tmp_path / "mine").keys() == weights(source).keys()
    assert {name: content for name, content in folders.files(tmp_path).items() if not name.startswith("mine")} == before


@pytest.mark.parametrize(
    "where",
    ["format_writer.pack", "format_writer.check_same_bits", "shutil.copyfile", "hashlib.file_digest"],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.slow(but=["error0-format_writer.pack", "error1-format_writer.check_same_bits"])
def test_an_interruption_leaves_the_earlier_output(sources, tmp_path, monkeypatch, where, error):
    export(sources["portable"], tmp_path / "out")
    before = folders.files(tmp_path)

    def fail(*arguments):
        raise error

    monkeypatch.setattr(f"permtriton.checkpoint.{where}" if "format_writer" in where else where, fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OutputError):
        export(sources["portable"], tmp_path / "out", overwrite=True)
    assert folders.files(tmp_path) == before


def flipped(bits: torch.Tensor) -> torch.Tensor:
    bits[3, bits[3].nonzero()[0]] ^= 1
    return bits


@pytest.mark.parametrize(
    ("format", "part", "damage", "words"),
    [
        ("dense", "", flipped, "differs from what was read"),
        ("packed", "_values", flipped, "differs from what was read"),
        ("packed-fp8", "_values", flipped, "differs from what was read"),
        ("fp8", "", flipped, "differs from what was read"),
        ("fp8", "_scale", flipped, "differs from what was read"),
        ("fp8", "", lambda bits: bits + (bits == 0) * 8, "nonzero weights, but 2:4 allows 2"),
        ("fp8", "", lambda bits: bits.where(bits != bits.max(), 127), "not finite"),
    ],
)
def test_what_is_written_wrongly_is_found(sources, tmp_path, monkeypatch, format, part, damage, words):
    """A fault on the way to the file must leave no folder."""

    def broken(tensors, *arguments):
        stored = tensors[LAST_UP + part]
        tensors[LAST_UP + part] = damage(stored.clone().view(torch.uint8)).to(torch.uint8).view(stored.dtype)
        save_file(tensors, *arguments)

    monkeypatch.setattr("permtriton.checkpoint.export.save_file", broken)
    with pytest.raises(VerificationError, match=words):
        export(sources["portable"], tmp_path / "out", format)
    assert list(tmp_path.iterdir()) == []


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{source}", "--format", "zip"], ["'zip'"]),
        (["{source}"], ["exists", "--overwrite"]),
        (["{source}/nothing", "--output", "new"], ["is not a folder"]),
        (["{folder}/portable-packed", "--output", "new"], ["config.json cannot be read", "No such file"]),
        (["{fused}", "--output", "new", "--format", "fp8"], ["--layout portable"]),
    ],
)
def test_the_command_refuses_in_a_line(sources, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "portable-packed").mkdir()
    (tmp_path / "portable-packed" / "permtriton.json").write_text("{}")
    places = {"source": sources["portable"], "fused": sources["fused"], "folder": tmp_path}
    result = RUNNER.invoke(app, ["export", *(argument.format(**places) for argument in arguments)])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert [word for word in words if word not in result.stderr] == [], result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["portable-packed"]

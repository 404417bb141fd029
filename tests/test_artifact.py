"""Saving: verified before it is renamed into place, and an earlier output survives whatever goes wrong."""

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import permtriton
from permtriton import artifact
from permtriton.errors import OutputError, VerificationError
from permtriton.passes.verify import check_finite_tensor, check_weight
from permtriton.sparsity import NMPattern

from . import zoo

VOCABULARY = 40
PRUNED, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def compiled() -> permtriton.CompiledModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    ids = torch.randint(0, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0))
    return permtriton.compile(
        LlamaForCausalLM(config), None, permtriton.CompileConfig(permutation="heuristic"), ids=ids
    )


@pytest.fixture
def place(tmp_path) -> Path:
    """The parent of the output, with nothing else in it."""
    parent = tmp_path / "outputs"
    parent.mkdir()
    return parent


@pytest.fixture
def earlier(compiled, place) -> dict[Path, bytes]:
    """An earlier output, as its files' bytes; one of them is no longer written today."""
    output = compiled.save(place / "out")
    (output / "notes from the earlier run.txt").write_text("keep me")
    return files(place)


def files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def after_saving(monkeypatch, compiled, do: Callable[[Path], object]) -> None:
    """Lets ``do`` happen to the temporary folder once the model is written and before it is verified."""
    save = compiled.model.save_pretrained

    def save_pretrained(folder, **options):
        save(folder, **options)
        do(Path(folder))

    monkeypatch.setattr(compiled.model, "save_pretrained", save_pretrained)


def raises(error: BaseException) -> Callable[..., None]:
    def fail(*_args, **_kwargs):
        raise error

    return fail


# -- what is saved -------------------------------------------------------------------------------------------------


def test_saves_a_plain_checkpoint_that_transformers_loads(compiled, place):
    output = compiled.save(place / "out")
    assert output == place / "out"
    assert [path.name for path in place.iterdir()] == ["out"], "no temporary folder stays"
    assert {"config.json", "model.safetensors", "permtriton.json"} <= {path.name for path in output.iterdir()}
    reloaded = AutoModelForCausalLM.from_pretrained(output)
    for (name, tensor), (other, saved) in zip(
        compiled.model.named_parameters(), reloaded.named_parameters(), strict=True
    ):
        assert (name, True) == (other, torch.equal(tensor, saved))
    ids = torch.arange(16).view(1, 16)
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, compiled.model(ids).logits)


def test_report_tells_how_it_was_verified(compiled, place):
    report = json.loads((compiled.save(place / "out") / "permtriton.json").read_text())
    told = report["verification"]
    assert (told["pruned_weights"], told["reloaded"]) == (14, "same outputs")
    assert told["tensors"] == len(load_file(place / "out" / "model.safetensors"))
    assert report["config"]["sparsity"] == "2:4"


def test_verifies_without_a_second_copy_where_memory_is_short(compiled, place, monkeypatch):
    monkeypatch.setattr("permtriton.memory.available", lambda device: 1)
    compiled.save(place / "out")
    assert compiled.report["verification"]["reloaded"].startswith("not run")


def test_sharded_checkpoints_round_trip(compiled, place, monkeypatch):
    monkeypatch.setattr(artifact, "SHARD_SIZE", "4KB")
    output = compiled.save(place / "out")
    assert len(list(output.glob("*.safetensors"))) > 2
    assert (output / "model.safetensors.index.json").is_file()
    reloaded = AutoModelForCausalLM.from_pretrained(output)
    assert all(torch.equal(compiled.model.state_dict()[k], v) for k, v in reloaded.state_dict().items())


def test_damage_in_any_shard_is_found(compiled, place, monkeypatch):
    monkeypatch.setattr(artifact, "SHARD_SIZE", "4KB")

    def damage(folder):
        shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][NORM]
        tensors = load_file(folder / shard)
        tensors[NORM][0] += 1
        save_file(tensors, folder / shard, {"format": "pt"})

    after_saving(monkeypatch, compiled, damage)
    with pytest.raises(VerificationError, match=NORM):
        compiled.save(place / "out")
    assert list(place.iterdir()) == []


def test_overwrite_replaces_the_whole_folder(compiled, place, earlier):
    compiled.save(place / "out", overwrite=True)
    assert [path.name for path in place.iterdir()] == ["out"]
    assert set(files(place)) == set(earlier) - {Path("out/notes from the earlier run.txt")}


def test_the_learning_state_goes_once_the_result_is_saved(compiled, place, monkeypatch):
    deleted = []
    monkeypatch.setattr(compiled, "resume", SimpleNamespace(delete=lambda: deleted.append(files(place))))
    compiled.save(place / "out")
    assert [Path("out/permtriton.json") in there for there in deleted] == [True]


# -- where it may be saved -----------------------------------------------------------------------------------------


def test_existing_output_needs_overwrite(compiled, place, earlier):
    with pytest.raises(OutputError, match="exists: choose another folder, or replace it with --overwrite"):
        compiled.save(place / "out")
    assert files(place) == earlier


@pytest.mark.parametrize("kind", ["folder of another", "file"])
def test_overwrite_leaves_what_is_not_ours_alone(compiled, place, kind):
    if kind == "file":
        (place / "out").write_text("thesis")
    else:
        (place / "out").mkdir()
        (place / "out" / "config.json").write_text("thesis")
    before = files(place)
    with pytest.raises(OutputError, match="not written by permtriton"):
        compiled.save(place / "out", overwrite=True)
    assert files(place) == before


def test_an_empty_folder_may_be_overwritten(compiled, place):
    (place / "out").mkdir()
    compiled.save(place / "out", overwrite=True)
    assert (place / "out" / "permtriton.json").is_file()


def test_missing_parent(compiled, place):
    with pytest.raises(OutputError, match="does not exist; make it first"):
        compiled.save(place / "no" / "out")
    assert list(place.iterdir()) == []


def test_parent_that_cannot_be_written(place, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(OutputError, match="cannot be written"):
        artifact.check_output(place / "out", overwrite=False)


# -- disk full, Ctrl-C ---------------------------------------------------------------------------------------------


def rename_that(error: BaseException, number: int, *, after: bool) -> Callable[[Path, Path], Path]:
    """A ``Path.rename`` whose call ``number`` fails, before or just after it took effect; the later ones work."""
    rename, calls = Path.rename, []

    def patched(self, target):
        calls.append(target)
        if len(calls) != number:
            return rename(self, target)
        if after:
            rename(self, target)
        raise error

    return patched


def break_at(where: str, error: BaseException, monkeypatch, compiled) -> None:
    match where:
        case "mkdir":
            monkeypatch.setattr(Path, "mkdir", raises(error))
        case "model":
            after_saving(monkeypatch, compiled, raises(error))
        case "tokenizer":
            monkeypatch.setattr(compiled, "tokenizer", SimpleNamespace(save_pretrained=raises(error)))
        case "verify":
            monkeypatch.setattr(artifact, "check_weight", raises(error))
        case "reload":
            monkeypatch.setattr(artifact, "check_same_outputs", raises(error))
        case "report":
            monkeypatch.setattr(Path, "write_text", raises(error))
        case "rename away":
            monkeypatch.setattr(Path, "rename", rename_that(error, 1, after=False))
        case "rename into place":
            monkeypatch.setattr(Path, "rename", rename_that(error, 2, after=False))


PLACES = ["mkdir", "model", "tokenizer", "verify", "reload", "report", "rename away", "rename into place"]


@pytest.mark.parametrize("where", PLACES)
def test_full_disk_leaves_the_earlier_output_whole(compiled, place, earlier, monkeypatch, where):
    with monkeypatch.context() as patch:
        break_at(where, OSError(errno.ENOSPC, "No space left on device"), patch, compiled)
        with pytest.raises(OutputError, match="No space left on device") as caught:
            compiled.save(place / "out", overwrite=True)
    assert str(place / "out") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files(place) == earlier
    assert [path.name for path in place.iterdir()] == ["out"]


def test_full_disk_as_safetensors_tells_it(compiled, place, earlier, monkeypatch):
    after_saving(monkeypatch, compiled, raises(SafetensorError("I/O error: No space left on device (os error 28)")))
    with pytest.raises(OutputError, match="no space left on the disk"):
        compiled.save(place / "out", overwrite=True)
    assert files(place) == earlier
    assert [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.parametrize("where", PLACES)
def test_interruption_leaves_the_earlier_output_whole(compiled, place, earlier, monkeypatch, where):
    with monkeypatch.context() as patch:
        break_at(where, KeyboardInterrupt(), patch, compiled)
        with pytest.raises(KeyboardInterrupt):
            compiled.save(place / "out", overwrite=True)
    assert files(place) == earlier
    assert [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [1, 2])
def test_interruption_just_after_a_rename_leaves_one_whole_output(compiled, place, earlier, monkeypatch, number):
    """A signal is delivered when the system call returns, so the rename has happened."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_that(KeyboardInterrupt(), number, after=True))
        with pytest.raises(KeyboardInterrupt):
            compiled.save(place / "out", overwrite=True)
    assert [path.name for path in place.iterdir()] == ["out"]
    whole_new = set(earlier) - {Path("out/notes from the earlier run.txt")}
    assert files(place) == earlier or set(files(place)) == whole_new


@pytest.mark.parametrize("where", PLACES[1:6])
def test_nothing_is_left_where_there_was_nothing(compiled, place, monkeypatch, where):
    with monkeypatch.context() as patch:
        break_at(where, KeyboardInterrupt(), patch, compiled)
        with pytest.raises(KeyboardInterrupt):
            compiled.save(place / "out")
    assert list(place.iterdir()) == []


# -- failed verification -------------------------------------------------------------------------------------------


def one_too_many(weight: torch.Tensor) -> torch.Tensor:
    weight[5, 8:12] = torch.tensor([1.0, 0.0, 2.0, 3.0])
    return weight


def minus_zero(weight: torch.Tensor) -> torch.Tensor:
    return torch.where(weight == 0, torch.tensor(-0.0), weight)


def set_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor):
        tensor.view(-1)[tensor.flatten().nonzero()[0]] = value
        return tensor

    return change


DAMAGE = {
    "one too many": (PRUNED, one_too_many, ["row 5, group 2 holds 3", "2:4 allows 2"]),
    "minus zero": (PRUNED, minus_zero, ["-0.0"]),
    "NaN": (NORM, set_first(float("nan")), ["1 of 16", "not finite"]),
    "infinity": (PRUNED, set_first(float("inf")), ["1 of 384", "not finite"]),
    "another value": (PRUNED, set_first(0.5), ["differs from the model in memory"]),
    "another value elsewhere": (NORM, set_first(0.5), ["differs from the model in memory"]),
    "not written": (PRUNED, None, ["not in the checkpoint"]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_tensor_is_named_and_nothing_is_left(compiled, place, earlier, monkeypatch, case):
    name, change, words = DAMAGE[case]

    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        tensor = tensors.pop(name)
        if change is not None:
            tensors[name] = change(tensor)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    after_saving(monkeypatch, compiled, damage)
    with pytest.raises(VerificationError) as caught:
        compiled.save(place / "out", overwrite=True)
    assert [word for word in [name, *words] if word not in str(caught.value)] == []
    assert files(place) == earlier
    assert [path.name for path in place.iterdir()] == ["out"]


def test_a_checkpoint_that_reloads_as_another_function_is_refused(compiled, place, monkeypatch):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))

    after_saving(monkeypatch, compiled, damage)
    with pytest.raises(VerificationError, match="reloading the saved checkpoint: outputs differ"):
        compiled.save(place / "out")
    assert list(place.iterdir()) == []


def sparse() -> torch.Tensor:
    return torch.tensor([[1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 3.0, 4.0, 0.0, 5.0, 6.0, 0.0]])


def test_check_weight_takes_what_is_sparse_enough():
    check_weight("w", sparse(), NMPattern(2, 4))
    check_weight("w", torch.ones(2, 8) * torch.tensor([1, 1, 1, 0] * 2), NMPattern(3, 4))
    check_weight("w", torch.zeros(2, 8), NMPattern(1, 8))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-0.0, "-0.0"),
        (float("nan"), "1 of 16"),
        (float("-inf"), "1 of 16"),
        (9.0, "row 1, group 1 holds 3 .*2:4 allows 2"),
    ],
)
def test_check_weight_names_what_is_wrong(value, words):
    weight = sparse()
    weight[1, 7] = value
    with pytest.raises(VerificationError, match=f"^w: .*{words}"):
        check_weight("w", weight, NMPattern(2, 4))


def test_check_finite_tensor_counts():
    check_finite_tensor("t", torch.tensor([1.0, -0.0, 3e38]))
    check_finite_tensor("t", torch.tensor([1, 2]))
    with pytest.raises(VerificationError, match="t: 2 of 3 values are not finite"):
        check_finite_tensor("t", torch.tensor([1.0, float("nan"), float("inf")]))


# -- the fused layout ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fused() -> permtriton.CompiledModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0))
    options = permtriton.CompileConfig(permutation="heuristic", layout="fused")
    return permtriton.compile(LlamaForCausalLM(config), None, options, ids=ids)


def test_a_fused_model_is_saved_with_its_permutations(fused, place):
    output = fused.save(place / "out")
    told = json.loads((output / "config.json").read_text())["quantization_config"]
    assert (told["quant_method"], told["format"], len(told["norms"])) == ("permtriton", "dense", 4)
    stored = load_file(output / "model.safetensors")
    indices = {name: tensor for name, tensor in stored.items() if name.endswith(".index")}
    assert {tensor.dtype for tensor in indices.values()} == {torch.uint8}
    assert len(indices) == 4
    reloaded = AutoModelForCausalLM.from_pretrained(output)
    ids = torch.arange(16).view(1, 16)
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, fused.model(ids).logits)
    assert all(torch.equal(fused.model.state_dict()[k], v) for k, v in reloaded.state_dict().items())


def test_a_fused_model_that_saves_itself_says_what_it_is(fused, place):
    fused.save(place / "out")
    fused.model.save_pretrained(place / "again")
    assert json.loads((place / "again" / "config.json").read_text())["quantization_config"]["format"] == "dense"


def reverse(index: torch.Tensor) -> torch.Tensor:
    return index.flip(0)


@pytest.mark.parametrize("change", [reverse, None])
def test_a_damaged_permutation_is_found(fused, place, monkeypatch, change):
    name = "model.layers.1.input_layernorm.index"

    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        index = tensors.pop(name)
        if change is not None:
            tensors[name] = change(index)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    after_saving(monkeypatch, fused, damage)
    with pytest.raises(VerificationError, match=name):
        fused.save(place / "out")
    assert list(place.iterdir()) == []


def test_the_report_names_pruned_weights_and_hashes(compiled, place):
    output = compiled.save(place / "out")
    report = json.loads((output / "permtriton.json").read_text())
    assert report["pruned_weights"][PRUNED] == 1
    assert len(report["pruned_weights"]) == 14
    content = (output / "model.safetensors").read_bytes()
    expected = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert report["files"] == {"model.safetensors": expected}


def test_pruned_parameters_know_their_input_dimension():
    for name, dim in (("gpt2", 0), ("llama", 1)):
        model, plan = zoo.planned(name)
        found = artifact.pruned_parameters(model, plan)
        assert set(found.values()) == {dim}
        assert all(model.get_parameter(parameter).ndim == 2 for parameter in found)


def test_stacked_experts_are_one_parameter(place):
    model = zoo.build_mixture("mixtral")
    options = permtriton.CompileConfig(permutation="heuristic")
    result = permtriton.compile(model, None, options, ids=zoo.token_ids())
    output = result.save(place / "out")
    report = json.loads((output / "permtriton.json").read_text())
    stacked = {name: dim for name, dim in report["pruned_weights"].items() if "experts" in name}
    assert set(stacked.values()) == {2}
    assert len(stacked) == 4
    assert set(stacked) <= set(load_file(output / "model.safetensors"))
    reloaded = AutoModelForCausalLM.from_pretrained(output)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in reloaded.state_dict().items())

"""Saving: verified before it is renamed into place, and an earlier output survives whatever goes wrong."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoModelForCausalLM, AutoProcessor

import permtriton
from permtriton.checkpoint import save as saving
from permtriton.checkpoint import verify
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ConfigError, ModelError, OutputError, VerificationError

from . import folders, off_path, zoo
from .folders import LAST_UP
from .sentences import image_and_text_processor
from .world import free_memory

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def compiled() -> permtriton.CompiledModel:
    config = permtriton.config_from(recipe="heuristic,mask")
    return compile_model(zoo.tiny_llama(tie_word_embeddings=True), None, config, ids=zoo.tiny_ids(4, 16))


@pytest.fixture
def place(tmp_path) -> Path:
    """The parent of the output, with nothing else in it."""
    parent = tmp_path / "outputs"
    parent.mkdir()
    return parent


@pytest.fixture
def earlier(compiled, place) -> dict[str, bytes]:
    """An earlier output, as its files' bytes; one of them is no longer written today."""
    output = compiled.save_pretrained(place / "out")
    (output / "notes from the earlier run.txt").write_text("keep me")
    return folders.files(place)


def raises(error: BaseException) -> Callable[..., None]:
    def fail(*_args, **_kwargs):
        raise error

    return fail


# -- what is saved -------------------------------------------------------------------------------------------------


def test_saves_a_plain_checkpoint_that_transformers_loads(compiled, place):
    output = compiled.save_pretrained(place / "out")
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


@pytest.mark.slow
def test_what_is_read_beside_a_model_and_its_tokenizer_is_saved(place):
    """The processor of images and text, and what sentence-transformers reads; but no link out of the folder."""
    off_path.build("llava").save_pretrained(place / "dense")
    image_and_text_processor().save_pretrained(place / "dense")
    (place / "dense" / "1_Pooling").mkdir()
    (place / "dense" / "1_Pooling" / "config.json").write_text("{}")
    (place / "dense" / "modules.json").write_text('[{"path": "1_Pooling"}]')
    (place / "secret.json").write_text("{}")
    (place / "dense" / "sentence_bert_config.json").symlink_to(place / "secret.json")
    permtriton.compile(str(place / "dense"), recipe="mask", data=zoo.token_ids(4, 12), output=place / "out")
    lost = folders.files(place / "dense").keys() - folders.files(place / "out").keys()
    assert lost == {"sentence_bert_config.json"}
    assert AutoProcessor.from_pretrained(place / "out").image_processor is not None


def test_the_report_is_the_record_of_what_was_saved_last(compiled, place):
    packed, dense = place / "packed", place / "dense"
    for output, format in ((packed, "packed"), (dense, None)):
        compiled.save_pretrained(output, format=format)
        assert compiled.report == json.loads((output / "permtriton.json").read_text())
        assert ("export" in compiled.report) == (format == "packed")


def test_report_states_how_it_was_verified(compiled, place):
    report = json.loads((compiled.save_pretrained(place / "out") / "permtriton.json").read_text())
    verification = report["verification"]
    assert (verification["pruned_weights"], verification["reloaded"]) == (14, "same outputs")
    assert verification["tensors"] == len(load_file(place / "out" / "model.safetensors"))
    assert report["config"]["sparsity"] == "2:4"


def test_verifies_without_a_second_copy_where_memory_is_short(compiled, place, monkeypatch):
    free_memory(monkeypatch, 1)
    compiled.save_pretrained(place / "out")
    assert compiled.report["verification"]["reloaded"].startswith("not run")


def test_sharded_checkpoints_round_trip(compiled, place, monkeypatch):
    monkeypatch.setattr(saving, "SHARD_SIZE", "4KB")
    output = compiled.save_pretrained(place / "out")
    assert len(list(output.glob("*.safetensors"))) > 2
    assert (output / "model.safetensors.index.json").is_file()
    reloaded = AutoModelForCausalLM.from_pretrained(output)
    assert all(torch.equal(compiled.model.state_dict()[k], v) for k, v in reloaded.state_dict().items())


def test_overwrite_replaces_the_whole_folder(compiled, place, earlier):
    compiled.save_pretrained(place / "out", overwrite=True)
    assert [path.name for path in place.iterdir()] == ["out"]
    assert set(folders.files(place)) == set(earlier) - {"out/notes from the earlier run.txt"}


def test_the_states_of_stages_go_once_the_result_is_saved(compiled, place, monkeypatch):
    deleted = []
    states = [SimpleNamespace(unlink=lambda **_: deleted.append(folders.files(place))) for _ in range(2)]
    monkeypatch.setattr(compiled, "states", states)
    compiled.save_pretrained(place / "out")
    assert ["out/permtriton.json" in there for there in deleted] == [True, True]


def test_where_nothing_is_written(compiled, place, earlier):
    (place / "file").write_text("thesis")
    (place / "folder").mkdir()
    (place / "folder" / "README.md").write_text("thesis")
    before = folders.files(place)
    for name, overwrite, words in (
        ("out", False, "exists: choose another folder, or replace it with `overwrite=True`"),
        ("file", True, "not written by permtriton"),
        ("folder", True, "not written by permtriton"),
        ("no/out", True, "does not exist; make it first"),
    ):
        with pytest.raises(OutputError, match=words):
            compiled.save_pretrained(place / name, overwrite=overwrite)
    assert folders.files(place) == before


# -- disk full, Ctrl-C ---------------------------------------------------------------------------------------------


def rename_that(error: BaseException, number: int) -> Callable[[Path, Path], Path]:
    """A ``Path.rename`` whose call ``number`` fails; the later ones work."""
    rename, calls = Path.rename, []

    def patched(self, target):
        calls.append(target)
        if len(calls) == number:
            raise error
        return rename(self, target)

    return patched


def break_at(where: str, error: BaseException, monkeypatch, compiled) -> None:
    match where:
        case "mkdir":
            monkeypatch.setattr(Path, "mkdir", raises(error))
        case "model":
            folders.after_saving(monkeypatch, compiled, raises(error))
        case "tokenizer":
            monkeypatch.setattr(compiled, "tokenizer", SimpleNamespace(save_pretrained=raises(error)))
        case "verify":
            monkeypatch.setattr(verify, "check_weight", raises(error))
        case "reload":
            monkeypatch.setattr(verify, "check_same_outputs", raises(error))
        case "report":
            monkeypatch.setattr(Path, "write_text", raises(error))
        case "rename away":
            monkeypatch.setattr(Path, "rename", rename_that(error, 1))
        case "rename into place":
            monkeypatch.setattr(Path, "rename", rename_that(error, 2))


PLACES = ["mkdir", "model", "tokenizer", "verify", "reload", "report", "rename away", "rename into place"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_and_an_interruption_leave_the_earlier_output_whole(
    compiled, place, earlier, monkeypatch, where, error
):
    expected = OutputError if isinstance(error, OSError) else KeyboardInterrupt
    with monkeypatch.context() as patch:
        break_at(where, error, patch, compiled)
        with pytest.raises(expected, match=r"^$|^[^\n]*out cannot be written: No space left on device[^\n]*$"):
            compiled.save_pretrained(place / "out", overwrite=True)
    assert folders.files(place) == earlier
    assert [path.name for path in place.iterdir()] == ["out"]


def test_full_disk_as_safetensors_reports_it(compiled, place, earlier, monkeypatch):
    folders.after_saving(
        monkeypatch, compiled, raises(SafetensorError("I/O error: No space left on device (os error 28)"))
    )
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        compiled.save_pretrained(place / "out", overwrite=True)
    assert folders.files(place) == earlier
    assert [path.name for path in place.iterdir()] == ["out"]


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
    "one too many": (LAST_UP, one_too_many, ["row 5, group 2 holds 3", "2:4 allows 2"]),
    "minus zero": (LAST_UP, minus_zero, ["-0.0"]),
    "NaN": (NORM, set_first(float("nan")), ["1 of 16", "not finite"]),
    "infinity": (LAST_UP, set_first(float("inf")), ["1 of 384", "not finite"]),
    "another value": (LAST_UP, set_first(0.5), ["differs from the model in memory"]),
    "another value elsewhere": (NORM, set_first(0.5), ["differs from the model in memory"]),
    "not written": (LAST_UP, None, ["not in the checkpoint"]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_tensor_is_named_and_nothing_is_left(compiled, place, earlier, monkeypatch, case):
    name, change, words = DAMAGE[case]
    folders.after_saving(monkeypatch, compiled, folders.change_tensor(name, change))
    with pytest.raises(VerificationError) as caught:
        compiled.save_pretrained(place / "out", overwrite=True)
    assert [word for word in [name, *words] if word not in str(caught.value)] == []
    assert folders.files(place) == earlier
    assert [path.name for path in place.iterdir()] == ["out"]


# -- rehearsed before any work -------------------------------------------------------------------------------------


def shared(model):
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight
    return model


def sharing_values(model):
    first, second = (layer.mlp.up_proj for layer in model.model.layers)
    first.weight = torch.nn.Parameter(second.weight.data)
    return model


def divided(model):
    model.config.distributed_config = {"tp": 4}
    return model


def parametrized(model):
    register_parametrization(model.model.layers[0].mlp.up_proj, "weight", torch.nn.Identity())
    return model


def compiled_inside(model):
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp)
    return model


def adapted(model):
    model.add_adapter(pytest.importorskip("peft").LoraConfig(target_modules=["up_proj"]))
    return model


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def biased(model):
    up = model.model.layers[0].mlp.up_proj
    up.bias = torch.nn.Parameter(torch.ones(up.out_features))
    return model


UP = "model.layers.0.mlp.up_proj"
MISSING = "is missing or tied, expected"
UNSAVABLE = {
    "shared": (shared, {}, ModelError, "could not be saved again: .* contained shared tensors"),
    "values": (sharing_values, {}, ModelError, "could not be saved again: .* contained shared tensors"),
    "config": (divided, {}, ModelError, "could not be saved again: "),
    "tokenizer": (lambda model: model, {"tokenizer": "x"}, ConfigError, "tokenizer is a str: expected a tokenizer"),
    "parametrized": (parametrized, {}, ModelError, rf"{UP}.weight {MISSING} .24, 16.*remove parametrizations"),
    "compiled inside": (compiled_inside, {}, ModelError, f"layers.0.mlp.gate_proj.weight {MISSING}.*compile no module"),
    "adapted": (adapted, {}, ModelError, f"{UP}.weight {MISSING}.*merge adapters"),
    "tied": (tied, {}, ModelError, f"lm_head.weight {MISSING}.*change the config"),
    "biased": (biased, {}, ModelError, f"{UP}.bias is .24., expected none"),
    "meta": (lambda model: model.to("meta"), {}, ModelError, r"has no values \(it is on the meta device\)"),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_could_not_be_saved_is_refused_before_any_work(place, name):
    make, options, error, words = UNSAVABLE[name]
    model, events = make(zoo.tiny_llama()), []
    with pytest.raises(error, match=words) as caught:
        permtriton.compile(
            model, data=zoo.tiny_ids(4, 16), recipe="mask", output=place / "out", progress=events.append, **options
        )
    assert "\n" not in str(caught.value)
    assert list(place.iterdir()) == []
    assert [event for event in events if event.stage] == []


def test_a_config_that_cannot_be_saved_again_is_refused_before_any_work(place):
    zoo.tiny_llama().save_pretrained(place / "model")
    folders.edit_json(place / "model" / "config.json", lambda config: config.update(distributed_config={"tp": 4}))
    with pytest.raises(ModelError, match="model could not be saved again: "):
        permtriton.compile(place / "model", data=zoo.tiny_ids(4, 16), recipe="mask")

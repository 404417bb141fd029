"""Loading: any class that the config names, safetensors only, and one clear line for everything that is not a model."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import permtriton
from permtriton.errors import ConfigError, ModelError
from permtriton.model.copied_files import is_embedder
from permtriton.model.load import load_empty_model, load_model, load_original
from permtriton.model.prunable import check_weights
from permtriton.model.source import SMALL_FILES, Source, resolve_device, source_of_loaded
from permtriton.model.tokenizer import load_tokenizer

from . import zoo
from .folders import LAST_UP, configure, edit_json, edit_tensors


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    zoo.tiny_llama().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "tiny"))


def poison(value: float) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda weights: weights[LAST_UP][2, 3].fill_(value))


def scale(name: str, suffix: str = "_scale") -> Callable[[Path], None]:
    """Stores a weight in 8 bits, with the scale that it was divided by."""

    def to_float8(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = (tensors[name] * 100).to(torch.float8_e4m3fn)
        tensors[f"{name}{suffix}"] = torch.tensor(0.01)

    return lambda folder: edit_tensors(folder, to_float8)


def add(*names: str) -> Callable[[Path], None]:
    """Stores tensors with names of which the class has no parameter."""
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(2) for name in names}))


def name_weights(name: str) -> Callable[[Path], object]:
    """Lets config.json name its file of weights, as transformers allows."""

    def name_it(folder: Path) -> None:
        configure(folder, transformers_weights=name)
        torch.save({}, folder / "adapter_model.bin")

    return name_it


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rename_weights(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


# The damage to a folder, and the words that its error must contain.
DAMAGED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (remove("config.json"), ["holds no config.json"]),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json"]),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), ["config.json", "list"]),
    "unknown model type": (lambda f: configure(f, model_type="nonsense"), ["nonsense"]),
    "no architectures": (lambda f: configure(f, architectures=None), ["architectures", "LlamaForCausalLM"]),
    "unknown class": (lambda f: configure(f, architectures=["FancyForCausalLM"]), ["FancyForCausalLM", "transformers"]),
    "size is a word": (lambda f: configure(f, hidden_size="wide"), ["hidden_size"]),
    "pickle only": (rename_weights("pytorch_model.bin"), ["no weights", "convert pickles"]),
    "no weights": (remove("model.safetensors"), ["no weights", ".safetensors"]),
    "not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"garbage" * 9), ["not a complete"]),
    "cut off": (truncate, ["damaged or truncated"]),
    "a tensor is missing": (lambda f: edit_tensors(f, lambda weights: weights.pop(LAST_UP)), [LAST_UP]),
    "another shape": (
        lambda f: configure(f, intermediate_size=32),
        ["layers.0.mlp.down_proj.weight", "[16, 24]", "[16, 32]", "5 more", "LlamaForCausalLM"],
    ),
    "NaN": (poison(float("nan")), [LAST_UP, "1 of 384", "NaN or infinite"]),
    "infinity": (poison(float("-inf")), [LAST_UP, "1 of 384", "NaN or infinite"]),
    "a scale": (scale(LAST_UP), [f"{LAST_UP}_scale", "dequantized"]),
    "a scale of a block": (scale(LAST_UP, "_scale_inv"), [f"{LAST_UP}_scale_inv", "dequantized"]),
    "unknown quantization": (
        lambda f: configure(f, quantization_config={"quant_method": "modelopt"}), ["'modelopt'", "dequantized"]
    ),
    "a bias that the config does not name": (
        add("model.layers.0.self_attn.q_proj.bias"), ["layers.0.self_attn.q_proj.bias", "LlamaForCausalLM", "config"]
    ),
    "a bias of the model inside": (
        lambda f: (configure(f, architectures=["LlamaModel"]), add("model.norm.bias")(f)), ["norm.bias", "LlamaModel"]
    ),
    "weights that the config names": (name_weights("other.safetensors"), ["transformers_weights", "other.safetensors"]),
    "a pickle that the config names": (name_weights("adapter_model.bin"), ["transformers_weights", "adapter_model"]),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_folders(folder, case):
    damage, words = DAMAGED[case]
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load_model(Source(str(folder)))
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_loads_what_was_saved_in_eval_mode(folder):
    model = load_model(Source(str(folder)))
    assert type(model) is LlamaForCausalLM
    assert not model.training
    saved = load_file(folder / "model.safetensors")
    assert set(saved) == set(model.state_dict())
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype(folder, dtype):
    model = load_model(Source(str(folder), dtype=dtype))
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize(("options", "words"), [({"dtype": "int8"}, "int8.*float16"), ({"device": "tpu"}, "tpu.*cuda")])
def test_unknown_dtype_and_device(folder, options, words):
    with pytest.raises(ConfigError, match=words):
        load_model(Source(str(folder), **options))


@pytest.mark.parametrize(
    ("requested", "has_gpu", "got"),
    [("auto", False, "cpu"), ("cpu", True, "cpu"), ("auto", True, "cuda"), ("cuda", True, "cuda")],
)
def test_device(monkeypatch, requested, has_gpu, got):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert resolve_device(requested).type == got


def test_cuda_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no usable CUDA GPU .*`device=cpu`"):
        resolve_device("cuda")


def test_quantized_experts_that_are_stored_one_by_one_are_refused(tmp_path):
    zoo.build("qwen2_moe").save_pretrained(tmp_path / "moe")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    scale(name)(tmp_path / "moe")
    with pytest.raises(ModelError, match=f"{name}_scale"):
        load_model(Source(str(tmp_path / "moe")))


def test_empty_model_needs_no_weights(folder):
    (folder / "model.safetensors").unlink()
    model = load_empty_model(Source(str(folder)))
    assert type(model) is LlamaForCausalLM
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not model.training


def drop_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def test_a_tokenizer_that_is_missing_is_none(folder):
    assert load_tokenizer(Source(str(folder))) is not None
    drop_tokenizer(folder)
    assert load_tokenizer(Source(str(folder))) is None


FANCY = '{"model": {"type": "Fancy"}}'


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "{}"), ("tokenizer.json", "{"), ("tokenizer.json", FANCY), ("tokenizer.model", "text")],
)
def test_a_tokenizer_that_is_damaged_is_refused(folder, name, content):
    drop_tokenizer(folder)
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=r"its tokenizer cannot be loaded|cannot be read as JSON"):
        load_tokenizer(Source(str(folder)))


@pytest.fixture
def with_code(folder, tmp_path, monkeypatch) -> tuple[Source, Path]:
    """A model that brings its own class, and the file that its code writes when it runs."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    mark = tmp_path / "the code ran"
    (folder / "modeling_own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaForCausalLM\n"
        f"Path({str(mark)!r}).touch()\nclass OwnForCausalLM(LlamaForCausalLM):\n    pass\n"
    )
    configure(
        folder, architectures=["OwnForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    )
    return Source(str(folder)), mark


def test_a_models_own_code_does_not_run_by_default(with_code):
    source, mark = with_code
    with pytest.raises(ModelError, match=r"OwnForCausalLM .*`trust_remote_code=True`"):
        load_model(source)
    assert not mark.exists()


def test_a_models_own_code_runs_when_trusted(with_code):
    source, mark = with_code
    model = load_model(Source(source.name, trust_remote_code=True))
    assert type(model).__name__ == "OwnForCausalLM"
    assert mark.exists()


def in_the_cache(folder: Path, name: str, cache: Path, monkeypatch) -> Path:
    """Puts a model where the client of the hub would have put it, and cuts the network; returns the snapshot."""
    repository, commit = cache / f"models--{name.replace('/', '--')}", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return repository / "snapshots" / commit


@pytest.mark.parametrize("revision", ["v1", "0" * 40])
def test_a_revision_of_the_hub_is_loaded_where_the_main_branch_is_not_in_the_cache(
    folder, tmp_path, monkeypatch, revision
):
    snapshot = in_the_cache(folder, "someone/model", tmp_path / "cache", monkeypatch)
    main = snapshot.parents[1] / "refs" / "main"
    main.rename(main.with_name("v1"))
    source = Source("someone/model", revision=revision)
    assert all(map(torch.equal, load_model(source).parameters(), load_model(Source(str(folder))).parameters()))
    scale(LAST_UP)(snapshot)
    with pytest.raises(ModelError, match=f"{LAST_UP}_scale"):
        load_model(source)


class Hub:
    """Stands in for the hub and its client: fetches the files of one repository into a cache.

    Attributes:
        calls: revision and token of each call that fetches several files.
        lost: whether the connection is lost.
    """

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository, self.snapshot = repository, cache / "models--someone--model" / "snapshots" / ("0" * 40)
        self.calls, self.lost = list[tuple[str | None, str | None]](), False

    def download(self, name: str, revision: str | None, token: str | None, **patterns: Any) -> str:
        if self.lost:
            raise LocalEntryNotFoundError(f"Got: ConnectError: {LOST}\nAn error happened while locating the files.")
        self.calls.append((revision, token))
        files = [str(path.relative_to(self.repository)) for path in self.repository.rglob("*") if path.is_file()]
        for file in huggingface_hub.utils.filter_repo_objects(files, **patterns):
            (self.snapshot / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.repository / file, self.snapshot / file)
        return str(self.snapshot)

    def download_file(self, name: str, file: str, revision: str | None, token: str | None) -> str:
        self.download(name, revision, token, allow_patterns=[file])
        if not (self.snapshot / file).exists():
            raise RemoteEntryNotFoundError("Entry Not Found", response=SimpleNamespace(headers={}, request=None))
        return str(self.snapshot / file)

    @property
    def fetched(self) -> set[str]:
        return {str(path.relative_to(self.snapshot)) for path in self.snapshot.rglob("*") if path.is_file()}


LOST = "[Errno -2] Name or service not known"


@pytest.fixture
def hub(folder, tmp_path, monkeypatch) -> Hub:
    hub = Hub(folder, tmp_path / "cache")
    monkeypatch.setattr("permtriton.model.source.snapshot_download", hub.download)
    monkeypatch.setattr("permtriton.model.source.hf_hub_download", hub.download_file)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return hub


def test_what_stands_beside_the_weights_of_a_hub_name_is_saved(hub, tmp_path):
    """And nothing else is fetched: no pickles, code, weights of other formats or of other folders, and no pictures."""
    modules = [{"path": path} for path in ("", "1_Pooling", "10_Dense")]
    beside = {"modules.json": json.dumps(modules), "LICENSE": "x", "1_Pooling/config.json": "{}"}
    beside |= dict.fromkeys(["10_Dense/config.json", "10_Dense/model.safetensors"], "{}")
    other = ("pytorch_model.bin", "10_Dense/pytorch_model.bin", "0_ckpt/optimizer.pt", "2_Dense/model.safetensors",
             "checkpoint-5/tokenizer.json", "consolidated.safetensors", "modeling.py", "a.png")  # fmt: skip
    for name, content in {**beside, **dict.fromkeys(other, "x")}.items():
        (hub.repository / name).parent.mkdir(exist_ok=True)
        (hub.repository / name).write_text(content)
    options = {"recipe": "mask", "data": zoo.tiny_ids(4, 12)}
    compiled = permtriton.compile("someone/model", output=tmp_path / "out", **options)
    saved = {name: (tmp_path / "out" / name).read_text() for name in beside}
    assert saved == beside
    assert not {*other} & hub.fetched
    assert (compiled.report["model"], compiled.report["on_hub"]) == ("someone/model", True)
    assert compiled.source.revision == hub.snapshot.name, "another version may be published before it is read again"
    texts = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.suffix in (".json", ".md")]
    assert not any(str(hub.snapshot) in text for text in texts)


def test_only_the_shards_that_the_index_names_are_fetched(hub):
    weights = load_file(hub.repository / "model.safetensors")
    LlamaForCausalLM.from_pretrained(hub.repository).save_pretrained(hub.repository, max_shard_size="4KB")
    (hub.repository / "model.safetensors").unlink()
    (hub.repository / "model-old.safetensors").write_bytes(b"x")
    assert load_model(Source("someone/model")).state_dict().keys() == weights.keys()
    assert not (hub.snapshot / "model-old.safetensors").exists()


def test_code_is_fetched_from_the_hub_if_it_may_run(hub):
    (hub.repository / "modeling_own.py").write_text("")
    assert Source("someone/model", trust_remote_code=True).folder == hub.snapshot
    assert "modeling_own.py" in hub.fetched


def test_every_file_of_a_tokenizer_is_fetched():
    """Of every class in transformers."""
    names = {"qwen.tiktoken", "chat_template.jinja"}
    for path in Path(transformers.__file__).parent.glob("models/*/tokenization_*.py"):
        for named in re.findall(r"VOCAB_FILES_NAMES = {(.*?)}", path.read_text(), re.DOTALL):
            names |= {*re.findall(r': "(.+?)"', named)}
    assert {"source.spm", "bpe.codes", "prophetnet.tokenizer"} <= names
    assert {*huggingface_hub.utils.filter_repo_objects(names, allow_patterns=[*SMALL_FILES])} == names


def test_a_tokenizer_that_the_hub_does_not_hold_is_none(hub):
    drop_tokenizer(hub.repository)
    assert load_tokenizer(Source("someone/model")) is None


@pytest.mark.slow
def test_a_dry_run_of_a_hub_name_fetches_no_weights(folder, tmp_path, monkeypatch):
    """Only config and headers: the estimate is that of the folder, but for the time."""
    headers = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        headers[name] = SimpleNamespace(shape=list(tensor.shape), dtype="F32")
    snapshot = in_the_cache(folder, "someone/model", tmp_path / "cache", monkeypatch)
    options = {"recipe": "heuristic,sparsegpt", "data": zoo.tiny_ids(4, 12), "output": tmp_path / "out"}
    expected = permtriton.dry_run(str(folder), **options)
    assert permtriton.dry_run("someone/model", **options).forecast.seconds
    (snapshot / "model.safetensors").unlink()
    asked = []

    def metadata(_api: object, name: str, revision: str | None) -> SimpleNamespace:
        asked.append((name, revision))
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=headers)})

    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", metadata)
    found = permtriton.dry_run("someone/model", **options)
    assert asked == [("someone/model", None)]
    assert not found.forecast.seconds
    assert (found.parameters, found.pruned_parameters) == (expected.parameters, expected.pruned_parameters)
    assert found.forecast.disk == expected.forecast.disk
    assert found.forecast.memory.stages == expected.forecast.memory.stages
    half = permtriton.dry_run("someone/model", dtype="bfloat16", **options)
    edit_json(snapshot / "config.json", lambda config: config.pop("dtype"))
    for tensor in headers.values():
        tensor.dtype = "BF16"
    assert permtriton.dry_run("someone/model", **options).forecast.memory.model == half.forecast.memory.model
    assert 2 * half.forecast.memory.model == found.forecast.memory.model


def test_the_hub_is_asked_for_the_revision_with_the_token(hub):
    source = Source("someone/model", revision="v2", token="secret")
    assert "secret" not in repr(source)
    load_empty_model(source)
    load_model(source)
    assert {*hub.calls} == {("v2", "secret"), (hub.snapshot.name, "secret")}


def test_a_lost_connection_to_the_hub_is_one_line(hub):
    """Before anything is fetched, and between the config and the weights."""
    source = Source("someone/model")
    assert source.folder == hub.snapshot
    hub.lost = True
    for use, message in (
        (lambda: load_model(source), r"model\.safetensors is not in the hub's cache, and the hub cannot be reached"),
        (lambda: load_tokenizer(Source("someone/model", revision="v2")), "no such model can be fetched"),
    ):
        with pytest.raises(ModelError, match=rf"{message}.*Name or service") as caught:
            use()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("listed", [True, False], ids=["with a listing", "without"])
def test_a_part_of_a_hub_name_in_the_cache_serves_without_a_network(folder, tmp_path, monkeypatch, listed):
    """As other tools fetch one: what is beside weights and tokenizer may be missing, these and the config may not."""
    snapshot = in_the_cache(folder, "someone/model", tmp_path / "cache", monkeypatch)
    source = Source("someone/model", token="secret")
    if listed:  # of the repository, which the client keeps
        files = {name: {"size": 1, "blob_id": "0"} for name in (*(path.name for path in folder.iterdir()), "LICENSE")}
        (snapshot.parents[1] / "trees").mkdir()
        listing = {"format_version": 1, "files": files}
        (snapshot.parents[1] / "trees" / f"{snapshot.name}.json").write_text(json.dumps(listing))
    model, tokenizer = load_original(source)
    assert all(map(torch.equal, model.parameters(), load_model(Source(str(folder))).parameters()))
    assert tokenizer is not None
    drop_tokenizer(snapshot)
    for file in ("tokenizer_config.json", "model.safetensors", "config.json"):
        (snapshot / file).unlink(missing_ok=True)
        missing = rf"someone/model.* {file} is not in the hub's cache, and the hub cannot be reached: .*connection"
        if listed and file == "config.json":
            missing = r"no such model can be fetched"
        with pytest.raises(ModelError, match=missing) as caught:
            load_original(Source("someone/model", token="secret"))
        assert "\n" not in str(caught.value)
        assert "secret" not in str(caught.value)


def test_what_the_hub_is_known_not_to_have_is_not_missed_without_a_network(folder, tmp_path, monkeypatch):
    snapshot = in_the_cache(folder, "someone/model", tmp_path / "cache", monkeypatch)
    drop_tokenizer(snapshot)
    note = snapshot.parents[1] / ".no_exist" / snapshot.name / "tokenizer_config.json"
    note.parent.mkdir(parents=True)
    note.touch()
    assert load_tokenizer(Source("someone/model")) is None


def test_the_folder_of_a_loaded_model_is_that_of_its_commit_and_is_never_fetched(folder, tmp_path, monkeypatch):
    """The main branch is in the cache, too, and holds an embedder."""
    main = in_the_cache(folder, "someone/model", tmp_path / "cache", monkeypatch)
    loaded = Path(shutil.copytree(main, main.with_name("1" * 40)))
    (main / "modules.json").write_text("[]")

    def fail(*_: object, **__: object) -> str:
        raise AssertionError("fetched")

    model = load_model(Source("someone/model", revision=loaded.name))
    monkeypatch.setattr("permtriton.model.source.snapshot_download", fail)
    monkeypatch.setattr("permtriton.model.source.hf_hub_download", fail)
    assert source_of_loaded(model).folder == loaded
    assert not is_embedder(model)
    permtriton.compile(model, recipe="mask", data=zoo.tiny_ids(4, 12), output=tmp_path / "out")
    assert loaded.name not in (tmp_path / "out" / "config.json").read_text()
    model = LlamaForCausalLM.from_pretrained("someone/model")
    assert source_of_loaded(model).folder == main
    assert is_embedder(model)


@pytest.mark.parametrize("tokenizer", ["someone/model", "a copy"])
def test_a_tokenizer_of_the_same_hub_name_comes_with_all_its_files(folder, tmp_path, monkeypatch, tokenizer):
    (folder / "tokenizer.model").write_text("x")
    in_the_cache(folder, "someone/model", tmp_path / "cache", monkeypatch)
    shutil.copytree(folder, tmp_path / "a copy")
    monkeypatch.chdir(tmp_path)
    options = {"recipe": "mask", "data": zoo.tiny_ids(4, 12), "tokenizer": AutoTokenizer.from_pretrained(tokenizer)}
    permtriton.compile("someone/model", output=tmp_path / "out", **options)
    assert (tmp_path / "out" / "tokenizer.model").exists() == (tokenizer == "someone/model")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"trust_remote_code": "false"}, "trust_remote_code is a str: expected True or False"),
        ({"trust_remote_code": 1}, "trust_remote_code is a int: expected True or False"),
        ({"token": True}, "token is a bool: expected text"),
        ({"token": b"secret"}, "token is a bytes: expected text"),
    ],
)
def test_options_of_another_type_are_refused_without_their_value(option, message):
    with pytest.raises(ConfigError) as caught:
        permtriton.compile("someone/model", data=zoo.tiny_ids(4, 12), **option)
    assert str(caught.value) == message


def test_weights_of_float8_are_checked_to_be_finite():
    """torch has no isfinite of float8, which a quantized folder holds."""
    model = zoo.tiny_llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.requires_grad_(False)
    weight.data = weight.data.to(torch.float8_e4m3fn)
    check_weights(model)
    weight.data.view(torch.uint8)[0, 0] = 0x7F  # NaN
    with pytest.raises(ModelError, match=r"up_proj\.weight: 1 of "):
        check_weights(model)

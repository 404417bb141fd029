"""The files beside a model's weights: which are copied when it is saved, and whether sentence-transformers reads it."""

import json
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from transformers import PreTrainedModel

from permtriton.model.headers import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, checkpoint_files
from permtriton.model.name import DEMO
from permtriton.model.source import BESIDE, MODULES, Source
from permtriton.util.output_files import real_path

LARGEST = 64 * 2**20  # bytes; a larger file is not copied, unless it is in a folder that `MODULES` lists
WRITTEN = ("README.md", CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, "generation_config.json", "permtriton*.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx*", "*.gguf", "*.pkl",
           "*.np[yz]", "*.index.json", "optimizer*", "scheduler*", "trainer_state.json")  # fmt: skip
WITH_THE_TOKENIZER = "additional_chat_templates"
OUTDATED = ("*quant*config*.json", "params.json", "*.sig")  # of the dense weights, or of copies in other formats
OF_A_MODULE = (CONFIG_FILE, WEIGHTS_FILE, "pytorch_model.bin")


def embeds(model: PreTrainedModel) -> bool:
    """Whether a model was loaded from a sentence-transformers folder, whose modules read its hidden states."""
    if not (name := model.name_or_path):
        return False
    source = Source(name).at_commit(model.config)
    if source.folder is None:
        return bool(source.revision) and source.find(MODULES) is not None
    return source.holds(MODULES) or (real_path(source.folder).parent / MODULES).is_file()


def modules_of(source: Source) -> list[str]:
    """Returns the subfolders that the file `MODULES` of a model lists; none if it is missing or damaged."""
    if path := source.find(MODULES):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            named = [PurePosixPath(entry["path"]) for entry in json.loads(path.read_text(encoding="utf-8"))]
            return [str(path) for path in named if path.parts and ".." not in path.parts and not path.is_absolute()]
    return []


def fetch_beside(source: Source) -> list[str]:
    """Fetches the files that `beside` names from the hub; returns those of `BESIDE` that could not be looked up."""
    unknown = source.fetch(BESIDE)
    source.fetch(beside(source))
    return unknown


def beside(source: Source) -> list[str]:
    """Returns the names of the files to copy when a model is saved; on the hub, not all of them need exist.

    In a folder, these are its files except weights and large ones, and all files in the subfolders of `MODULES`.
    """
    if source.gguf is not None or source.name == DEMO:
        return []
    if source.folder is None:
        return [*BESIDE, *(f"{folder}/{name}" for folder in modules_of(source) for name in OF_A_MODULE)]
    return sorted(name for name, comes in _files(source.folder, modules_of(source)) if comes)


def left_out(source: Source) -> list[str]:
    """Returns the names in a model's folder that are not copied: copies of the weights, large files, subfolders."""
    if source.gguf is not None or source.folder is None or source.name == DEMO:
        return []
    modules = modules_of(source)
    weights = {file.name for file in checkpoint_files(source.folder)}
    inside = {WITH_THE_TOKENIZER, *(name.split("/")[0] for name in modules)}
    folders = [f"{path.name}/" for path in source.folder.iterdir() if path.is_dir() and path.name not in inside]
    files = [name for name, comes in _files(source.folder, modules) if not comes and name not in weights]
    return [name for name in sorted([*folders, *files]) if not name.startswith((".", "_")) and not _is(name, WRITTEN)]


def _files(folder: Path, modules: list[str]) -> Iterator[tuple[str, bool]]:
    """Yields the name of each file of a folder, and whether it is copied when the model is saved."""
    for path in folder.iterdir():
        if path.is_file():
            small = path.stat().st_size <= LARGEST
            hidden = path.name.startswith(".")
            yield path.name, small and not hidden and not _is(path.name, (*WRITTEN, *WEIGHTS, *OUTDATED))
    for module in modules:
        for path in (folder / module).rglob("*"):
            if path.is_file():
                yield str(path.relative_to(folder)), True


def _is(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name.lower(), pattern.lower()) for pattern in patterns)

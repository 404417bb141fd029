"""The files that are copied when a pruned model is saved: licences, code, and further modules with their weights."""

import json
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import PurePosixPath

from transformers import PreTrainedModel

from permtriton.model.headers import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from permtriton.model.name import DEMO
from permtriton.model.source import MODULES, Source, source_of_loaded
from permtriton.util.output_files import real_path

LARGEST = 64 * 2**20  # bytes; a larger file is not copied, unless it is in a folder that `MODULES` lists
WRITTEN = ("README.md", CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, "generation_config.json", "permtriton*.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx*", "*.gguf", "*.pkl",
           "*.np[yz]", "*.index.json", "optimizer*", "scheduler*", "trainer_state.json")  # fmt: skip
OUTDATED = ("*quant*config*.json", "params.json", "*.sig")  # of the dense weights, or of copies of them


def is_embedder(model: PreTrainedModel) -> bool:
    """Whether a model was loaded from sentence-transformers, with further modules that read its hidden states."""
    source = source_of_loaded(model)
    return source is not None and any((f / MODULES).is_file() for f in (source.folder, real_path(source.folder).parent))


def module_folders(source: Source) -> list[str]:
    """Returns the subfolders that the file `MODULES` of a model lists; none if it is missing or damaged."""
    if path := source.find(MODULES):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            named = [PurePosixPath(entry["path"]) for entry in json.loads(path.read_text(encoding="utf-8"))]
            return [str(path) for path in named if path.parts and ".." not in path.parts and not path.is_absolute()]
    return []


def copied_files(source: Source) -> list[str]:
    """Returns the names of the files to copy when a model is saved.

    These are all files in the subfolders that `MODULES` lists, and the folder's own files except weights, large,
    hidden and outdated files, and those that are written anew. A GGUF file and the demo have none.
    """
    if source.gguf is not None or source.name == DEMO:
        return []
    folder, modules = source.folder, module_folders(source)
    small = [path.name for path in folder.iterdir() if path.is_file() and path.stat().st_size <= LARGEST]
    stays = [pattern.lower() for pattern in (".*", *WRITTEN, *WEIGHTS, *OUTDATED)]
    copied = [name for name in small if not any(fnmatch(name.lower(), pattern) for pattern in stays)]
    inside = [path for module in modules for path in (folder / module).rglob("*") if path.is_file()]
    return sorted([*copied, *(str(path.relative_to(folder)) for path in inside)])

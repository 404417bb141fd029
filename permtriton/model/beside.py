"""What stands beside a model's weights: which files come along where it is saved, and do others read its states?"""

import json
from contextlib import suppress
from pathlib import Path, PurePosixPath

from transformers import PreTrainedModel

from permtriton.model.headers import CONFIG_FILE, WEIGHTS_FILE
from permtriton.model.name import DEMO
from permtriton.model.source import BESIDE, MODULES, Source
from permtriton.model.tokenizer import REMADE, TOKENIZERS
from permtriton.util.output_files import real_path

OF_A_MODULE = (CONFIG_FILE, WEIGHTS_FILE, "pytorch_model.bin")


def embeds(model: PreTrainedModel) -> bool:
    """Whether a model is part of a folder of sentence-transformers, which reads its hidden states."""
    if not (name := model.name_or_path):
        return False
    source = Source(name).at_commit(model.config)
    if source.folder is None:
        return bool(source.revision) and source.find(MODULES) is not None
    return source.holds(MODULES) or (real_path(source.folder).parent / MODULES).is_file()


def modules_of(source: Source) -> list[str]:
    """Returns the folders that `MODULES` names in the model's folder."""
    path = source.find(MODULES)
    return [] if path is None else _named(path)


def _named(path: Path) -> list[str]:
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        named = [PurePosixPath(entry["path"]) for entry in json.loads(path.read_text(encoding="utf-8"))]
        return [str(path) for path in named if path.parts and ".." not in path.parts and not path.is_absolute()]
    return []


def fetch_beside(source: Source) -> list[str]:
    """Fetches what `beside` names of a model of the hub; returns what `Source.fetch` does."""
    unknown = source.fetch(BESIDE)
    source.fetch(beside(source))
    return unknown


def beside(source: Source) -> list[str]:
    """Returns the files that come along where a model is saved, if they are there, such as tokenizers and licences."""
    if source.gguf is not None or source.name == DEMO:
        return []
    names = dict.fromkeys((*BESIDE, *REMADE, *TOKENIZERS, "merges.txt", "chat_template.jinja"))
    return [*names, *(f"{folder}/{name}" for folder in modules_of(source) for name in OF_A_MODULE)]

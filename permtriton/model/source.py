"""The source of a model: a folder, the hub, a GGUF file or the demo, with its device and dtype."""

import os
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from transformers import PreTrainedModel

from permtriton import demo
from permtriton.errors import ConfigError, ModelError, reading
from permtriton.model.gguf_file import SUFFIX, GgufFile, in_words, read_gguf
from permtriton.model.headers import CONFIG_FILE
from permtriton.model.name import DEMO, checked_token, is_hub_name, location_of

DTYPES = ("auto", "float32", "float16", "bfloat16")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
LEGACY_TEMPLATE = "chat_template.json"  # a processor's; a tokenizer's is saved with the tokenizer
MODULES = "modules.json"  # of sentence-transformers: lists the modules that read hidden states
# Patterns of the files that are fetched from the hub beside the weights: configs, tokenizers and licences. No pickles.
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.spm", "*.codes", "*.tokenizer", "*.tiktoken", "*.jinja",
               "LICENSE*", "NOTICE*", "USE_POLICY.md")  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Where a model comes from and how to read it."""

    name: str  # folder, hub name, ``demo``, or path of a GGUF file
    dtype: str = "auto"  # ``auto`` (the checkpoint's dtype), ``float32``, ``float16`` or ``bfloat16``
    device: str = "auto"  # ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``
    trust_remote_code: bool = False  # whether code that comes with the model may run
    # name of a GGUF file in the folder or the repository ``name``; None if the model is in safetensors, or if ``name``
    # is the file itself
    gguf_file: str | None = None
    revision: str | None = None  # branch, tag or commit of a hub name; None for its main branch
    # token of the hub; None for that of ``hf auth login`` or ``HF_TOKEN``. It is never printed or saved.
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for part in fields(self):
            if not isinstance(value := getattr(self, part.name), cast(type, part.type)):
                expected = "True or False" if part.type is bool else "text"
                # Only the type is named: the value may be a token.
                raise ConfigError(f"{part.name} is a {type(value).__name__}: expected {expected}")
        object.__setattr__(self, "token", checked_token(self.token))

    @property
    def _is_file(self) -> bool:
        """Whether the name is the path of a GGUF file."""
        return self.gguf_file is None and self.name.endswith(SUFFIX) and not os.path.isdir(self.name)

    @property
    def on_hub(self) -> bool:
        return is_hub_name(self.name) and not self.name.endswith(SUFFIX)

    @cached_property
    def folder(self) -> Path:
        """The model's folder, or that of its GGUF file; for a hub name, the folder in the hub's cache.

        Of a hub name, the `SMALL_FILES` that are in no subfolder are fetched, and the code if it may run; or the GGUF
        file. Without a network, the folder is what the cache holds.
        """
        if self.name == DEMO:
            return demo.FOLDER
        if self._is_file:
            return Path(self.name).parent
        if self.on_hub and self.gguf_file is not None:
            return self.fetch(self.revision, [self.gguf_file])
        if self.on_hub:
            return self.fetch(self.revision, [*SMALL_FILES, *(["*.py"] * self.trust_remote_code)], ignored="*/*")
        # `os.path.isdir`, unlike `Path.is_dir`, takes names that are too long.
        if not os.path.isdir(self.name):
            problem = "is not a folder" if os.path.exists(self.name) else "does not exist"
            raise ModelError(
                f"{self.name} {problem}: give a Hugging Face model folder, a .gguf file, a hub name, or demo"
            )
        return Path(self.name)

    def fetch(self, revision: str | None, patterns: list[str], ignored: str | None = None) -> Path:
        """Fetches the files of a hub name that fit one of ``patterns``, but not ``ignored``; returns their folder.

        Without a network, returns the folder of config.json in the hub's cache, in which files may be missing.
        """
        cannot = "there is no such folder, and no such model can be fetched from the hub (check the name, the network, "
        with reading(f"{self.name}: {cannot}and the token, from hf auth login or HF_TOKEN)", ModelError):
            try:
                loading: dict[str, Any] = {"revision": revision, "token": self.token, "ignore_patterns": ignored}
                return Path(snapshot_download(self.name, allow_patterns=patterns, **loading))
            except LocalEntryNotFoundError:
                config = try_to_load_from_cache(self.name, CONFIG_FILE, revision=revision)
                if self.gguf_file is not None or not isinstance(config, str):
                    raise
                return Path(config).parent

    def has(self, file: str) -> bool:
        """Whether the model has a file; one of a hub name that the cache lacks is fetched.

        Raises:
            ModelError: the cache lacks the file, and the hub cannot be reached.
        """
        cached = self.on_hub and self.gguf_file is None
        # The cache also notes which files the hub does not have.
        if cached and try_to_load_from_cache(self.name, file, revision=self.folder.name) is None:
            cannot = f"{self.name}: {file} is not in the hub's cache, and the hub cannot be reached"
            with reading(cannot, ModelError), suppress(RemoteEntryNotFoundError):
                hf_hub_download(self.name, file, revision=self.folder.name, token=self.token)
        return self.find(file) is not None

    @cached_property
    def gguf(self) -> GgufFile | None:
        """The GGUF file from which the model is read and dequantized; None where its weights are in safetensors."""
        if self.gguf_file is None and not self._is_file:
            return None
        path = Path(self.name) if self.gguf_file is None else self.folder / self.gguf_file
        if not path.is_file():
            raise ModelError(f"{path} does not exist: give a GGUF file, a Hugging Face model folder or a name")
        return read_gguf(path)

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of every ``from_pretrained`` besides the folder."""
        # Absolute, because transformers would read a file name without a folder from the current folder.
        file = {} if self.gguf is None else {"gguf_file": str(self.gguf.path.absolute())}
        return {"trust_remote_code": self.trust_remote_code, "token": self.token, **file}

    @property
    def described(self) -> str:
        """The name, and what a GGUF file holds; raises the errors of `gguf`."""
        if self.gguf is None:
            return self.name
        file = "" if self.gguf_file is None else f" from {self.gguf_file}"
        return f"{self.name}, dequantized{file}: {in_words(self.gguf.types)}"

    def find(self, file: str) -> Path | None:
        """Returns the path of ``file`` in the folder; None if there is none. Files beside a GGUF file are not used."""
        path = self.folder / file
        return path if self.gguf is None and os.path.isfile(path) else None

    def at_commit(self) -> "Source":
        """Returns the source; the revision of a hub name becomes the commit that was read."""
        return replace(self, revision=self.folder.name) if self.on_hub else self


def source_of_loaded(model: Any) -> Source | None:
    """Returns the folder that a model in memory was loaded from; for a hub name, that in the hub's cache.

    None if the model was made in memory, or the folder is gone. Nothing is fetched.
    """
    name = str(getattr(model, "name_or_path", ""))
    if not is_hub_name(name):
        return Source(name) if os.path.isdir(name) else None
    # Noted by `load_model` and by some versions of transformers.
    commit = getattr(getattr(model, "config", None), "_commit_hash", None)
    config = try_to_load_from_cache(name, CONFIG_FILE, revision=commit)
    return Source(str(Path(config).parent)) if isinstance(config, str) else None


def source_of(model: PreTrainedModel | str | Path, **loading: Any) -> Source | PreTrainedModel:
    """Returns the `Source` of a name or path, or a loaded model itself; refuses options of loading for the latter."""
    if isinstance(model, str | Path):
        return Source(location_of(model), **loading)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model is a {type(model).__name__}: expected a folder, a hub name, demo, or a transformers model"
        )
    if Source("", **loading) != Source(""):
        raise ConfigError(
            "`device=`, `dtype=`, `trust_remote_code=`, `gguf_file=`, `revision=` and `token=` have no effect on a "
            "loaded model: leave them out"
        )
    return model


def resolve_device(device: str) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {device!r} is unknown: choose auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device cuda: this machine has no usable CUDA GPU (or torch is a CPU build); use `device=cpu`"
        )
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def dtype_of(source: Source) -> torch.dtype | str:
    if source.dtype not in DTYPES:
        raise ConfigError(f"dtype {source.dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    return source.dtype if source.dtype == "auto" else getattr(torch, source.dtype)

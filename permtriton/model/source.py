"""The source of a model: a folder, the hub, a GGUF file or the demo, with its device and dtype."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel
from transformers.utils import cached_file

from permtriton import demo
from permtriton.errors import ConfigError, ModelError, reading
from permtriton.model.gguf_file import SUFFIX, GgufFile, in_words, read_gguf
from permtriton.model.headers import CONFIG_FILE
from permtriton.model.name import checked_token, is_hub_name, location_of

DTYPES = ("auto", "float32", "float16", "bfloat16")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
LEGACY_TEMPLATE = "chat_template.json"  # a processor's; a tokenizer's is saved with the tokenizer
MODULES = "modules.json"  # of sentence-transformers: lists the modules that read hidden states


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

    @cached_property
    def gguf(self) -> GgufFile | None:
        """The GGUF file from which the model is read and dequantized; None where its weights are in safetensors."""
        if self.name.endswith(SUFFIX) and not os.path.isdir(self.name) and self.gguf_file is None:
            if not os.path.isfile(self.name):
                raise ModelError(f"{self.name} does not exist: give a GGUF file, a Hugging Face model folder or a name")
            return read_gguf(Path(self.name))
        if self.gguf_file is None:
            return None
        if os.path.isfile(self.name):
            raise ConfigError(
                f"`gguf_file={self.gguf_file}` names a file in a folder, but {self.name} is a file itself: leave "
                "`gguf_file=` out, or give the folder"
            )
        with reading(f"{self.name} holds no {self.gguf_file}, and none can be fetched from the hub", ModelError):
            return read_gguf(Path(str(cached_file(self.name, self.gguf_file, **self.hub))))

    @property
    def hub(self) -> dict[str, str]:
        """Arguments of a request to the hub besides the name."""
        options = {"revision": self.revision, "token": self.token}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of every ``from_pretrained`` besides the location."""
        # Absolute, because transformers would read a file name without a folder from the current folder.
        file = {} if self.gguf is None else {"gguf_file": str(self.gguf.path.absolute())}
        return {"trust_remote_code": self.trust_remote_code, **file, **self.hub}

    @property
    def location(self) -> str:
        if self.gguf is not None:
            return str(self.gguf.path.parent)
        return str(demo.FOLDER) if self.name == "demo" else self.name

    @property
    def described(self) -> str:
        """The name, and what a GGUF file holds; raises the errors of `gguf`."""
        if self.gguf is None:
            return self.name
        file = "" if self.gguf_file is None else f" from {self.gguf_file}"
        return f"{self.name}, dequantized{file}: {in_words(self.gguf.types)}"

    @property
    def folder(self) -> Path | None:
        """The model's folder, or that of its GGUF file; None for a hub name."""
        # `Path.is_dir`, unlike `os.path.isdir`, fails on names that are too long.
        return Path(self.location) if os.path.isdir(self.location) else None

    @property
    def snapshot(self) -> Path | None:
        """The model's folder or, for a hub name, the folder of its config in the hub's cache; None if there is none."""
        if self.folder is not None:
            return self.folder
        config = try_to_load_from_cache(self.location, CONFIG_FILE, revision=self.revision)
        return Path(config).parent if isinstance(config, str) else None

    def find(self, file: str) -> Path | None:
        """Returns the path of ``file`` in the folder, or from the hub or its cache; None if there is none.

        Files beside a GGUF file are not used.
        """
        if self.folder is not None:
            path = Path(self.location, file)
            return path if self.gguf is None and os.path.isfile(path) else None
        advice = "check the name, the network, and the token (from hf auth login, or HF_TOKEN)"
        with reading(f"{self.location}: {file} cannot be fetched from the hub ({advice})", ModelError):
            path = cached_file(
                self.location,
                file,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_connection_errors=False,
                **self.hub,
            )
        return Path(str(path)) if path else None

    def fetch(self, files: Iterable[str]) -> list[str]:
        """Fetches files of a hub name into the cache; returns those that could not be looked up there."""
        missing = [file for file in files if self.folder is None and self.find(file) is None]
        return [file for file in missing if try_to_load_from_cache(self.location, file, revision=self.revision) is None]

    def at_commit(self, config: Any) -> "Source":
        """Returns the source; the revision of a hub name becomes the commit that was read, if the commit is known.

        Args:
            config: config of the model that was read, in which some versions of transformers note the commit.
        """
        if self.gguf_file is not None or not is_hub_name(self.name):
            return self
        cached = self.snapshot.name if self.snapshot else None
        return replace(self, revision=getattr(config, "_commit_hash", None) or cached or self.revision)


def source_of_loaded(model: Any) -> Source | None:
    """Returns where a model in memory was loaded from; None if it was made in memory, or its folder is gone."""
    source = Source(str(getattr(model, "name_or_path", ""))).at_commit(getattr(model, "config", None))
    return source if source.folder or source.revision else None


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

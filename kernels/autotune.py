"""Chooses the configuration of a launch: the fastest one measured on this GPU, else the first of the kernel's table.

Measured winners are in a file of the user's cache folder, which is read once, at the first launch on a GPU; after that,
a lookup is one dictionary access. Launchers run inside opaque operators, so ``torch.compile`` does not trace them.

Entries are keyed by shape, with the first number (rows or tokens) rounded up to a power of two, so that similar token
counts share one measurement.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from permtriton.errors import OutputError
from permtriton.kernels.launch import Config, triton
from permtriton.util.durable import locked_folder, replace_file

VERSION = 1


@dataclass(frozen=True)
class Request:
    """One call of `config_for`: which table, for which shape, and which configurations were forced then."""

    op: str
    configs: tuple[Config, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    forced: Mapping[str, Config] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> str:
        """Returns the key of the request's entry in a cache file."""
        return entry_key(self.op, self.shape, self.dtype)


@dataclass
class _State:
    """State of the process: entries read from the file, and configurations that are forced."""

    measured: dict[tuple[str, tuple[int, ...], torch.dtype, int], Any] = field(default_factory=dict)
    decisions: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # arguments of `decided` -> its result
    entries: dict[int, dict[str, Any]] = field(default_factory=dict)  # by device; key -> stored configuration
    forced: Mapping[str, Config] = field(default_factory=dict)
    requests: list[Request] | None = None
    choices: dict[str, str] | None = None

    def forget(self) -> None:
        """Makes the next launch read the file again."""
        self.measured.clear()
        self.decisions.clear()
        self.entries.clear()


_STATE = _State()


def config_for(
    op: str, configs: Sequence[Config], shape: Sequence[int], dtype: torch.dtype, searched: bool = False
) -> Config:
    """Returns the configuration to launch a kernel in.

    Args:
        op: Name of the table, such as "permute" or "sinkhorn_backward".
        configs: The table; the first configuration is the default.
        shape: The numbers that the choice depends on, rows or tokens first.
        dtype: Dtype of the data moved.
        searched: Whether a library finds configurations by its own search, which ``configs`` need not hold.
    """
    if _STATE.requests is not None:
        return _requested(op, configs, shape, dtype)
    config = _chosen(op, configs, shape, dtype, searched)
    if _STATE.choices is not None:
        _STATE.choices[entry_key(op, shape, dtype)] = describe(config)
    return config


def _chosen(op: str, configs: Sequence[Config], shape: Sequence[int], dtype: torch.dtype, searched: bool) -> Config:
    if op in _STATE.forced:
        return _STATE.forced[op]
    entry = _measured(op, shape, dtype)
    if entry is None:
        return configs[0]
    if searched:
        return Config(**entry)
    # A stored configuration is used only if ``configs`` holds it: the table may have changed, or a call exclude it.
    return next((config for config in configs if stored(config) == entry), configs[0])


def decided(key: tuple[Any, ...], decide: Callable[..., Any]) -> Any:
    """Returns ``decide(*key)``, which calls `config_for`, and caches the result.

    While configurations are forced or collected, or a CUDA graph is captured, no result is cached, because it need not
    hold afterwards.
    """
    state = _STATE
    if state.forced or state.requests is not None or state.choices is not None:
        return decide(*key)
    if key not in state.decisions:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return decide(*key)
        state.decisions[key] = decide(*key)
    return state.decisions[key]


def is_open(op: str, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether CUDA is in use, and a configuration was neither measured on this GPU nor forced."""
    return op not in _STATE.forced and torch.cuda.is_initialized() and _measured(op, shape, dtype) is None


def keep(op: str, shape: Sequence[int], dtype: torch.dtype, config: Config) -> None:
    """Stores a configuration that a library chose on this GPU, for this process and, if possible, for later ones."""
    with suppress(OutputError):
        write_entries(cache_file(), machine_key(), {entry_key(op, shape, dtype): {"config": stored(config)}})
    _STATE.measured[op, bucket(shape), dtype, torch.cuda.current_device()] = stored(config)


def bucket(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape with its first number rounded up to a power of two."""
    return (1 << max(int(shape[0]) - 1, 0).bit_length(), *map(int, shape[1:])) if len(shape) else ()


def entry_key(op: str, shape: Sequence[int], dtype: torch.dtype) -> str:
    """Returns ``op 2048x4096 bfloat16``, the shape's first number rounded up as `bucket` does."""
    return f"{op} {'x'.join(map(str, bucket(shape)))} {str(dtype).removeprefix('torch.')}"


def machine_key(device: int | None = None) -> str:
    """Returns what measured times depend on besides op, shape and dtype: the GPU, and the versions of libraries."""
    there = torch.backends.cusparselt.is_available()
    cusparselt = f", cuSPARSELt {torch.backends.cusparselt.version()}" if there else ""
    return f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}, torch {torch.__version__}{cusparselt}"


def cache_folder() -> Path:
    """Returns the folder for what is measured or compiled once: ``permtriton`` in ``$XDG_CACHE_HOME`` or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "permtriton"


def cache_file() -> Path:
    """Returns this user's file of the fastest configurations measured, by GPU and versions of libraries."""
    return cache_folder() / "autotune.json"


def forced(op: str, config: Config) -> AbstractContextManager[Mapping[str, Config]]:
    """Within the context, makes every launch that reads the table ``op`` use ``config``."""
    return forcing({op: config})


def forcing(configs: Mapping[str, Config]) -> AbstractContextManager[Mapping[str, Config]]:
    """Within the context, makes launches use these configurations, by table."""
    return _within("forced", {**_STATE.forced, **configs})


def requests() -> AbstractContextManager[list[Request]]:
    """Within the context, collects the calls of `config_for`: each table and shape once, in order."""
    return _within("requests", [])


def choices() -> AbstractContextManager[dict[str, str]]:
    """Within the context, collects the configuration of each launch, by table and shape, and the entries of `note`."""
    return _within("choices", {})


@contextmanager
def _within(attribute: str, value: Any) -> Iterator[Any]:
    before = getattr(_STATE, attribute)
    setattr(_STATE, attribute, value)
    try:
        yield value
    finally:
        setattr(_STATE, attribute, before)


def note(what: str, choice: str) -> None:
    """Adds an entry inside the context of `choices`, such as ``note("route 16x4096x4096", "mma")``."""
    if _STATE.choices is not None:
        _STATE.choices[what] = choice


def collecting() -> bool:
    """Whether this is inside the context of `requests`, in which tuning collects what to try."""
    return _STATE.requests is not None


def describe(config: Config) -> str:
    """Returns ``BLOCK=128 num_warps=4 num_stages=2``, the key of a trial in a cache file."""
    return " ".join(f"{name}={value}" for name, value in config.arguments().items())


def stored(config: Config) -> dict[str, Any]:
    """Returns a configuration as cache files store it."""
    return {"constants": dict(config.constants), "num_warps": config.num_warps, "num_stages": config.num_stages}


def read_entries(path: Path, machine: str) -> dict[str, Any]:
    """Returns a cache file's entries for a machine; none if the file does not exist.

    A damaged file is ignored with a warning.
    """
    return _read(path).get(machine, {})


def write_entries(path: Path, machine: str, entries: Mapping[str, Any]) -> None:
    """Adds entries to a cache file; other processes may write theirs at the same time, and none reads half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked_folder(path.parent):
            machines = _read(path)
            machines.setdefault(machine, {}).update(entries)
            text = json.dumps({"version": VERSION, "machines": machines}, indent=1, sort_keys=True)
            replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise OutputError(f"{path}: cannot write measured configurations: {error.strerror}") from error
    _STATE.forget()


def _requested(op: str, configs: Sequence[Config], shape: Sequence[int], dtype: torch.dtype) -> Config:
    """Records a request; returns the forced or default configuration, so that measurements do not alter later ones."""
    assert _STATE.requests is not None
    request = Request(op, tuple(configs), tuple(map(int, shape)), dtype, _STATE.forced)
    if request.key not in {known.key for known in _STATE.requests}:
        _STATE.requests.append(request)
    return _STATE.forced.get(op, configs[0])


def _measured(op: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any] | None:
    """Returns the stored fastest configuration on the current GPU, or None; looks it up once."""
    if triton is None or not torch.cuda.is_initialized():
        return None
    key = (op, bucket(shape), dtype, torch.cuda.current_device())
    if key not in _STATE.measured:
        _STATE.measured[key] = _look_up(*key)
    return _STATE.measured[key]


def _look_up(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> dict[str, Any] | None:
    if device not in _STATE.entries:
        _STATE.entries[device] = _load(device)
    return _STATE.entries[device].get(entry_key(op, shape, dtype))


def _load(device: int) -> dict[str, Any]:
    entries = read_entries(cache_file(), machine_key(device))
    return {key: entry["config"] for key, entry in entries.items()}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        return _ignored(path, str(error))
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            return _ignored(path, f"it has version {content['version']!r}, this permtriton reads {VERSION}")
        return dict(content["machines"])
    except (ValueError, KeyError, TypeError) as error:
        return _ignored(path, f"it is damaged ({type(error).__name__}: {error})")


def _ignored(path: Path, why: str) -> dict[str, dict[str, Any]]:
    warnings.warn(
        f"{path}: {why}; its measured configurations are ignored: run permtriton autotune again, or delete the file",
        UserWarning,
        stacklevel=3,
    )
    return {}

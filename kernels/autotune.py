"""Chooses the configuration of a launch: the fastest one measured on this GPU, else the first of the kernel's table.

Measured winners are in a file of the user's cache folder, which is read once, at the first launch on a GPU; after that,
a lookup is one dictionary access. Launchers run inside opaque operators, so ``torch.compile`` does not trace them.

Entries are keyed by table, shape and dtype, with the shape's first number (rows or tokens) rounded up to a power of
two, so that similar token counts share one measurement.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from permtriton.errors import OutputError
from permtriton.kernels.launch import Config, triton
from permtriton.util.durable import locked_folder, replace_file

VERSION = 1


@dataclass(frozen=True)
class Request:
    """One call of `config_for`: the key of its cache entry, its table, and the configurations that were forced."""

    key: str
    op: str
    configs: tuple[Config, ...]
    forced: Mapping[str, Config]


@dataclass
class _State:
    """State of the process: what was read from the file, what was decided, and what is forced or collected."""

    fastest: dict[int, dict[str, Config]] = field(default_factory=dict)  # device -> key -> configuration
    decisions: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # arguments of `decided` -> its result
    forced: Mapping[str, Config] = field(default_factory=dict)
    requests: dict[str, Request] | None = None  # key -> request
    choices: dict[str, str] | None = None

    def forget(self) -> None:
        """Makes the next launch read the file again."""
        self.fastest.clear()
        self.decisions.clear()


_STATE = _State()


def config_for(
    op: str,
    configs: Sequence[Config],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    search: Callable[[], Config | None] | None = None,
) -> Config:
    """Returns the configuration to launch a kernel in.

    Args:
        op: Name of the table, such as "permute" or "sinkhorn_backward".
        configs: The table; the first configuration is the default.
        shape: The numbers that the choice depends on, rows or tokens first.
        dtype: Dtype of the data moved.
        search: Returns a configuration that a library finds, which ``configs`` need not hold, or None. Called on a GPU
            if none was measured or is forced, and then its result is kept; also called while requests are collected.
    """
    key = entry_key(op, shape, dtype)
    if _STATE.requests is not None:  # the default unless forced, so that no measurement alters later ones
        tried = tuple(dict.fromkeys(filter(None, [*configs, search() if search is not None else None])))
        _STATE.requests.setdefault(key, Request(key, op, tried, _STATE.forced))
        return _STATE.forced.get(op, configs[0])
    if op in _STATE.forced:
        config = _STATE.forced[op]
    else:  # what was measured is used only if ``configs`` holds it: the table may have changed, or a call exclude it
        best = _fastest().get(key)
        if best is None and search is not None and torch.cuda.is_initialized() and (best := search()) is not None:
            _keep(key, best)
        config = best if best is not None and (search is not None or best in configs) else configs[0]
    note(key, config)
    return config


def decided(decide: Callable[..., Any], *arguments: Any) -> Any:
    """Returns ``decide(*arguments)``, which calls `config_for`, and caches the result.

    While configurations are forced or collected, or a CUDA graph is captured, no result is cached, because it need not
    hold afterwards.
    """
    state, key = _STATE, (decide, *arguments)
    if state.forced or state.requests is not None or state.choices is not None:
        return decide(*arguments)
    if key not in state.decisions:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return decide(*arguments)
        state.decisions[key] = decide(*arguments)
    return state.decisions[key]


def _keep(key: str, config: Config) -> None:
    """Stores what `config_for`'s ``search`` found on this GPU, for this process and, if possible, for later ones."""
    with suppress(OutputError):
        write_entries(cache_file(), machine_key(), {key: {"config": asdict(config)}})
    _fastest()[key] = config


def bucket(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape with its first number rounded up to a power of two."""
    return (1 << max(int(shape[0]) - 1, 0).bit_length(), *map(int, shape[1:])) if len(shape) else ()


@lru_cache(1 << 12)
def entry_key(op: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Returns a key such as ``op 2048x4096 bfloat16``, with the shape's first number rounded up as by `bucket`."""
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


def forced(configs: Mapping[str, Config]) -> AbstractContextManager[Mapping[str, Config]]:
    """Within the context, launches take their configuration from ``configs``, by the name of their table."""
    return _replaced("forced", {**_STATE.forced, **configs})


def requests() -> AbstractContextManager[dict[str, Request]]:
    """Within the context, collects the calls of `config_for`, in order, the first for each `entry_key`."""
    return _replaced("requests", {})


def choices() -> AbstractContextManager[dict[str, str]]:
    """Within the context, collects the configuration of each launch, by `entry_key`, and the entries of `note`."""
    return _replaced("choices", {})


@contextmanager
def _replaced(attribute: str, value: Any) -> Iterator[Any]:
    before = getattr(_STATE, attribute)
    setattr(_STATE, attribute, value)
    try:
        yield value
    finally:
        setattr(_STATE, attribute, before)


def note(what: str, choice: Config | str) -> None:
    """Adds an entry inside the context of `choices`, such as ``note("route 16x4096x4096", "mma")``."""
    if _STATE.choices is not None:
        _STATE.choices[what] = choice if isinstance(choice, str) else describe(choice)


def describe(config: Config) -> str:
    """Returns the key of a trial in a cache file, such as ``BLOCK=128 num_warps=4 num_stages=2``."""
    return " ".join(f"{name}={value}" for name, value in config.arguments().items())


def read_entries(path: Path, machine: str) -> dict[str, Any]:
    """Returns a cache file's entries for a machine; none if the file does not exist or, with a warning, is damaged."""
    return _machines(path).get(machine, {})


def write_entries(path: Path, machine: str, entries: Mapping[str, Any]) -> None:
    """Adds entries to a cache file; other processes may write theirs at the same time, and none reads half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked_folder(path.parent):
            machines = _machines(path)
            machines.setdefault(machine, {}).update(entries)
            text = json.dumps({"version": VERSION, "machines": machines}, indent=1, sort_keys=True)
            replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise OutputError(f"{path}: cannot write measured configurations: {error.strerror}") from error
    _STATE.forget()


def _fastest() -> dict[str, Config]:
    """Returns the configurations that were measured on the current GPU, by key; reads the file once."""
    if triton is None or not torch.cuda.is_initialized():
        return {}
    device = torch.cuda.current_device()
    if device not in _STATE.fastest:
        entries = read_entries(cache_file(), machine_key(device))
        _STATE.fastest[device] = {key: Config(**entry["config"]) for key, entry in entries.items()}
    return _STATE.fastest[device]


def _machines(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(path.read_bytes())
        if content["version"] == VERSION:
            return dict(content["machines"])
        why = f"it has version {content['version']!r}, this permtriton reads {VERSION}"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"it cannot be read ({type(error).__name__}: {error})"
    warnings.warn(
        f"{path}: {why}; its measured configurations are ignored: run permtriton autotune again, or delete the file",
        UserWarning,
        stacklevel=3,
    )
    return {}

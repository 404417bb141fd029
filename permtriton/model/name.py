"""Names of models, and of the modules inside them."""

import os
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

from permtriton.errors import ConfigError

DEMO = "demo"


def shown_name(model: str, on_hub: bool | None = None) -> str:
    """Returns the name of a model for others to read: a hub name unchanged, a folder without the path to it.

    Args:
        model: empty for a model that was made in memory, which is called ``MODEL``.
        on_hub: whether ``model`` is a hub name; None to decide by `is_hub_name`.
    """
    if model in ("", DEMO):
        return model or "MODEL"
    if is_hub_name(model) if on_hub is None else on_hub:
        return model
    name = os.path.basename(os.path.abspath(model))
    return f"./{name}" if name == DEMO or name.startswith("-") else name  # else it would be the demo, or an option


def location_of(model: str | Path) -> str:
    """Returns the name that loads a model; the `Path` of a folder ``demo`` becomes ``./demo``, which is not `DEMO`."""
    return f"./{model}" if isinstance(model, Path) and str(model) == DEMO and model.is_dir() else str(model)


def lasting_name(model: str) -> str:
    """Returns the name of a model that stays valid in another working directory: paths become absolute."""
    return os.path.abspath(model) if model != DEMO and os.path.exists(model) else model


def is_hub_name(model: str) -> bool:
    """Whether ``model`` can only be a hub name: it has that form, and is neither a path here nor the demo."""
    return bool(re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", model)) and model != DEMO and not os.path.exists(model)


def checked_token(token: str | None) -> str | None:
    """Returns a token of the hub without the white space around it; refuses one with characters that no token has."""
    if token is not None and not re.fullmatch(r"[!-~]+", token := token.strip()):
        raise ConfigError("`token=` is empty, or holds a space or a letter that no token of the hub has: check it")
    return token


def layer_number(module: str) -> int | None:
    """Returns the first number in a module's name, that of its layer: 3 in ``model.layers.3.mlp``; else None."""
    return next((int(part) for part in module.split(".") if part.isdecimal()), None)


def shared_parts(modules: Iterable[Sequence[str]]) -> list[str]:
    """Returns the parts with which the names of all modules begin; each name is a sequence of parts."""
    return [parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, zip(*modules, strict=False))]

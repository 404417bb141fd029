"""The options that a command starts from, and the command line that repeats a compilation."""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from permtriton.config import OPTIONS, RECIPES, CompileConfig, check_explicit_options
from permtriton.errors import ConfigError

DEMO = "demo"


def config_for(model: str, options: Mapping[str, Any], recipe: str | None = None) -> CompileConfig:
    """Returns the config of a command: options over a recipe. The demo model takes its own text and small settings.

    Args:
        model: folder, hub name, or ``demo``.
        options: values by option name.
        recipe: a key of `RECIPES`; None for the recipe that the model takes by default.

    Raises:
        ConfigError: an unknown option or recipe, or a value that is not allowed.
    """
    chosen = recipe or _default_recipe(model)
    small = RECIPES[DEMO] if model == DEMO and chosen in ("best", "fast") else {}
    text = {"calibration": DEMO} if model == DEMO else {}
    return CompileConfig.from_options({**small, **text, **options}, chosen)


def compile_command(model: str, config: CompileConfig, **running: str | bool | None) -> str:
    """Returns a ``permtriton compile`` command with the same result, in as few options as possible.

    Folders are named without their path, which is nobody else's: the command is run where the model and the text are.

    Args:
        model: folder, hub name, or ``demo``.
        config: every option.
        running: further flags by name, with dashes for underscores; None and False leave a flag out.
    """
    name = shown_name(model)
    candidates = {recipe: _flags(name, config, recipe) for recipe in RECIPES}
    same = {recipe: flags for recipe, flags in candidates.items() if _same(config_for(name, flags, recipe), config)}
    own = _default_recipe(name)
    recipe = min(same, key=lambda each: (len(same[each]) + (each != own), each != own))
    words = ["permtriton", "compile", name]
    words += ["--recipe", recipe] if recipe != own else []
    for option, value in same[recipe].items():
        flag = OPTIONS[option].flag
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, Path(value).name if option == "calibration" else str(value)]
    for option, setting in running.items():
        words += [f"--{option.replace('_', '-')}"] * (setting not in (None, False))
        words += [setting] if isinstance(setting, str) else []
    return shlex.join(words)


def shown_name(model: str) -> str:
    """Returns the name of a model for others to read: a hub name as it is, a folder without the path to it.

    A model that was made in memory is ``MODEL``.
    """
    if model in ("", DEMO):
        return model or "MODEL"
    return model if is_hub_name(model) else os.path.basename(os.path.abspath(model))


def is_hub_name(model: str) -> bool:
    """Whether a model's name can only be one on the hub: it has the form of one, and is no folder here or the demo."""
    return bool(re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", model)) and model != DEMO and not Path(model).exists()


def _default_recipe(model: str) -> str:
    return DEMO if model == DEMO else "default"


def _flags(model: str, config: CompileConfig, recipe: str) -> dict[str, Any]:
    """Returns the options that differ from the recipe's and have an effect."""
    start, wanted = config_for(model, {}, recipe).to_dict(), config.to_dict()
    return {name: value for name, value in wanted.items() if value != start[name] and _has_effect(name, config)}


def _same(first: CompileConfig, second: CompileConfig) -> bool:
    one, other = first.to_dict(), second.to_dict()
    return all(one[name] == other[name] for name in OPTIONS if _has_effect(name, second))


def _has_effect(option: str, config: CompileConfig) -> bool:
    try:
        check_explicit_options({option: None}, config)
    except ConfigError:
        return False
    return True

"""Recipes, which are named tuples of steps, and the configs that are made from them.

Values come from the defaults of steps and config, from the recipe, and from the user; later ones take precedence. The
demo model has small settings in place of defaults.
"""

import shlex
import tomllib
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil
from pathlib import Path
from typing import Any, TypeVar, get_args

from permtriton.arguments import CompileArgs
from permtriton.checkpoint.formats import IN_8_BITS
from permtriton.config import CalibrationConfig, ImportanceMethod
from permtriton.errors import ConfigError, near, reading, shown
from permtriton.evaluation.protocol import protocol_of
from permtriton.methods import steps
from permtriton.methods.order.heuristic import Heuristic
from permtriton.methods.order.learned import Learned
from permtriton.methods.order.searched import Searched
from permtriton.methods.prune.mask import Mask
from permtriton.methods.prune.refit import Refit
from permtriton.methods.recipe_config import CompileConfig, no_effect_refusal
from permtriton.methods.step import Stage, Step
from permtriton.methods.train.distill import Distill
from permtriton.methods.train.round import Round
from permtriton.model.name import DEMO, shown_name
from permtriton.util.option import Option, fields_of, options_of

Part = TypeVar("Part")
DEFAULT = "default"
PERMLLM = "permllm"
RIA_LEARNING_RATE = 5e-3  # the paper's for RIA, in the recipe permllm


@dataclass(frozen=True)
class Recipe:
    """A tuple of steps, which may have a name.

    Attributes:
        steps: what runs, with the options in which the recipe differs from the steps' defaults.
        summary: its result and its cost, in one line.
        options: values of options that belong to no step, by name, in place of their defaults.
        follows: name of an option whose value follows from the calibration samples -> how, in words and as a function.
    """

    steps: tuple[Step, ...]
    summary: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    follows: Mapping[str, tuple[str, Callable[[CalibrationConfig], int]]] = field(default_factory=dict)


def _batch_of_1024_tokens(calibration: CalibrationConfig) -> int:
    return min(ceil(1024 / calibration.sequence_length), Distill().batch_size)


RECIPES: dict[str, Recipe] = {
    DEFAULT: Recipe(
        (Heuristic(), Refit(), Distill(steps=32, learning_rate=2e-3, optimizer="adafactor")),
        "a low perplexity in minutes: weights fitted by least squares, on a mask that follows them, then trained for a "
        "few steps",
        follows={"distill_batch_size": ("as many as hold 1024 tokens, 8 at most", _batch_of_1024_tokens)},
    ),
    "best": Recipe(
        (Heuristic(), Refit(), Distill(epochs=1, batch_size=1, learning_rate=1e-3, further=12, optimizer="adafactor")),
        "the fit of the default, then kept weights trained on more of the text and on what the model writes: several "
        "times its time",
        follows={"generated": ("3 per sample", lambda calibration: 3 * calibration.samples)},
    ),
    "fast": Recipe(
        (Refit(iterations=12, exchanges=0, metric_tokens=0),),
        "weights fitted by least squares in the given order of channels: a quarter of the default's time",
    ),
    "values": Recipe(
        (Heuristic(row_weights="fisher"), Searched(), Mask()),
        "the best masks where kept weights must keep their values",
    ),
    # The paper's settings and its code's: no base order, random start, clamped logits, one softmax scale, last epoch.
    PERMLLM: Recipe(
        (
            Learned(
                init="random",
                clamp=1.0,
                gradient="published",
                loss="before_norm",
                tau_end=0.1,
                tau_falls="epoch",
                keep="last",
                learning_rate=1e-3,
            ),
            Mask(),
        ),
        "PermLLM as published",
        options={"layout": "fused", "o_proj": "free"},
    ),
}
# What the embedded demo model takes in place of the defaults.
SMALL: dict[str, Any] = {
    "calibration": DEMO,
    "samples": 64,
    "sequence_length": 256,
    "learn_epochs": 12,
    "learn_batch_size": 4,
}


def recipes() -> dict[str, dict[str, Any]]:
    """Returns the recipes and the steps that they are made of, as ``permtriton recipes --json`` prints them.

    Returns:
        ``recipes``: name -> its ``steps`` and a ``summary``; ``steps``: name -> what it does.

    Example:
        >>> import permtriton
        >>> permtriton.recipes()["recipes"]["default"]["steps"]
        ['heuristic', 'refit', 'distill']
    """
    named = {
        name: {"steps": [step.name for step in recipe.steps], "summary": recipe.summary}
        for name, recipe in RECIPES.items()
    }
    return {"recipes": named, "steps": {step.name: step.summary for step in steps.STEPS}}


def all_options(others: Iterable[Step] = ()) -> dict[str, Option]:
    """Returns every option by name, including those of ``others``, which may be steps of a user."""
    kinds = dict.fromkeys((CompileConfig, CalibrationConfig, *steps.STEPS, *map(type, others)))
    return {option.name: option for kind in kinds for option in options_of(kind)}


def recipe_of(recipe: str | Sequence[Step]) -> Recipe:
    """Returns a recipe; one that is not in `RECIPES` consists of steps alone.

    Args:
        recipe: a key of `RECIPES`, names of steps separated by commas, or the steps themselves.
    """
    if not isinstance(recipe, str):
        if not isinstance(recipe, Sequence) or not all(Step in type(step).__mro__ for step in recipe):
            raise ConfigError(
                f"recipe is {shown(recipe)}: expected one of {', '.join(RECIPES)}, or steps: their names separated by "
                "commas, or a list of them, such as [Heuristic(), Mask()] from permtriton.methods"
            )
        for step in recipe:
            if problem := steps.problem_of(type(step)):
                raise ConfigError(f"recipe holds a {type(step).__name__}, which {problem}")
        return Recipe(tuple(recipe))  # type: ignore[arg-type]
    if recipe in RECIPES:
        return RECIPES[recipe]
    known = {kind.name: kind for kind in steps.STEPS}
    names = [name.strip() for name in recipe.split(",")]
    if unknown := [name for name in names if name not in known]:
        kind = "no step" if len(names) > 1 else "no recipe and no step"
        is_score = unknown[0] in get_args(ImportanceMethod)
        hint = f", but a score: write `recipe=mask` `importance={unknown[0]}`" * is_score
        raise ConfigError(
            f"recipe {shown(recipe)}: {shown(unknown[0])} is {kind}{hint}; the recipes are "
            f"{', '.join(RECIPES)}, the steps {', '.join(known)}"
        )
    return Recipe(tuple(known[name]() for name in names))


def config_from(
    options: Mapping[str, Any] | None = None,
    recipe: str | Sequence[Step] | None = None,
    model: str = "",
    *,
    in_8_bits: bool = False,
) -> CompileConfig:
    """Builds a config from flat options laid over a recipe.

    Args:
        options: values by option name (dashes or underscores), such as ``{"samples": 64, "learn_epochs": 5}``;
            strings are read as on the command line.
        recipe: as `recipe_of` takes it; None for ``recipe`` in the options, or the default recipe.
        model: name of the model; ``demo`` has small settings of its own.
        in_8_bits: whether a recipe that is a key of `RECIPES` ends with the step that rounds weights to 8 bits.

    Raises:
        ConfigError: an unknown option, recipe or step, a value of the wrong type or out of range, or steps that do not
            go together.
    """
    if not isinstance(options, Mapping | None):
        raise ConfigError(f"options is a {type(options).__name__}: expected values by the names of options")
    overrides = {str(name).replace("-", "_"): value for name, value in (options or {}).items()}
    in_options = overrides.pop("recipe", None)
    chosen = next((name for name in (recipe, in_options) if name is not None), DEFAULT)
    name = chosen if isinstance(chosen, str) else ""
    source = recipe_of(name or chosen)
    steps = (*source.steps, *([Round()] if name in RECIPES and in_8_bits else []))
    known = all_options(steps)
    _check_names(overrides, known)
    overrides = {option: known[option].convert(value) for option, value in overrides.items()}
    for option, value in overrides.items():  # also options of steps that the recipe lacks
        known[option].check(value)
    values = {**(SMALL if model == DEMO else {}), **source.options, **overrides}
    if name == PERMLLM and values.get("importance") == "ria":
        values.setdefault("learn_learning_rate", RIA_LEARNING_RATE)
    config = CompileConfig(
        **fields_of(CompileConfig, values),
        calibration=CalibrationConfig(**fields_of(CalibrationConfig, values)),
        steps=tuple(_with(step, values) for step in steps),
        named=name,
    )
    check_recipe(config)
    return with_suggested(config, overrides)


def _check_names(names: Iterable[str], known: Collection[str]) -> None:
    unknown = sorted(set(names) - set(known))
    arguments = [argument.name for argument in fields(CompileArgs)]
    for name in unknown:
        if name in arguments:
            raise ConfigError(f"{name} is no option of a config: give it as `{name}=` beside the config")
        raise ConfigError(f"unknown option {shown(name)}{near(name, [*known, *arguments])}")


def resolve(
    model: str,
    options: Mapping[str, Any],
    recipe: str | Sequence[Step] | None = None,
    config_file: str | Path | None = None,
    protocol: str | None = None,
    save_format: str | None = None,
) -> tuple[CompileConfig, dict[str, Any]]:
    """Returns a compilation's config and its `overrides_of`; refuses ``options`` of the user that have no effect."""
    overrides = overrides_of(options, config_file, protocol, model)
    config = config_from(overrides, recipe, model, in_8_bits=save_format in IN_8_BITS)
    check_effects(options, config)
    return config, overrides


def overrides_of(
    options: Mapping[str, Any], config_file: str | Path | None = None, protocol: str | None = None, model: str = ""
) -> dict[str, Any]:
    """Returns the options of a protocol, a file and the user by name; later ones take precedence."""
    of_file = read_config_file(Path(config_file)) if config_file else {}
    return {**protocol_of(protocol, model).options, **of_file, **options}


def check_recipe(config: CompileConfig) -> None:
    """Refuses a recipe that does not prune, or prunes more than once."""
    pruning = [step.name for step in config.steps if step.stage is Stage.PRUNE]
    if len(pruning) == 1:
        return
    if pruning:
        raise ConfigError(f"recipe {config.recipe} prunes twice: leave {pruning[0]} or {pruning[1]} out")
    able = " or ".join(kind.name for kind in steps.STEPS if kind.stage is Stage.PRUNE)
    raise ConfigError(
        f"recipe {config.recipe or '(without steps)'} prunes nothing: add one of the steps that prune, {able}, after "
        "those that order the channels"
    )


def defaults(option: Option) -> str:
    """Returns an option's default, and what recipes and the demo take instead, as ``50; demo model: 12``."""
    texts = [("", option.default)]
    for name, recipe in RECIPES.items():
        for step in recipe.steps:
            value = getattr(step, option.field, None)
            if step.name == option.step and value != option.default:
                texts.append((f"{name}: ", value))
        if option.name in recipe.options:
            texts.append((f"{name}: ", recipe.options[option.name]))
        if option.name in recipe.follows:
            texts.append((f"{name}: ", recipe.follows[option.name][0]))
    texts += [("demo model: ", SMALL[option.name])] if option.name in SMALL else []
    return "; ".join(f"{place}{'none' if value in ((), '') else str(value).lower()}" for place, value in texts)


def suggested(config: CompileConfig) -> dict[str, int]:
    """Returns option name -> value for the options that, by the recipe, follow from the calibration samples."""
    follows = RECIPES[config.named].follows if config.named in RECIPES else {}
    return {name: value_of(config.calibration) for name, (_, value_of) in follows.items()}


def with_suggested(config: CompileConfig, overrides: Container[str]) -> CompileConfig:
    """Returns a config with the values that `suggested` returns, except those of ``overrides``."""
    values = {name: value for name, value in suggested(config).items() if name not in overrides}
    steps = tuple(_with(step, values) for step in config.steps)
    return replace(config, calibration=_with(config.calibration, values), steps=steps)


def _with(part: Part, values: Mapping[str, Any]) -> Part:
    """Returns a step, or the options of calibration, with values by option name; ``part`` itself if it has them."""
    changes = {field: value for field, value in fields_of(type(part), values).items() if getattr(part, field) != value}
    return replace(part, **changes) if changes else part  # type: ignore[type-var]


def check_effects(names: Iterable[str], config: CompileConfig) -> None:
    """Refuses options that a user gave and that have no effect, such as ``learn_epochs`` without learning."""
    known = all_options(config.steps)
    for option in (known[name] for name in names if name in known):
        if reason := no_effect_refusal(option, config):
            raise ConfigError(f"`{option.name}=` has no effect with {reason}")


def compile_command(model: str, config: CompileConfig, **running: str | bool | None) -> str:
    """Returns a ``permtriton compile`` command with the same result: the recipe, and the options in which
    the config differs from it.

    Folders are named without their path, which differs between machines: run the command where the model and text are.
    ``running`` holds further flags; None and False leave a flag out.
    """
    name, known, values = shown_name(model), all_options(config.steps), config.to_dict()
    bare = tuple(type(step)() for step in config.steps)
    overrides: dict[str, Any] = {}
    for _ in range(2):  # a second time, because some defaults depend on other options
        start = config_from(overrides, config.named or bare, name, in_8_bits=config.has(Round.name)).to_dict()
        differing = (
            o for o in values if o in known and values[o] != start[o] and not no_effect_refusal(known[o], config)
        )
        overrides |= {option: values[option] for option in differing}
    recipe = config.named or config.recipe
    words = ["permtriton", "compile", name, *(["--recipe", recipe] if recipe != DEFAULT else [])]
    words += [word for option, value in overrides.items() for word in _flag(known[option], value)]
    for option, setting in running.items():
        words += [f"--{option.replace('_', '-')}"] * (setting not in (None, False))
        words += [setting] if isinstance(setting, str) else []
    return shlex.join(words)


def _flag(option: Option, value: Any) -> list[str]:
    if option.several:
        return [word for text in value for word in (option.flag, text)]
    if isinstance(value, bool):
        return [option.flag if value else option.flag.replace("--", "--no-", 1)]
    return [option.flag, shown_name(value) if option.name == "calibration" else str(value)]


def read_config_file(path: Path) -> dict[str, Any]:
    """Reads a TOML file of options: returns values by option name, and ``recipe`` if the file names one."""
    with reading(f"config file {path} cannot be read as TOML", ConfigError):
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    if table := next((name for name, value in read.items() if isinstance(value, dict)), ""):
        raise ConfigError(
            f"config file {path} has the table [{table}]: write its options as learn_epochs = 5 is written"
        )
    options, known = {name.replace("-", "_"): value for name, value in read.items()}, all_options()
    for name in filter(known.__contains__, options):
        try:
            known[name].check(known[name].convert(options[name]))
        except ConfigError as error:
            raise ConfigError(f"config file {path}: {error}") from None
    return options

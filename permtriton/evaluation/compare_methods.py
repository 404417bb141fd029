"""The rows of a comparison as data: the methods, and the config that each row is compiled with."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from permtriton.config import ROUNDING_ONLY
from permtriton.errors import ConfigError, near
from permtriton.methods.recipe_config import CompileConfig, no_effect_refusal
from permtriton.methods.step import Step
from permtriton.methods.steps import STEPS
from permtriton.recipe import DEFAULT, PERMLLM, RECIPES, all_options, config_from
from permtriton.util.option import Option
from permtriton.util.sparsity import NMPattern

FUSED, PORTABLE = " (fused)", " (portable)"
JOINED = " + "  # separates the steps in the name of a user's own method
_ROW_WEIGHTS = {"heuristic_row_weights": "fisher"}


def _method(importance: str, recipe: str, **options: Any) -> dict[str, Any]:
    return {"importance": importance, "recipe": recipe, "heuristic_row_weights": "none", "layout": "portable"} | options


_ORDERS: dict[str, dict[str, Any]] = {
    "wanda + heuristic": _method("wanda", "heuristic,mask"),
    "wanda + heuristic with row weights": _method("wanda", "heuristic,mask", **_ROW_WEIGHTS),
    "ria + heuristic": _method("ria", "heuristic,mask"),
    "wanda + learned": _method("wanda", "heuristic,learned,mask"),
    "ria + learned": _method("ria", "heuristic,learned,mask"),
    "wanda + searched": _method("wanda", "heuristic,searched,mask", **_ROW_WEIGHTS),
    "heuristic + sparsegpt": _method("obs", "heuristic,sparsegpt"),
    "heuristic + sparsegpt with row weights": _method("obs", "heuristic,sparsegpt", **_ROW_WEIGHTS),
    "heuristic + refit": _method("obs", "heuristic,refit"),
    "heuristic + sparsegpt + distill": _method("obs", "heuristic,sparsegpt,distill"),
}
# Name of each method -> its recipe, and the options that it sets.
METHODS: dict[str, dict[str, Any]] = {
    "magnitude": _method("magnitude", "mask"),
    "wanda": _method("wanda", "mask"),
    "ria": _method("ria", "mask"),
    "sparsegpt": _method("obs", "sparsegpt"),
    "wanda + distill": _method("wanda", "mask,distill"),
    **_ORDERS,
    **{f"{name}{FUSED}": {**options, "layout": "fused"} for name, options in _ORDERS.items()},
}
# Every method that can be named; recipes are compared only if they are named.
KNOWN = METHODS | {
    f"{name}{suffix}": {"importance": "auto", "recipe": name, "layout": layout}
    for suffix, layout in (("", "portable"), (FUSED, "fused"))
    for name in RECIPES
}
# The paper's method has layout fused, unless its name ends with `PORTABLE`.
KNOWN |= {
    f"{score}{PERMLLM}{suffix}": {"importance": importance, "recipe": PERMLLM, "layout": layout}
    for suffix, layout in (("", "fused"), (PORTABLE, "portable"))
    for score, importance in (("", "auto"), (f"wanda{JOINED}", "wanda"), (f"ria{JOINED}", "ria"))
}
DENSE = "dense"
DENSE_ENTRIES: dict[str, Any] = {"method": DENSE, "pattern": "", "setting": "", "config": {}}
Method = str | Sequence[Step]


@dataclass(frozen=True)
class RowConfig:
    """What one row of a comparison is compiled with."""

    method: str  # name of the method
    setting: str  # option of the ablation with its value, such as ``learn_block_size 32``; empty without an ablation
    config: CompileConfig  # every option; the seed is set later
    sets: frozenset[str]  # names of the options that the method sets

    @property
    def pattern(self) -> str:
        return str(self.config.sparsity)

    @property
    def entries(self) -> dict[str, Any]:
        """What a report says of the row beside its results; ``config`` is every option but the seed."""
        config = {name: value for name, value in self.config.to_dict().items() if name != "seed"}
        return {"method": self.method, "pattern": self.pattern, "setting": self.setting, "config": config}


def settings_of(method: Method) -> dict[str, Any]:
    """Returns the options that a method sets.

    Args:
        method: key of `KNOWN`; a list of steps; or names of steps, as `permtriton.recipe.recipe_of` takes them, joined
            by `JOINED` and, for layout fused, followed by `FUSED`.
    """
    if not isinstance(method, str):
        return {"importance": "auto", "recipe": method, "layout": "portable"}
    if method in KNOWN:
        return KNOWN[method]
    steps = method.removesuffix(FUSED).split(JOINED)
    known = {kind.name for kind in STEPS}
    if not known.issuperset(steps):
        close = get_close_matches(method, list(KNOWN)) or ["wanda", "sparsegpt", DEFAULT]
        raise ConfigError(
            f"method {method!r} is unknown: did you mean {', '.join(close)}; or join steps, such as "
            f"heuristic{JOINED}mask? `permtriton compare --help` lists all methods"
        )
    layout = "fused" if method.endswith(FUSED) else "portable"
    return {"importance": "auto", "recipe": ",".join(steps), "layout": layout}


def _name(method: Method) -> str:
    """Returns the name of a method; for a list of steps, it includes options that differ from their defaults."""
    return method if isinstance(method, str) else JOINED.join(map(_step_name, method))


def _step_name(step: Step) -> str:
    changed = [option.name for option in fields(step) if getattr(step, option.name) != option.default]  # type: ignore[arg-type]
    options = ", ".join(f"{name}={getattr(step, name)}" for name in changed)
    return step.name + f" ({options})" * bool(changed)


def row_configs(
    options: Mapping[str, Any],
    methods: Sequence[Method] = (),
    patterns: Sequence[NMPattern] = (),
    ablate: str | None = None,
    values: Sequence[str] = (),
    model: str = "",
) -> list[RowConfig]:
    """Returns the rows: every method with every pattern and, in an ablation, with every value of one option.

    Args:
        options: values by option name; the values that a method sets take precedence.
        methods: methods, as `settings_of` takes them; if empty, those of `METHODS` or, in an ablation, the default
            recipe.
        ablate: name of the option of an ablation; its ``values`` take precedence over what a method sets.
    """
    option = None if ablate is None else _ablated(ablate)
    methods = methods or (tuple(METHODS) if option is None else (DEFAULT,))
    cases = [("", dict[str, Any]())] if option is None else [_case(option, value) for value in values]
    rows = []
    for sparsity in [{"sparsity": pattern} for pattern in patterns] or [{}]:
        for method in methods:
            name, settings = _name(method), settings_of(method)
            for setting, ablated in cases:
                config = config_from({**options, **sparsity, **settings, **ablated}, model=model)
                if option and no_effect_refusal(option, config):
                    raise ConfigError(f"--ablate {ablate} has no effect on the method {name}: choose other --methods")
                rows.append(RowConfig(name, setting, config, frozenset(settings)))
    return list(dict.fromkeys(rows))


def _case(option: Option, value: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of a setting of an ablation, and the option with this value."""
    return f"{option.name} {value if option.several else option.convert(value)}", {option.name: value}


def _ablated(name: str) -> Option:
    known = {name: option for name, option in all_options().items() if name not in ("seed", *ROUNDING_ONLY)}
    if name not in known:
        raise ConfigError(f"--ablate {name}: no option of this name changes results{near(name, known)}")
    return known[name]


def check_effect(explicit: Iterable[str], rows: Sequence[RowConfig], ablation: str | None) -> None:
    """Refuses options that a user set by hand and that change nothing in any row."""
    known = all_options()
    for name in explicit:
        option, flag = known[name], known[name].flag
        if name == ablation:
            raise ConfigError(f"{flag} has no effect with --ablate {ablation}, which sets it: choose --values")
        if name == "seed":
            raise ConfigError("--seed has no effect on a comparison: choose --seeds")
        if all(name in row.sets for row in rows):
            raise ConfigError(f"{flag} has no effect: each of these methods sets it; leave it out")
        if all(no_effect_refusal(option, row.config) for row in rows):
            methods = ", ".join(dict.fromkeys(row.method for row in rows))
            raise ConfigError(f"{flag} has no effect on the methods {methods}: drop it or choose other --methods")

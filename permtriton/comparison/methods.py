"""The rows of a comparison as data: the methods, the ablations, and the config that each row is compiled with."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from permtriton.config import OPTIONS, CompileConfig, has_effect
from permtriton.errors import ConfigError
from permtriton.sparsity import NMPattern

FUSED = " (fused)"
_OBS = {"importance": "obs", "permutation": "heuristic", "weight_update": "sparsegpt"}
_ORDERS: dict[str, dict[str, Any]] = {
    "wanda + heuristic without row weights": {"permutation": "heuristic", "row_weights": "none"},
    "wanda + heuristic": {"permutation": "heuristic"},
    "ria + heuristic": {"importance": "ria", "permutation": "heuristic"},
    "wanda + learned": {"permutation": "learned"},
    "ria + learned": {"importance": "ria", "permutation": "learned"},
    "wanda + searched": {"permutation": "searched"},
    "heuristic + sparsegpt without row weights": {**_OBS, "row_weights": "none"},
    "heuristic + sparsegpt": _OBS,
    "heuristic + sparsegpt + reconstruct": {**_OBS, "weight_update": "sparsegpt+reconstruct"},
    "heuristic + sparsegpt + distill": {**_OBS, "weight_update": "sparsegpt+distill"},
}
# Name of each method -> the options in which it differs from the given config; what it does not name is as in PLAIN.
METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {"importance": "magnitude"},
    "wanda": {},
    "ria": {"importance": "ria"},
    "sparsegpt": {"importance": "obs", "weight_update": "sparsegpt"},
    "wanda + reconstruct": {"weight_update": "reconstruct"},
    "wanda + distill": {"weight_update": "distill"},
    **_ORDERS,
    **{f"{name}{FUSED}": {**options, "layout": "fused"} for name, options in _ORDERS.items()},
}
PLAIN = {
    "importance": "wanda",
    "permutation": "none",
    "row_weights": "fisher",
    "weight_update": "none",
    "update_mask": "own",
    "layout": "portable",
}
DENSE = "dense"
HALF = "last:half"


@dataclass(frozen=True)
class Ablation:
    """What the rows of an ablation differ in.

    Attributes:
        option: name of the option.
        values: its values where the user names none.
        methods: methods to run where the user names none.
    """

    option: str
    values: tuple[str, ...]
    methods: tuple[str, ...] = ("wanda + learned",)


# The paper's ablations. Under portable, the residual stream is read in every layer and learns with "all" only.
ABLATIONS: dict[str, Ablation] = {
    "sinkhorn": Ablation("sinkhorn_rounds", ("0", "5")),
    "calibration": Ablation("calibration", ("pile", "wikitext2", "c4"), ("wanda", "wanda + learned")),
    "block-size": Ablation("block_size", ("32", "64", "128")),
    "learn-layers": Ablation("learn_layers", ("last:1", HALF, "all"), (f"wanda + learned{FUSED}",)),
}


@dataclass(frozen=True)
class Row:
    """What one row of a comparison is compiled with.

    Attributes:
        method: key of `METHODS`.
        pattern: sparsity pattern, such as ``2:4``.
        setting: option of the ablation with its value, such as ``block_size 32``; empty without an ablation.
        config: every option; the seed is set later.
    """

    method: str
    pattern: str
    setting: str
    config: CompileConfig


def method_rows(config: CompileConfig, methods: Sequence[str], patterns: Sequence[NMPattern]) -> list[Row]:
    """Returns a row per pattern and method.

    Args:
        config: options that the methods do not set.
        methods: keys of `METHODS`; none means all.
        patterns: sparsity patterns; none means the config's.

    Raises:
        ConfigError: a method is unknown.
    """
    methods = methods or tuple(METHODS)
    if unknown := [method for method in methods if method not in METHODS]:
        raise ConfigError(f"method {unknown[0]!r} is unknown: choose from {', '.join(METHODS)}")
    rows = []
    for pattern in dict.fromkeys(patterns or [config.sparsity]):
        for method in dict.fromkeys(methods):
            chosen = dataclasses.replace(config, sparsity=pattern, **{**PLAIN, **METHODS[method]})
            rows.append(Row(method, str(pattern), "", chosen))
    return rows


def ablation_rows(
    config: CompileConfig,
    name: str,
    values: Sequence[str],
    methods: Sequence[str],
    patterns: Sequence[NMPattern],
    layers: int,
) -> list[Row]:
    """Returns a row per pattern, method and value of the option that the ablation varies.

    Args:
        config: options that neither the methods nor the ablation set.
        name: key of `ABLATIONS`.
        values: values of its option as text; none means the ablation's own.
        methods: keys of `METHODS`; none means the ablation's own.
        patterns: sparsity patterns; none means the config's.
        layers: number of layers of the model, half of which ``last:half`` means.

    Raises:
        ConfigError: an ablation or a method is unknown, or the option has no effect on a method, or not this value.
    """
    if name not in ABLATIONS:
        raise ConfigError(f"ablation {name!r} is unknown: choose from {', '.join(ABLATIONS)}")
    ablation = ABLATIONS[name]
    option = OPTIONS[ablation.option]
    rows = []
    for row in method_rows(config, methods or ablation.methods, patterns):
        if not has_effect(option.name, row.config):
            able = [other.method for other in method_rows(config, (), ()) if has_effect(option.name, other.config)]
            raise ConfigError(
                f"--ablate {name} has no effect on the method {row.method!r}, which does not use {option.flag}: "
                f"choose from {', '.join(able)}"
            )
        for text in values or ablation.values:
            value: Any = f"last:{max(layers // 2, 1)}" if text == HALF else text
            if option.type is int:
                value = _integer(text, option.flag)
            chosen = CompileConfig.from_options({**row.config.to_dict(), option.name: value})
            rows.append(dataclasses.replace(row, setting=f"{option.name} {value}", config=chosen))
    return list(dict.fromkeys(rows))


def check_effect(explicit: Iterable[str], rows: Sequence[Row], ablation: str | None) -> None:
    """Refuses options that a user set by hand and that change nothing in any row.

    Args:
        explicit: names of the options.
        rows: rows of the comparison.
        ablation: key of `ABLATIONS`, or None.

    Raises:
        ConfigError: for example epochs, if no row learns.
    """
    for name in explicit:
        flag = OPTIONS[name].flag
        if ablation and name == ABLATIONS[ablation].option:
            raise ConfigError(f"{flag} has no effect with --ablate {ablation}, which sets it: choose --values")
        if not any(has_effect(name, row.config) for row in rows):
            methods = ", ".join(dict.fromkeys(row.method for row in rows))
            raise ConfigError(f"{flag} has no effect on the methods {methods}: drop it or choose other --methods")


def _integer(text: str, flag: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--values {text!r}: {flag} takes integers, separated by commas") from None

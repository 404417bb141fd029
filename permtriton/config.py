"""Every option of a compilation. Flags, ``--help``, TOML keys and docs/options.md are made from these dataclasses."""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from permtriton.errors import ConfigError
from permtriton.option import Option, check_options, documented, option, options_of
from permtriton.sparsity import MAX_GROUP, NMPattern

ImportanceMethod = Literal["magnitude", "wanda", "ria", "obs"]
PermutationMethod = Literal["none", "heuristic", "learned"]
WeightUpdate = Literal["none", "sparsegpt"]
Layout = Literal["portable", "fused"]
OProj = Literal["tied", "free"]

PANELS = METHOD, CALIBRATION, LEARNING, RUNNING = (
    "What to do",
    "Calibration and evaluation",
    "Learning",
    "Running",
)
_method = partial(option, panel=METHOD)
_calibration = partial(option, panel=CALIBRATION)
_learning = partial(option, panel=LEARNING, needs=("permutation", "learned"))


@documented
@dataclass(frozen=True)
class CalibrationConfig:
    """The token ids that statistics, learning and reconstruction see."""

    calibration: str = _calibration(
        "c4",
        "Calibration text; the demo model takes demo.",
        values="demo, c4, wikitext2, pile, or a .txt, .jsonl (text or input_ids) or .parquet file",
    )
    samples: int = _calibration(128, "Number of calibration sequences.", minimum=1)
    sequence_length: int = _calibration(1024, "Tokens per calibration sequence.", minimum=2)

    def __post_init__(self) -> None:
        check_options(self)


@documented
@dataclass(frozen=True)
class LearnConfig:
    """PermLLM's learnable channel permutation; the recipe ``published`` has the paper's constants."""

    block_size: int = _learning(
        64,
        "Channels per block of the block permutation, a multiple of M; "
        "at least the number of channels learns the full permutation.",
        minimum=1,
    )
    sinkhorn_rounds: int = _learning(5, "Rounds of row and column normalisation (eq. 3-5); 0 means a row softmax.")
    tau_start: float = _learning(1.0, "Temperature at the first step.", positive=True)
    tau_end: float = _learning(0.1, "Temperature at the last step, reached linearly.", positive=True)
    epochs: int = _learning(50, "Passes over the calibration sequences.", minimum=1)
    batch_size: int = _learning(16, "Sequences per optimiser step.", minimum=1)
    micro_batch_size: int = _learning(
        4, "Sequences per forward and backward pass: fewer need less memory, for the same result.", minimum=1
    )
    learning_rate: float = _learning(
        5e-3,
        "Peak AdamW learning rate, with cosine decay; the recipe published takes 0.005 with the importance ria.",
        positive=True,
    )
    weight_decay: float = _learning(0.1, "AdamW weight decay.")
    learn_layers: str = _learning(
        "all",
        "Layers whose permutations are learned; the others keep the heuristic order.",
        pattern=r"all|last:[1-9]\d*",
        values="all, or last:K with K at least 1",
    )
    start: Literal["identity", "random"] = _learning(
        "identity", "Start of learning: near the base order (identity) or random."
    )
    start_noise: float = _learning(0.1, "Size of the random part when learning starts near the identity.")
    base_order: Literal["heuristic", "identity"] = _learning(
        "heuristic", "Order of the channels before blocks are permuted."
    )
    clamp_logits: float = _learning(0.0, "Limit on the absolute value of logits; 0 for none.")
    group_scale: bool = _learning(True, "Divide scores by the mean of their group before the mask's softmax.")
    keep_epoch: Literal["best", "last"] = _learning(
        "best", "Epoch to keep: best by loss under the hard permutation, never worse than the base order, or last."
    )
    activation_checkpointing: bool = _learning(
        True, "Recompute activations in the backward pass, one layer at a time: less memory, more time."
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def last_layers(self) -> int | None:
        """K of ``last:K``, or None for all layers."""
        return None if self.learn_layers == "all" else int(self.learn_layers.removeprefix("last:"))


@documented
@dataclass(frozen=True)
class CompileConfig:
    """Everything that decides a compilation's result; further options in `CalibrationConfig` and `LearnConfig`."""

    sparsity: NMPattern = _method(
        NMPattern(2, 4),
        "Sparsity pattern: N of every M consecutive weights of a row are kept.",
        values=f"N:M with 0 < N < M <= {MAX_GROUP}",
    )
    importance: ImportanceMethod = _method("wanda", "Score that decides which weights are kept.")
    permutation: PermutationMethod = _method(
        "learned", "Search for the order of the channels: none, heuristic (RIA's two stages) or learned (PermLLM)."
    )
    weight_update: WeightUpdate = _method("none", "Whether SparseGPT rebuilds the kept weights.")
    update_mask: Literal["own", "keep"] = _method(
        "own",
        "With sparsegpt: own (SparseGPT chooses the mask as it goes) or keep (the importance chooses it).",
        needs=("weight_update", "sparsegpt"),
    )
    layout: Layout = _method(
        "portable",
        "portable: all permutations folded into weights, a plain checkpoint that loads anywhere. fused: a permutation "
        "for every layer input; what does not fold runs inside the norms or as a gather, and loading needs permtriton.",
    )
    o_proj: OProj = _method(
        "tied",
        "With fused, the permutation of the attention output: tied (within heads, folded) or free (over all its "
        "channels, with a gather).",
        needs=("layout", "fused"),
    )
    skip_indivisible: bool = _method(
        False, "Leave linears dense if their number of input channels is not a multiple of M."
    )
    seed: int = option(
        0,
        "Seed of the calibration draw, of the start of learning and of its batch order.",
        panel=RUNNING,
        maximum=2**32 - 1,
    )
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)

    def __post_init__(self) -> None:
        check_options(self)
        group = self.sparsity.group
        if self.permutation == "learned" and self.learn.block_size % group:
            raise ConfigError(
                f"block_size {self.learn.block_size} is not a multiple of the group of {self.sparsity}: "
                f"choose a multiple of {group}"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any], recipe: str = "default") -> "CompileConfig":
        """Builds a config from flat options laid over a recipe.

        Args:
            options: Values by field name of this class, `CalibrationConfig` or `LearnConfig` (dashes or underscores).
            recipe: ``default``, ``published`` or ``demo``.

        Raises:
            ConfigError: an unknown option or recipe, a value of the wrong type or out of range.
        """
        if not isinstance(recipe, str) or recipe not in RECIPES:
            raise ConfigError(f"recipe {recipe!r} is unknown: choose one of {', '.join(RECIPES)}")
        given = {name.replace("-", "_"): value for name, value in options.items()}
        merged: dict[str, Any] = {**RECIPES[recipe], **given}
        if recipe == "published" and merged.get("importance") == "ria" and "learning_rate" not in given:
            merged["learning_rate"] = 5e-3
        if unknown := sorted(set(merged) - set(OPTIONS)):
            raise ConfigError(f"unknown option {unknown[0]!r}: the options are {', '.join(sorted(OPTIONS))}")

        def values(part: type) -> dict[str, Any]:
            return {o.name: o.convert(merged[o.name]) for o in options_of(part) if o.name in merged}

        calibration, learn = CalibrationConfig(**values(CalibrationConfig)), LearnConfig(**values(LearnConfig))
        return cls(**values(cls), calibration=calibration, learn=learn)

    def to_dict(self) -> dict[str, Any]:
        """Returns the flat options that `from_options` reads back to an equal config."""
        own = {each.name: getattr(self, each.name) for each in options_of(self)}
        own["sparsity"] = str(self.sparsity)
        return {**own, **dataclasses.asdict(self.calibration), **dataclasses.asdict(self.learn)}


OPTIONS: dict[str, Option] = {
    each.name: each for part in (CompileConfig, CalibrationConfig, LearnConfig) for each in options_of(part)
}

RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    # The paper's settings and its code's: no base order, random start, clamped logits, one softmax scale, last epoch.
    "published": {
        "start": "random",
        "base_order": "identity",
        "clamp_logits": 1.0,
        "group_scale": False,
        "keep_epoch": "last",
        "learning_rate": 1e-3,
    },
    "demo": {
        "samples": 64,
        "sequence_length": 256,
        "epochs": 12,
        "batch_size": 4,
        "activation_checkpointing": False,
    },
}


def defaults(name: str) -> str:
    """Returns an option's default and those of the recipes that differ, such as ``50; demo: 12``."""
    texts = [("", OPTIONS[name].default)]
    texts += [(f"{recipe}: ", values[name]) for recipe, values in RECIPES.items() if name in values]
    return "; ".join(f"{recipe}{str(value).lower()}" for recipe, value in texts)


def check_explicit_options(explicit: Mapping[str, Any], config: CompileConfig) -> None:
    """Refuses options that a user set by hand and that the rest of the config makes meaningless.

    Raises:
        ConfigError: for example epochs without learning.
    """
    for each in (OPTIONS[name] for name in explicit):
        if each.needs is not None and getattr(config, each.needs[0]) != each.needs[1]:
            needed, value = OPTIONS[each.needs[0]], each.needs[1]
            raise ConfigError(
                f"{each.flag} has no effect with {needed.flag} {getattr(config, needed.name)}: "
                f"drop it or choose {needed.flag} {value}"
            )
    chooses_itself = config.weight_update == "sparsegpt" and config.update_mask == "own"
    if "importance" in explicit and chooses_itself and config.permutation == "none":
        raise ConfigError(
            "--importance has no effect with --permutation none and --weight-update sparsegpt, which chooses its own "
            "mask: drop it, or choose --update-mask keep"
        )


def read_config_file(path: Path) -> dict[str, Any]:
    """Reads a flat TOML file of options.

    Raises:
        ConfigError: the file is missing, is not TOML or holds a table.
    """
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from error
    for name, value in options.items():
        if isinstance(value, dict):
            raise ConfigError(f"config file {path} holds a table, [{name}]: write the options flat, one per line")
    return options

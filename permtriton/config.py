"""Every option of a compilation, as frozen dataclasses; the CLI's options carry the same names."""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from permtriton.errors import ConfigError
from permtriton.sparsity import NMPattern

Importance = Literal["magnitude", "wanda", "ria", "obs"]
PermutationMethod = Literal["none", "heuristic", "learned"]
WeightUpdate = Literal["none", "sparsegpt"]
Layout = Literal["portable", "fused"]
OProj = Literal["tied", "free"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class CalibrationConfig:
    """The token ids that statistics, learning and reconstruction see.

    Attributes:
        calibration: ``demo``, ``c4``, ``wikitext2``, ``pile``, or a local ``.txt``, ``.jsonl`` or ``.parquet`` file.
        samples: sequences drawn.
        sequence_length: tokens in a sequence.
    """

    calibration: str = "c4"
    samples: int = 128
    sequence_length: int = 1024

    def __post_init__(self) -> None:
        _require(self.samples > 0, f"samples is {self.samples}: at least one calibration sequence is needed")
        _require(self.sequence_length > 1, f"sequence_length is {self.sequence_length}: at least 2 tokens are needed")


@dataclass(frozen=True)
class LearnConfig:
    """PermLLM's learnable channel permutation (section numbers and constants of the paper in brackets).

    Attributes:
        block_size: channels in a block of the block permutation [64]; a multiple of the group. A size of at least the
            number of channels learns the full permutation.
        sinkhorn_rounds: row-then-column normalisations [5, eq. 3-5]; 0 means a row softmax.
        tau_start: temperature at the first step [1].
        tau_end: temperature at the last step, reached linearly [0.1].
        epochs: passes over the calibration set [50].
        batch_size: sequences in an optimiser step [16].
        micro_batch_size: sequences in one forward and backward; gradients add up to ``batch_size``.
        learning_rate: AdamW's peak, with cosine decay [1e-3 for Wanda, 5e-3 for RIA].
        weight_decay: AdamW's [0.1].
        learn_layers: ``all``, or ``last:K`` to learn only permutations that live in the last K layers; every other
            one keeps the heuristic order.
        start: ``identity`` (near the base order) or ``random`` [random].
        start_noise: size of the random part where ``start`` is ``identity``.
        base_order: order before the blocks: ``heuristic`` or ``identity`` [identity].
        clamp_logits: limit on ``|logits|``, 0 for none [1].
        group_scale: whether the mask's softmax divides scores by the mean of their group [false].
        keep_epoch: ``best`` by loss under the hard permutation, never worse than the base order, or ``last``.
        activation_checkpointing: recompute activations in the backward pass, a layer at a time.
    """

    block_size: int = 64
    sinkhorn_rounds: int = 5
    tau_start: float = 1.0
    tau_end: float = 0.1
    epochs: int = 50
    batch_size: int = 16
    micro_batch_size: int = 4
    learning_rate: float = 5e-3
    weight_decay: float = 0.1
    learn_layers: str = "all"
    start: Literal["identity", "random"] = "identity"
    start_noise: float = 0.1
    base_order: Literal["heuristic", "identity"] = "heuristic"
    clamp_logits: float = 0.0
    group_scale: bool = True
    keep_epoch: Literal["best", "last"] = "best"
    activation_checkpointing: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "epochs", "batch_size", "micro_batch_size"):
            _require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("learning_rate", "tau_start", "tau_end"):
            _require(0 < getattr(self, name) < float("inf"), f"{name} is {getattr(self, name)}: it must be positive")
        for name in ("sinkhorn_rounds", "weight_decay", "clamp_logits", "start_noise"):
            _require(
                0 <= getattr(self, name) < float("inf"),
                f"{name} is {getattr(self, name)}: it must not be negative or infinite",
            )
        _require(
            re.fullmatch(r"all|last:[1-9]\d*", self.learn_layers) is not None,
            f"learn_layers is {self.learn_layers!r}: write all, or last:K with K at least 1",
        )

    @property
    def last_layers(self) -> int | None:
        """K of ``last:K``, or None for all layers."""
        return None if self.learn_layers == "all" else int(self.learn_layers.removeprefix("last:"))


@dataclass(frozen=True)
class CompileConfig:
    """Everything that decides a compilation's result.

    Attributes:
        sparsity: the N:M pattern.
        importance: score of a weight.
        permutation: how each site's channel order is found.
        weight_update: whether the kept weights are rebuilt by SparseGPT.
        update_mask: with SparseGPT, whether it chooses its ``own`` mask as it goes or must ``keep`` the importance's.
        layout: ``portable``: every permutation is folded into the weights, the checkpoint is a plain one; ``fused``:
            every site has its own permutation, inside the norm before it, or a gather where it cannot be folded.
        o_proj: with layout ``fused``, whether the attention output's permutation is ``tied`` to the heads and folded,
            or ``free`` over all its channels, with a gather.
        skip_indivisible: leave linears dense whose input channels are not a multiple of the group.
        seed: of the calibration draw, the start of learning and its batch order.
        calibration: see `CalibrationConfig`.
        learn: see `LearnConfig`.
    """

    sparsity: NMPattern = field(default_factory=lambda: NMPattern(2, 4))
    importance: Importance = "wanda"
    permutation: PermutationMethod = "learned"
    weight_update: WeightUpdate = "none"
    update_mask: Literal["own", "keep"] = "own"
    layout: Layout = "portable"
    o_proj: OProj = "tied"
    skip_indivisible: bool = False
    seed: int = 0
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**32, f"seed is {self.seed}: it must be from 0 to {2**32 - 1}")
        _require(
            self.permutation != "learned" or self.learn.block_size % self.sparsity.group == 0,
            f"block_size {self.learn.block_size} is not a multiple of the group of {self.sparsity}: "
            f"choose a multiple of {self.sparsity.group}",
        )

    @classmethod
    def from_options(cls, options: Mapping[str, Any], recipe: str = "default") -> "CompileConfig":
        """Builds a config from flat options laid over a recipe.

        Args:
            options: by field name of this class, `CalibrationConfig` or `LearnConfig` (dashes or underscores).
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
        calibration = CalibrationConfig(**_pick(CalibrationConfig, merged))
        learn = LearnConfig(**_pick(LearnConfig, merged))
        rest = {k: v for k, v in _pick(cls, merged).items() if k not in ("calibration", "learn")}
        return cls(**rest, calibration=calibration, learn=learn)

    def to_dict(self) -> dict[str, Any]:
        """Returns the flat options that `from_options` reads back to an equal config."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("calibration", "learn")}
        own["sparsity"] = str(self.sparsity)
        return {**own, **dataclasses.asdict(self.calibration), **dataclasses.asdict(self.learn)}


# Every flat option, by the field that it sets.
OPTIONS = tuple(
    dict.fromkeys(
        f.name for c in (CompileConfig, CalibrationConfig, LearnConfig) for f in fields(c) if f.name != "learn"
    )
)

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

# Options that only one choice of another option gives a meaning to.
OPTION_NEEDS: dict[str, tuple[str, str]] = {
    **{f.name: ("permutation", "learned") for f in fields(LearnConfig)},
    "update_mask": ("weight_update", "sparsegpt"),
    "o_proj": ("layout", "fused"),
}


def check_explicit_options(explicit: Mapping[str, Any], config: CompileConfig) -> None:
    """Refuses options that a user set by hand and that the rest of the config makes meaningless.

    Raises:
        ConfigError: for example epochs without learning.
    """
    for name in explicit:
        needed = OPTION_NEEDS.get(name)
        if needed is not None and getattr(config, needed[0]) != needed[1]:
            option, needs, value = (text.replace("_", "-") for text in (name, *needed))
            raise ConfigError(
                f"--{option} has no effect with --{needs} {getattr(config, needed[0])}: "
                f"drop it or choose --{needs} {value}"
            )
    chooses_itself = config.weight_update == "sparsegpt" and config.update_mask == "own"
    if "importance" in explicit and chooses_itself and config.permutation == "none":
        raise ConfigError(
            "--importance has no effect with --weight-update sparsegpt, which chooses its own mask, where there is no "
            "permutation: drop it, or choose --update-mask keep"
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
            raise ConfigError(
                f"config file {path}: table [{name}] is not understood: write the options flat, one a line"
            )
    return options


def _pick(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: _checked(f.name, hints[f.name], options[f.name]) for f in fields(cls) if f.name in options}


def _checked(name: str, hint: Any, value: Any) -> Any:
    if hint is NMPattern:
        return value if isinstance(value, NMPattern) else NMPattern.parse(str(value))
    if get_origin(hint) is Literal:
        _require(value in get_args(hint), f"{name} is {value!r}: choose one of {', '.join(get_args(hint))}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool):
        right = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
        _require(right, f"{name} is {value!r}: expected {hint.__name__}, got {type(value).__name__}")
    return value

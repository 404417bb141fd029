"""Every option of a compilation. Flags, ``--help``, TOML keys and docs/options.md are made from these dataclasses."""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from permtriton.errors import ConfigError, first_line, reading, shown
from permtriton.option import Option, check_options, documented, option, options_of
from permtriton.sparsity import MAX_GROUP, NMPattern

ImportanceMethod = Literal["magnitude", "wanda", "ria", "obs"]
PermutationMethod = Literal["auto", "none", "heuristic", "learned", "searched"]
WeightUpdate = Literal[
    "none",
    "sparsegpt",
    "reconstruct",
    "distill",
    "sparsegpt+reconstruct",
    "sparsegpt+distill",
    "sparsegpt+reconstruct+distill",
]  # parts are joined by "+" and run in this order
ObjectiveKind = Literal["kl", "cosine"]
Layout = Literal["portable", "fused"]
OProj = Literal["tied", "free"]

PANELS = METHOD, CALIBRATION, LEARNING, SEARCHING, UPDATING, RUNNING = (
    "What to do",
    "Calibration and evaluation",
    "Learning",
    "Searching",
    "Updating weights",
    "Running",
)
_method = partial(option, panel=METHOD)
_calibration = partial(option, panel=CALIBRATION)
_learning = partial(option, panel=LEARNING, needs={"permutation": ("learned",)})
_searching = partial(option, panel=SEARCHING, needs={"permutation": ("searched",)})
_updating = partial(option, panel=UPDATING, needs={"weight_update": ("reconstruct", "distill")})
_running = partial(option, panel=RUNNING)
MAX_TOML_BYTES = 10**6
GRADIENTS = {"permutation": ("learned", "searched"), "weight_update": ("reconstruct", "distill")}


@documented
@dataclass(frozen=True)
class CalibrationConfig:
    """The token ids that statistics, learning and reconstruction see."""

    calibration: str = _calibration(
        "c4",
        "Calibration data: text (the demo model takes demo), or what else the model reads.",
        values="demo, c4, wikitext2, pile, or a .txt, .jsonl (text or input_ids) or .parquet file; for a model of "
        "images or sound a folder of images or .wav files; for any model a .safetensors file with its inputs",
    )
    samples: int = _calibration(128, "Number of calibration sequences, images or sounds.", minimum=1)
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

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def last_layers(self) -> int | None:
        """K of ``last:K``, or None for all layers."""
        return None if self.learn_layers == "all" else int(self.learn_layers.removeprefix("last:"))


@documented
@dataclass(frozen=True)
class SearchConfig:
    """The search for a channel order by exact gains of swaps."""

    rounds: int = _searching(
        12,
        "Most rounds: a round measures all gains, swaps the best channels and keeps the swaps if the loss falls.",
        minimum=1,
    )
    damping: float = _searching(
        4.0,
        "Weight of the curvature in the gains of the first round; it adapts to how well the gains predict.",
        positive=True,
    )
    search_block: int = _searching(
        0, "Swap channels only inside random blocks of this many, drawn anew every round; 0 means all pairs."
    )

    def __post_init__(self) -> None:
        check_options(self)


@documented
@dataclass(frozen=True)
class UpdateConfig:
    """Training the kept weights: layer by layer (``reconstruct``) or all at once (``distill``)."""

    update_epochs: int = _updating(20, "Passes over the calibration sequences.", minimum=1)
    update_learning_rate: float = _updating(5e-4, "Peak Adam learning rate, with cosine decay to 0.", positive=True)
    update_batch_size: int = _updating(8, "Sequences per optimiser step.", minimum=1)
    reconstruct_loss: Literal["cosine", "squared"] = option(
        "cosine",
        "Distance of a layer's output from the dense layer's, per token: 1 - cosine, or the squared error relative to "
        "the squared size (squared).",
        panel=UPDATING,
        needs={"weight_update": ("reconstruct",)},
    )
    window: Literal["layer", "mlp"] = option(
        "layer",
        "What reconstruct trains at a time: a decoder layer, or its attention and its MLP apart (mlp).",
        panel=UPDATING,
        needs={"weight_update": ("reconstruct",)},
    )

    def __post_init__(self) -> None:
        check_options(self)


@documented
@dataclass(frozen=True)
class CompileConfig:
    """Everything that decides a compilation's result; further options in the configs of its parts."""

    sparsity: NMPattern = _method(
        NMPattern(2, 4),
        "Sparsity pattern: N of every M consecutive weights of a row are kept.",
        values=f"N:M with 0 < N < M <= {MAX_GROUP}",
    )
    importance: ImportanceMethod = _method("wanda", "Score that decides which weights are kept.")
    permutation: PermutationMethod = _method(
        "auto",
        "Order of the channels: none, heuristic (RIA's two stages), learned (PermLLM) or searched (swaps of channels "
        "by their gains). auto means heuristic with sparsegpt, else searched.",
    )
    row_weights: Literal["fisher", "none"] = _method(
        "fisher",
        "Weights of the rows of a linear in the heuristic order: fisher (how much the loss feels a row) or none.",
        needs={"permutation": ("heuristic", "learned", "searched")},
    )
    objective: Literal["auto", "kl", "cosine"] = _method(
        "auto",
        "What learning, searching and distilling minimise: kl (of the logits) or cosine (of the last hidden state). "
        "auto means cosine for learned; else kl, or cosine where there is no language-model head.",
        needs={"permutation": ("learned", "searched"), "weight_update": ("distill",)},
    )
    weight_update: WeightUpdate = _method(
        "none",
        "How the kept weights change: sparsegpt (in closed form), reconstruct (trained layer by layer), distill "
        "(trained together).",
    )
    update_mask: Literal["own", "keep"] = _method(
        "own",
        "With sparsegpt: own (SparseGPT chooses the mask as it goes) or keep (the importance chooses it).",
        needs={"weight_update": ("sparsegpt",)},
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
        needs={"layout": ("fused",)},
    )
    skip_indivisible: bool = _method(
        False, "Leave linears dense if their number of input channels is not a multiple of M."
    )
    seed: int = _running(0, "Seed of all that is drawn at random, such as calibration sequences.", maximum=2**32 - 1)
    micro_batch_size: int = _running(
        4,
        "Sequences per forward and backward pass: fewer need less memory, for the same result.",
        minimum=1,
        needs=GRADIENTS,
    )
    activation_checkpointing: bool = _running(
        True,
        "Recompute activations in the backward pass, one layer at a time: less memory, more time.",
        needs=GRADIENTS,
    )
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)

    def __post_init__(self) -> None:
        check_options(self)
        if self.permutation == "auto":
            object.__setattr__(self, "permutation", "heuristic" if "sparsegpt" in self.updates else "searched")
        group = self.sparsity.group
        if self.permutation == "searched" and "sparsegpt" in self.updates:
            raise ConfigError(
                "permutation searched with weight_update sparsegpt is refused: an order searched for masks alone is no "
                "better than the heuristic one once SparseGPT changes the weights; choose permutation heuristic with "
                "importance obs, or leave sparsegpt out"
            )
        if self.permutation == "learned" and self.learn.block_size % group:
            raise ConfigError(
                f"block_size {self.learn.block_size} is not a multiple of the group of {self.sparsity}: "
                f"choose a multiple of {group}"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any], recipe: str = "default") -> "CompileConfig":
        """Builds a config from flat options laid over a recipe.

        Args:
            options: Values by field name of this class or of the configs of its parts (dashes or underscores).
            recipe: a key of `RECIPES`.

        Raises:
            ConfigError: an unknown option or recipe, a value of the wrong type or out of range.
        """
        if not isinstance(recipe, str) or recipe not in RECIPES:
            raise ConfigError(f"recipe {shown(recipe)} is unknown: choose one of {', '.join(RECIPES)}")
        given = {name.replace("-", "_"): value for name, value in options.items()}
        merged: dict[str, Any] = {**RECIPES[recipe], **given}
        if recipe == "published" and merged.get("importance") == "ria" and "learning_rate" not in given:
            merged["learning_rate"] = 5e-3
        if unknown := sorted(set(merged) - set(OPTIONS)):
            raise ConfigError(f"unknown option {shown(unknown[0])}: the options are {', '.join(sorted(OPTIONS))}")

        def values(part: type) -> dict[str, Any]:
            return {o.name: o.convert(merged[o.name]) for o in options_of(part) if o.name in merged}

        return cls(**values(cls), **{name: part(**values(part)) for name, part in PARTS.items()})

    def to_dict(self) -> dict[str, Any]:
        """Returns the flat options that `from_options` reads back to an equal config."""
        own = {each.name: getattr(self, each.name) for each in options_of(self)}
        own["sparsity"] = str(self.sparsity)
        return own | {name: value for part in PARTS for name, value in dataclasses.asdict(getattr(self, part)).items()}

    @property
    def updates(self) -> tuple[str, ...]:
        """The parts of ``weight_update`` in the order in which they run."""
        return () if self.weight_update == "none" else tuple(self.weight_update.split("+"))


PARTS: dict[str, type] = {
    "calibration": CalibrationConfig,
    "learn": LearnConfig,
    "search": SearchConfig,
    "update": UpdateConfig,
}
OPTIONS: dict[str, Option] = {each.name: each for part in (CompileConfig, *PARTS.values()) for each in options_of(part)}

RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    # The paper's settings and its code's: no base order, random start, clamped logits, one softmax scale, last epoch.
    "published": {
        "permutation": "learned",
        "row_weights": "none",
        "start": "random",
        "base_order": "identity",
        "clamp_logits": 1.0,
        "group_scale": False,
        "keep_epoch": "last",
        "learning_rate": 1e-3,
    },
    # The lowest perplexity on the demo, and the lowest within a minute there.
    "best": {"importance": "obs", "permutation": "heuristic", "weight_update": "sparsegpt+reconstruct"},
    "fast": {"importance": "obs", "permutation": "heuristic", "weight_update": "sparsegpt"},
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


def has_effect(name: str, config: CompileConfig) -> bool:
    """Returns whether the rest of a config lets an option, named as its field, have an effect."""
    needs = OPTIONS[name].needs
    return not needs or any(_parts(config, OPTIONS[other]) & set(values) for other, values in needs.items())


def check_explicit_options(explicit: Mapping[str, Any], config: CompileConfig) -> None:
    """Refuses options that a user set by hand and that the rest of the config makes meaningless.

    Raises:
        ConfigError: for example epochs without learning.
    """
    for each in (OPTIONS[name] for name in explicit):
        if not has_effect(each.name, config):
            needed = {OPTIONS[name]: values for name, values in each.needs.items()}
            present = " and ".join(f"{other.flag} {getattr(config, other.name)}" for other in needed)
            choose = " or ".join(f"{other.flag} {value}" for other, values in needed.items() for value in values)
            raise ConfigError(f"{each.flag} has no effect with {present}: drop it or choose {choose}")
    chooses_itself = "sparsegpt" in config.updates and config.update_mask == "own"
    if "importance" in explicit and chooses_itself and config.permutation == "none":
        raise ConfigError(
            "--importance has no effect with --permutation none and --weight-update sparsegpt, which chooses its own "
            "mask: drop it, or choose --update-mask keep"
        )


def _parts(config: CompileConfig, option: Option) -> set[str]:
    return set(str(getattr(config, option.name)).split("+"))


def read_config_file(path: Path) -> dict[str, Any]:
    """Reads a flat TOML file of options.

    Raises:
        ConfigError: the file is missing, is not TOML or holds a table.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOML_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path} cannot be read: {first_line(error)}") from error
    if len(content) > MAX_TOML_BYTES:
        raise ConfigError(f"config file {path} has more than {MAX_TOML_BYTES} bytes: it is no file of options")
    with reading(f"config file {path} is not TOML", ConfigError):
        options = tomllib.loads(content.decode())
    for name, value in options.items():
        if isinstance(value, dict):
            raise ConfigError(f"config file {path} holds a table, [{name}]: write the options flat, one per line")
    return options

"""The options of a compilation that belong to no step; each step in ``permtriton/methods`` defines its own options."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from permtriton.util.option import check_options, option
from permtriton.util.sparsity import MAX_GROUP, NMPattern

ImportanceMethod = Literal["auto", "magnitude", "wanda", "ria", "obs"]
SpecialTokens = Literal["auto", "none"]
OptimizerKind = Literal["adam", "adafactor"]
Layout = Literal["portable", "fused"]
OProj = Literal["tied", "free"]

METHOD, CALIBRATION, RUNNING = ("What to do", "Calibration and evaluation", "Running")
_method = partial(option, panel=METHOD)
_calibration = partial(option, panel=CALIBRATION)
_running = partial(option, panel=RUNNING)
LINEARS = (
    "names of linears or of modules that hold them, globs (*.down_proj), regular expressions after re:, or names of "
    "classes"
)
SURPLUS = 4  # tokens of a text that are read and mixed per calibration token, so that windows sample many documents
# Options that may change before an interrupted run continues, for example to save memory: they only change rounding.
ROUNDING_ONLY = ("micro_batch_size", "activation_checkpointing")
OF_TEXT = ("text_column", "split", "one_document")  # options that say what to read of a text


@dataclass(frozen=True)
class CalibrationConfig:
    """The samples that statistics and steps read; `permtriton.data.calibration.calibration_samples` draws them."""

    calibration: str = _calibration(
        "c4",
        "Calibration data: text, or what else the model reads; the demo model takes demo.",
        values="demo, c4, wikitext2, pile, a dataset on the hub (OWNER/NAME), or a .txt, .jsonl (text or input_ids) or "
        ".parquet file; a .safetensors file with the inputs of any model, such as one of images or sound",
    )
    samples: int = _calibration(128, "Number of calibration sequences, or of other samples.", minimum=1)
    sequence_length: int = _calibration(1024, "Tokens per calibration sequence.", minimum=2)
    generated: int = _calibration(
        0,
        "Further sequences, which the dense model writes, for the steps that bring the pruned model back to it (refit, "
        "distill); only for models that write text.",
    )
    special_tokens: SpecialTokens = _calibration(
        "auto",
        "Special tokens, such as BOS, around each sequence that is cut out of a text, held-out text included. auto: "
        "as the tokenizer puts them around a single text; they are tokens of the sequence, but count in no loss and no "
        "perplexity. none: documents have them, sequences only by chance, as in the literature.",
    )
    one_document: bool = _calibration(
        False,
        "Draw each sequence from one document that is longer than it, as SparseGPT and Wanda do; by default documents "
        "are joined.",
    )
    text_column: str = _calibration(
        "",
        "Column of the calibration data that holds the text; by default input_ids, text or messages.",
        values="name of a column of a dataset on the hub, or of a .jsonl or .parquet file",
    )
    split: str = _calibration(
        "",
        "Part of the calibration data, a dataset on the hub; by default train.",
        values="name of a split, or a slice of one, such as train[:1000]",
    )
    calibrate_all_experts: bool = _calibration(
        False,
        "In a mixture, let every expert see every token while statistics are taken: for experts that few tokens are "
        "sent to. The tokens go the model's own way all the same; calibration takes as long as all experts take.",
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class CommonConfig:
    """The options that belong to no step; `permtriton.methods.recipe_config.CompileConfig` adds the steps."""

    sparsity: NMPattern = _method(
        NMPattern(2, 4),
        "Sparsity pattern: N of every M consecutive weights of a row are kept.",
        values=f"N:M with 0 < N < M <= {MAX_GROUP}",
    )
    pattern: tuple[str, ...] = _method(
        (),
        "Another sparsity pattern for some linears, such as *.down_proj=4:8. Repeat the flag for several; where two "
        "name a linear, the first one counts.",
        values="LINEARS=N:M, with linears as for targets",
    )
    importance: ImportanceMethod = _method(
        "auto",
        "Score that decides which weights are kept. auto means obs in a recipe with sparsegpt or refit, else wanda.",
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
    targets: tuple[str, ...] = _method(
        (),
        "Prune only these linears; by default all that can be pruned. Repeat the flag for several.",
        values=LINEARS,
    )
    ignore: tuple[str, ...] = _method(
        (), "Linears that stay dense, even if targets name them. Repeat the flag for several.", values="as for targets"
    )
    dense_share: float = _method(
        0.0,
        "Share of the prunable weights that stays dense: the linears whose masks raise the loss most per weight. To "
        "find them takes a backward pass on all samples.",
        maximum=0.9,
    )
    seed: int = _running(0, "Seed of all that is drawn at random, such as calibration sequences.", maximum=2**32 - 1)
    micro_batch_size: int = _running(
        4,
        "Sequences per forward and backward pass: fewer need less memory, for the same result.",
        minimum=1,
    )
    activation_checkpointing: bool = _running(
        False,
        "Recompute activations in the backward pass, one layer at a time: less memory, more time. Without it, they are "
        "kept only where everything fits in half of the free memory.",
    )
    mixed_precision: bool = _running(
        True,
        "Let float32 models multiply in fewer bits where a GPU or processor does so faster: bfloat16 while text is "
        "written or weights are trained, rounded factors while they are fitted.",
    )
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    def __post_init__(self) -> None:
        check_options(self)
        for text in self.pattern:
            NMPattern.of_some(text)

    @property
    def patterns(self) -> tuple[NMPattern, ...]:
        """Every pattern that a linear may have."""
        return self.sparsity, *(NMPattern.of_some(text)[1] for text in self.pattern)

    @property
    def surplus(self) -> int:
        """Sequences drawn from a text per calibration sample, this sample included, if the text holds so many."""
        return SURPLUS

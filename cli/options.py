"""The options that several commands take: None unless the user gave them, so that recipes and files show through."""

from pathlib import Path
from typing import Annotated, Any

import typer

from permtriton.calibration import evaluation_ids
from permtriton.config import OPTIONS, CompileConfig, check_explicit_options, read_config_file
from permtriton.errors import CalibrationError
from permtriton.forward import max_tokens
from permtriton.load import Source

METHOD, CALIBRATION, LEARNING, RUNNING = "What to do", "Calibration and evaluation", "Learning", "Running"

ModelArgument = Annotated[
    str, typer.Argument(help="A model folder, a hub name, or demo (a small model inside permtriton).")
]
Sparsity = Annotated[str | None, typer.Option(help="N:M, N kept of every M; 2:4 by default.", rich_help_panel=METHOD)]
Importance = Annotated[str | None, typer.Option(help="magnitude, wanda, ria or obs.", rich_help_panel=METHOD)]
Permutation = Annotated[str | None, typer.Option(help="none, heuristic or learned.", rich_help_panel=METHOD)]
WeightUpdate = Annotated[str | None, typer.Option(help="none or sparsegpt.", rich_help_panel=METHOD)]
UpdateMask = Annotated[
    str | None,
    typer.Option(help="With sparsegpt: own (chosen as it goes) or keep (the importance's).", rich_help_panel=METHOD),
]
Layout = Annotated[
    str | None,
    typer.Option(
        help="portable: all permutations folded, a plain checkpoint that loads anywhere. fused: a permutation for "
        "every layer input; what does not fold runs inside the norms, and loading needs permtriton.",
        rich_help_panel=METHOD,
    ),
]
OProj = Annotated[
    str | None,
    typer.Option(
        help="With fused: tied (folded, within heads) or free (better order, a gather).", rich_help_panel=METHOD
    ),
]
SkipIndivisible = Annotated[
    bool | None,
    typer.Option(
        "--skip-indivisible", help="Leave linears dense whose input is no multiple of M.", rich_help_panel=METHOD
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option(help="default (ours), published (the paper's), demo (for a laptop; the demo model's default).",
                 rich_help_panel=METHOD),
]  # fmt: skip
Calibration = Annotated[
    str | None,
    typer.Option(
        help="demo, c4, wikitext2, pile, or a .txt, .jsonl (text or input_ids) or .parquet file.",
        rich_help_panel=CALIBRATION,
    ),
]
Samples = Annotated[int | None, typer.Option(help="Calibration sequences.", rich_help_panel=CALIBRATION)]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens in each.", rich_help_panel=CALIBRATION)]
EvalText = Annotated[
    str | None,
    typer.Option(help="Held-out text: demo, wikitext2, a file, or none. The demo's own, else wikitext2, by default.",
                 rich_help_panel=CALIBRATION),
]  # fmt: skip
BlockSize = Annotated[
    int | None, typer.Option(help="Channels in a block of the permutation.", rich_help_panel=LEARNING)
]
SinkhornRounds = Annotated[int | None, typer.Option(help="Row and column normalisations.", rich_help_panel=LEARNING)]
TauStart = Annotated[float | None, typer.Option(help="Temperature of the first step.", rich_help_panel=LEARNING)]
TauEnd = Annotated[float | None, typer.Option(help="Temperature of the last step.", rich_help_panel=LEARNING)]
Epochs = Annotated[int | None, typer.Option(help="Passes over the calibration sequences.", rich_help_panel=LEARNING)]
LearningRate = Annotated[float | None, typer.Option(help="AdamW's.", rich_help_panel=LEARNING)]
WeightDecay = Annotated[float | None, typer.Option(help="AdamW's.", rich_help_panel=LEARNING)]
BatchSize = Annotated[int | None, typer.Option(help="Sequences in a step.", rich_help_panel=LEARNING)]
MicroBatchSize = Annotated[
    int | None, typer.Option(help="Sequences at once: less memory, same result.", rich_help_panel=LEARNING)
]
LearnLayers = Annotated[
    str | None, typer.Option(help="all, or last:K; the others take the heuristic order.", rich_help_panel=LEARNING)
]
Start = Annotated[str | None, typer.Option(help="identity (near the base order) or random.", rich_help_panel=LEARNING)]
BaseOrder = Annotated[str | None, typer.Option(help="heuristic or identity.", rich_help_panel=LEARNING)]
StartNoise = Annotated[
    float | None, typer.Option(help="Size of the random part near the identity.", rich_help_panel=LEARNING)
]
ClampLogits = Annotated[float | None, typer.Option(help="Limit on logits; 0 for none.", rich_help_panel=LEARNING)]
GroupScale = Annotated[
    bool | None, typer.Option(help="Divide scores by their group's mean before the softmax.", rich_help_panel=LEARNING)
]
KeepEpoch = Annotated[str | None, typer.Option(help="best or last.", rich_help_panel=LEARNING)]
ActivationCheckpointing = Annotated[
    bool | None, typer.Option(help="Recompute activations: less memory, more time.", rich_help_panel=LEARNING)
]
Seed = Annotated[int | None, typer.Option(help="Of the calibration draw and of learning.", rich_help_panel=RUNNING)]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=RUNNING)]
Dtype = Annotated[
    str, typer.Option(help="auto (the checkpoint's), float32, float16 or bfloat16.", rich_help_panel=RUNNING)
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML file of recipe, method, calibration and learning options; flags win.",
        rich_help_panel=RUNNING,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the report as JSON on standard output.", rich_help_panel=RUNNING)
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.", rich_help_panel=RUNNING)
]

EVALUATION_TOKENS = 2048  # in a window, where the model has as many positions


def build_config(model: str, recipe: str | None, config_file: Path | None, arguments: dict[str, Any]) -> CompileConfig:
    """Lays flags over the file over the recipe.

    Raises:
        ConfigError: an unknown option, a bad value, or a flag without a meaning.
    """
    explicit = {name: arguments[name] for name in OPTIONS if arguments.get(name) is not None}
    from_file = {k.replace("-", "_"): v for k, v in (read_config_file(config_file) if config_file else {}).items()}
    recipe = recipe or from_file.pop("recipe", None) or ("demo" if model == "demo" else "default")
    from_file.pop("recipe", None)
    defaults = {"calibration": "demo"} if model == "demo" else {}
    config = CompileConfig.from_options({**defaults, **from_file, **explicit}, recipe)
    check_explicit_options(explicit, config)
    return config


def held_out_windows(source: Source, eval_text: str | None, tokenizer: Any, model: Any) -> tuple[Any, str]:
    """Returns the held-out windows, or None, and what they are or why there are none.

    Raises:
        CalibrationError: a text that was asked for cannot be read.
    """
    if eval_text == "none":
        return None, "not asked for"
    name = eval_text or ("demo" if source.name == "demo" else "wikitext2")
    limit = max_tokens(model) or EVALUATION_TOKENS
    vocabulary = model.get_input_embeddings().weight.shape[0]
    try:
        return evaluation_ids(name, tokenizer, vocabulary, min(limit, EVALUATION_TOKENS)), name
    except CalibrationError as error:
        if eval_text is not None:
            raise
        return None, str(error)

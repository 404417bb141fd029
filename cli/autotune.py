"""The command ``permtriton autotune``: measures the kernels' configurations and prints the result."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from permtriton.cli.console import print_json, show
from permtriton.cli.options import Json
from permtriton.errors import ConfigError
from permtriton.kernels import autotune as cache
from permtriton.kernels.launch import Config, triton
from permtriton.kernels.tools.case import Case
from permtriton.kernels.tools.cases import cases_for
from permtriton.kernels.tools.tuning import Trial, tune
from permtriton.methods import planning
from permtriton.methods.recipe_config import CompileConfig
from permtriton.model import load
from permtriton.model.source import Source
from permtriton.passes.plan import linear_module, weight_in_out
from permtriton.util.bars import BarProgress, err

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FIGURES = {"p20_us": "p20 us", "p50_us": "p50 us", "p80_us": "p80 us", "gb_s": "GB/s", "tflop_s": "TFLOP/s"}


def autotune(
    model: Annotated[
        Path | None, typer.Option(help="A model, compiled or not: the shapes and dtype of its pruned linears.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="OUTxIN of a linear, such as 11008x4096; repeat.")] = None,
    tokens: Annotated[str, typer.Option(help="Token counts, separated by commas.")] = "1,16,64,2048",
    kernel: Annotated[str | None, typer.Option(help="Only this kernel, such as sparse_linear.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of weights and activations: bfloat16, float16 or float32; the model's, or bfloat16, by default."
        ),
    ] = None,
    json: Json = False,
) -> None:
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    model_shapes, model_dtype = _shapes_of(model) if model else ([], torch.bfloat16)
    all_shapes = [_shape(text) for text in shape or ()] + model_shapes
    if not all_shapes:
        raise ConfigError("nothing to tune: give --model DIR or --shape OUTxIN")
    cases = cases_for(all_shapes, _tokens(tokens), DTYPES[dtype] if dtype else model_dtype, kernel)
    if not torch.cuda.is_available():
        raise ConfigError("autotune measures on a CUDA GPU, but torch can use none here")
    if triton is None:
        raise ConfigError("autotune measures Triton kernels, but triton is not installed: pip install triton")
    _tune(cases, json)


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", text.strip())
    if match is None:
        raise ConfigError(f"shape {text!r}: expected OUTxIN, such as 11008x4096")
    return int(match[1]), int(match[2])


def _tokens(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d*", part) for part in parts):
        raise ConfigError(f"tokens {text!r}: expected positive integers separated by commas, such as 1,16,2048")
    return [int(part) for part in parts]


def _shapes_of(folder: Path) -> tuple[list[tuple[int, int]], torch.dtype]:
    """Returns the distinct shapes (out, in) of a model's pruned linears, and the model's dtype.

    Linears that vLLM joins, such as q, k and v, also count as one linear. Only the model's config is read.
    """
    empty = load.load_empty_model(Source(str(folder)))
    plan, _ = planning.plan_model(empty, CompileConfig())
    shapes: dict[tuple[int, int], None] = {}
    for site in plan.sites:
        joined: Counter[str] = Counter()  # module -> rows of its linears, which vLLM joins: q, k and v; gate and up
        for name in site.linears:
            rows = weight_in_out(linear_module(empty, name)).shape[1]
            joined[name.rpartition(".")[0]] += rows
            shapes[rows, site.channels] = None
        shapes |= dict.fromkeys((rows, site.channels) for rows in joined.values())
    return list(shapes), empty.dtype


def _tune(cases: Sequence[Case], json: bool) -> None:
    machine, file = cache.machine_key(), cache.cache_file()
    if not json:
        err.print(f"{machine}; winners are stored in {file}", highlight=False, soft_wrap=True)
    trials: list[Trial] = []
    with BarProgress().stage("autotune", len(cases)) as advance:
        for case in cases:
            trials += tune([case], torch.device("cuda"), machine, file)
            advance(1, case.name)
    entries = cache.read_entries(file, machine)
    if json:
        print_json({"machine": machine, "entries": entries})
        return
    rows = (_row(trial, Config(**entries[trial.key]["config"])) for trial in trials)
    show("Configurations", rows, "case", "configuration", *FIGURES.values(), "")


def _row(trial: Trial, chosen: Config) -> tuple[str, ...]:
    figures, named = trial.measured, (trial.case, cache.describe(trial.config))
    if "error" in figures:
        return *named, *("-" for _ in FIGURES), figures["error"]
    marks = {"default": trial.default, "chosen": trial.config == chosen}
    numbers = (f"{figures[name]:.1f}" for name in FIGURES)
    return *named, *numbers, ", ".join(mark for mark, holds in marks.items() if holds)

"""``permtriton autotune``."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from permtriton import load, planning
from permtriton.cli import options
from permtriton.cli.console import BarProgress, clear_errors, err, out, print_json, table
from permtriton.config import CompileConfig
from permtriton.errors import ConfigError
from permtriton.kernels import autotune as cache
from permtriton.kernels import timing, tuning
from permtriton.kernels.cases import Case
from permtriton.kernels.launch import triton
from permtriton.kernels.tuning import KERNELS, Trial
from permtriton.plan import linear_module, weight_in_out

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def autotune(
    model: Annotated[
        Path | None, typer.Option(help="A model, compiled or not: the shapes and dtype of its pruned linears.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="OUTxIN of a linear, such as 11008x4096; repeat.")] = None,
    tokens: Annotated[str, typer.Option(help="Tokens at once, separated by commas.")] = "1,16,2048",
    kernel: Annotated[str | None, typer.Option(help=f"Only one of {', '.join(KERNELS)}.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Of weights and activations: {', '.join(DTYPES)}. The model's, or bfloat16.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be tried; needs no GPU.")] = False,
    save: Annotated[
        bool, typer.Option("--save", help=f"Keep the winners beside the model, too, in {cache.BESIDE_MODEL}.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Find the fastest configuration of each GPU kernel, for the shapes of a model, on the present GPU."""
    with clear_errors():
        if save and (model is None or not model.is_dir()):
            raise ConfigError("--save keeps the winners beside a model: give --model DIR, a folder")
        if dtype not in (None, *DTYPES):
            raise ConfigError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
        shapes, stored = _shapes_of(model) if model else ([], torch.bfloat16)
        shapes = [_shape(text) for text in shape or []] + shapes
        values = DTYPES[dtype] if dtype else stored
        if not shapes:
            raise ConfigError("nothing to tune: give --model DIR or --shape OUTxIN")
        device = torch.device("cpu" if dry_run else "cuda")
        if not dry_run:
            _check_gpu()
        todo = tuning.cases_for(shapes, _tokens(tokens), values, device, kernel)
        files = [cache.cache_file()] + ([model / cache.BESIDE_MODEL] if save and model else [])
        if dry_run:
            _list(todo, files, json)
        else:
            _tune(todo, files, device, json)


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise ConfigError(
            "autotune measures on a CUDA GPU, and torch can use none here; --dry-run lists what would be tried"
        )
    if triton is None:
        raise ConfigError("autotune tries Triton kernels, and triton is not installed: pip install triton")


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", text.strip())
    if found is None:
        raise ConfigError(f"shape {text!r}: expected OUTxIN, such as 11008x4096")
    return int(found[1]), int(found[2])


def _tokens(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d*", part) for part in parts):
        raise ConfigError(f"tokens {text!r}: expected numbers above 0 separated by commas, such as 1,16,2048")
    return [int(part) for part in parts]


def _shapes_of(folder: Path) -> tuple[list[tuple[int, int]], torch.dtype]:
    """Returns (out, in) of each pruned linear of a model, once a shape, and their dtype; reads its config only."""
    empty = load.load_empty_model(load.Source(str(folder)), allow_compiled=True)
    plan, _ = planning.plan_model(empty, CompileConfig())
    weights = [weight_in_out(linear_module(empty, name)) for _, name in plan.linears()]
    shapes = dict.fromkeys((weight.shape[1], weight.shape[0]) for weight in weights)
    return list(shapes), weights[0].dtype if weights else torch.bfloat16


def _list(todo: Sequence[Case], files: Sequence[Path], json: bool) -> None:
    found = {case.name: {name: [cache.describe(config) for config in configs]
                         for name, configs in tuning.tables_of(case).items()} for case in todo}  # fmt: skip
    if json:
        print_json({"cases": found, "cache": str(files[0])})
        return
    shown = table("What would be tried", "case", "tables")
    for name, tables in found.items():
        shown.add_row(name, ", ".join(tables) or "none: one configuration only")
    out.print(shown)
    listed = table("Tables", "table", "configurations, the default first")
    for kernel, configs in {name: same for tables in found.values() for name, same in tables.items()}.items():
        listed.add_row(kernel, "\n".join(configs))
    out.print(listed)
    total = sum(len(configs) for tables in found.values() for configs in tables.values())
    kept = " and ".join(map(str, files))
    out.print(f"{len(found)} cases, {total} trials at most; winners would be kept in {kept}", soft_wrap=True)


def _tune(todo: Sequence[Case], files: Sequence[Path], device: torch.device, json: bool) -> None:
    machine = cache.machine_key()
    if not json:
        err.print(f"{machine}; winners are kept in {files[0]}", highlight=False, soft_wrap=True)
    limits = timing.ceilings(device)
    trials: list[Trial] = []
    with BarProgress().stage("autotune", len(todo)) as advance:
        for case in todo:
            tuning.tune([case], device, machine, files, trials.append)
            advance(1, case.name)
    entries = cache.read_entries(files[0], machine)
    copy, product = limits.copy_gb_s, limits.matmul_tflop_s
    if json:
        print_json({"machine": machine, "copy_gb_s": copy, "matmul_tflop_s": product, "entries": entries})
        return
    shown = table("Configurations", "case", "configuration", "p20 us", "p50 us", "p80 us", "reaches", "")
    for trial in trials:
        chosen = entries[trial.key]["config"]
        told = dict(trial.told)
        marks = [text for text, holds in (("default", trial.default), ("from the cache", trial.known),
                                          ("chosen", _is(chosen, trial.config))) if holds]  # fmt: skip
        if "error" in told:
            shown.add_row(trial.case, trial.config, "-", "-", "-", "-", told["error"])
            continue
        times = [f"{told[name]:.1f}" for name in ("p20_us", "p50_us", "p80_us")]
        shown.add_row(trial.case, trial.config, *times, _reaches(told, copy, product), ", ".join(marks))
    out.print(shown)
    out.print(f"ceilings measured here: copy {copy:.0f} GB/s, bf16 matmul {product:.0f} TFLOP/s", highlight=False)


def _is(stored: dict[str, object], described: str) -> bool:
    constants, rest = dict(stored["constants"]), {k: v for k, v in stored.items() if k != "constants"}  # type: ignore[call-overload]
    return sorted(f"{name}={value}" for name, value in {**constants, **rest}.items()) == sorted(described.split())


def _reaches(told: dict[str, float], copy: float, product: float) -> str:
    """GB/s or TFLOP/s, whichever is nearer to its ceiling."""
    if told["tflop_s"] / product > told["gb_s"] / copy:
        return f"{told['tflop_s']:.0f} TFLOP/s, {100 * told['tflop_s'] / product:.0f}% of the matmul"
    return f"{told['gb_s']:.0f} GB/s, {100 * told['gb_s'] / copy:.0f}% of the copy"

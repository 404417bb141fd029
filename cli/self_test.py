"""The self-test: compiles a tiny model from end to end, and runs the kernels on a GPU."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from permtriton.driver.pipeline import compile_model
from permtriton.errors import PermTritonError
from permtriton.kernels import cusparselt
from permtriton.kernels.autotune import forced
from permtriton.kernels.launch import Config, has_kernels, triton
from permtriton.kernels.sparse_linear import CUSPARSELT
from permtriton.kernels.tools.cases import cases_for, sparse_linear_case
from permtriton.recipe import config_from

BUDGET = 10.0  # seconds; kernels whose check has not started by then are left out
WORKS, ABSENT, FAILS = "works", "not here", "fails"
SHAPE, TOKENS = (128, 256), 16  # (out, in) features and tokens of a linear that every kernel supports


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str  # what was tried
    outcome: str  # ``works``, ``not here`` (this machine lacks what it needs, which is no fault) or ``fails``
    detail: str  # what ran, or why it did not work
    seconds: float  # time that it took


def self_test() -> list[Check]:
    """Runs all checks and returns their outcomes; takes about ten seconds at most, and leaves nothing on the disk."""
    deadline = time.perf_counter() + BUDGET
    gpu = torch.device("cuda", 0) if torch.cuda.is_available() else None
    return [
        _checked("compile, save and reload", _compile),
        _checked("Triton", lambda: _kernels(gpu, deadline)),
        _checked("cuSPARSELt", lambda: _cusparselt(gpu)),
    ]


class _Absent(Exception):
    """This machine lacks what a check needs; the message says what."""


def _checked(name: str, check: Callable[[], str]) -> Check:
    """Runs ``check``, which returns what ran, or raises if something is missing or wrong, and returns the outcome."""
    started = time.perf_counter()
    try:
        outcome, detail = WORKS, check()
    except _Absent as missing:
        outcome, detail = ABSENT, str(missing)
    except Exception as error:  # the self-test reports any fault of an installation
        words = next(iter(str(error).strip().splitlines()), "")
        outcome, detail = FAILS, words if isinstance(error, PermTritonError) else f"{type(error).__name__}: {words}"
    return Check(name, outcome, detail, round(time.perf_counter() - started, 2))


def _compile() -> str:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config)
        ids = torch.randint(0, config.vocab_size, (4, 16))
    options = config_from(recipe="heuristic,mask")
    compiled = compile_model(model, None, options, ids=ids)
    with tempfile.TemporaryDirectory(prefix="permtriton-") as folder:
        compiled.save_pretrained(Path(folder) / "tiny")
    verified = compiled.report["verification"]
    moved = sum(entry["moved"] for entry in compiled.report["permutations"])
    assert moved, "the heuristic order moved no channel"
    return f"{verified['pruned_weights']} weights 2:4, {moved} channels moved, reloaded: {verified['reloaded']}"


def _kernels(device: torch.device | None, deadline: float) -> str:
    if device is None:
        raise _Absent("no GPU that torch can use: the references in plain torch run on the CPU")
    if not has_kernels(device):
        why = "triton is not installed" if triton is None else "the GPU is older than compute capability 8.0"
        raise _Absent(f"{why}: the references in plain torch run on the GPU")
    done, left = 0, 0
    for case in cases_for([SHAPE], [TOKENS], torch.float16):
        if time.perf_counter() > deadline:
            left += 1
            continue
        if problem := case.check(device):
            raise RuntimeError(f"kernel {case.name}: {problem}")
        done += 1
    return f"{done} kernels agree with their references" + (f"; no time for {left} more" if left else "")


def _cusparselt(device: torch.device | None) -> str:
    if device is None:
        raise _Absent("no GPU that torch can use")
    if not cusparselt.supports(torch.float16, *SHAPE, device):
        raise _Absent("this build of torch comes without it, or the GPU has no sparse tensor cores")
    with forced({"sparse_linear_route": Config({"ROUTE": CUSPARSELT})}):
        if problem := sparse_linear_case(TOKENS, *SHAPE, torch.float16).check(device):
            raise RuntimeError(f"its product is not that of the dense weight: {problem}")
    return "its 2:4 product is that of the dense weight"

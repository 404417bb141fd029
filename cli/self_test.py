"""The self-test: compares the kernels with their references on a GPU."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from permtriton.kernels import cusparselt
from permtriton.kernels.autotune import forced
from permtriton.kernels.launch import Config, has_kernels
from permtriton.kernels.sparse_linear import CUSPARSELT
from permtriton.kernels.tools.case import Case
from permtriton.kernels.tools.cases import cases_for, sparse_linear_case

WORKS, FAILS = "works", "fails"
SHAPE, TOKENS = (128, 256), 16  # (out, in) features and tokens of a linear that every kernel supports


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str  # what was tried
    outcome: str  # ``works`` or ``fails``
    detail: str  # what ran, or why it did not work
    seconds: float  # time that it took


def self_test() -> list[Check]:
    """Runs all checks on the first GPU and returns their outcomes; none where no kernels run."""
    gpu = torch.device("cuda", 0)
    if not torch.cuda.is_available() or not has_kernels(gpu):
        return []
    checks = [_checked("Triton", cases_for([SHAPE], [TOKENS], torch.float16), gpu)]
    if cusparselt.supports(torch.float16, *SHAPE, gpu):
        with forced({"sparse_linear_route": Config({"ROUTE": CUSPARSELT})}):
            checks.append(_checked("cuSPARSELt", [sparse_linear_case(TOKENS, *SHAPE, torch.float16)], gpu))
    return checks


def _checked(name: str, cases: Sequence[Case], gpu: torch.device) -> Check:
    """Compares the result of each case with its reference."""
    started = time.perf_counter()
    outcome, detail = WORKS, f"{len(cases)} calls agree with their references"
    try:
        for case in cases:
            if problem := case.check(gpu):
                outcome, detail = FAILS, f"kernel {case.name}: {problem}"
                break
    except Exception as error:  # the self-test reports any fault of an installation
        words = next(iter(str(error).strip().splitlines()), "")
        outcome, detail = FAILS, f"{type(error).__name__}: {words}"
    return Check(name, outcome, detail, round(time.perf_counter() - started, 2))

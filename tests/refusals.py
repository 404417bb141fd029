"""Which checks refuse a seeded fault: the one that does is made deaf, and so on, until none does any more."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from permtriton import config_from
from permtriton.checkpoint import export as exporting
from permtriton.checkpoint import format_writer, verify
from permtriton.checkpoint import save as saving
from permtriton.driver import pipeline as compiler
from permtriton.errors import VerificationError
from permtriton.methods import run as running
from permtriton.methods.order import learned, searched
from permtriton.methods.prune import mask, refit, sparsegpt
from permtriton.methods.train import distill
from permtriton.passes import pipeline as passes
from permtriton.passes.plan import ChannelSpace

from . import zoo
from .faults import Fault

IDS = zoo.token_ids(4, 16)


@dataclass(frozen=True)
class Check:
    """What a check holds, where the functions are that raise if it does not hold, and what they return if it does."""

    holds: str
    functions: tuple[tuple[Any, str], ...]
    value: Callable[..., Any] = lambda *arguments, **options: 0.0


CHECKS = (
    Check("an order is a permutation that keeps to its heads", ((ChannelSpace, "check"),)),
    Check("passes: the graph joins the same channels", ((passes, "check_channels"),)),
    Check("the permuted model gives the dense model's outputs", ((running.Reference, "check"),)),
    Check("the permuted weights retain the importance that was found", ((running, "check_retained"),)),
    Check("the masks retain it, too", ((mask, "check_retained"),)),
    Check("the masked model has the loss that was found", ((running.Run, "check_promise"),)),
    Check("a step ends no worse than it began", tuple((each, "check_no_worse") for each in (learned, searched, refit))),
    Check("every group keeps N weights", tuple((each, "check_kept") for each in (mask, sparsegpt, refit))),
    Check("trained weights have the loss that was measured", ((distill, "check_loss"),)),
    Check("pruned weights are N:M, finite and free of -0.0", ((compiler, "check_pruned"),)),
    Check("the pruned model gives the outputs of the lowered graph", ((compiler, "check_graph"),)),
    Check(
        "files: every tensor is finite, every pruned one N:M",
        ((verify, "check_finite_tensor"), (verify, "check_weight")),
    ),
    Check("files: every tensor is the one in memory", ((verify, "check_same_bits"),)),
    Check("files: no tensor is missing", ((verify, "_check_complete"),)),
    Check("files: the model loads, and gives the same outputs", ((saving, "compare_reloaded"),), lambda *arguments: {}),
    Check("export: what is written is what was read", ((format_writer, "check_same_bits"),)),
)


def run(fault: Fault, folder: Path) -> None:
    """Does with the tiny model what the fault would spoil."""
    model = zoo.build(fault.model, **fault.changes).to(fault.dtype)
    compiled = compiler.compile_model(model, None, config_from(fault.options), ids=IDS)
    if fault.then:
        compiled.save_pretrained(folder / "out")
    if fault.then == "export":
        exporting.export(folder / "out", folder / "packed")


def refusals(fault: Fault) -> list[str]:
    """Returns the checks that refuse a fault, in their order; "crash" for an error that is none of ours."""
    found: list[str] = []
    while True:
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            refused = listening(patch, found)
            fault.plant(patch)
            try:
                run(fault, Path(folder))
            except VerificationError:
                assert refused, "a check that is not in CHECKS"
            except Exception:
                return [*found, "crash"]
        if not refused:
            return found
        found.append(refused[0])


def listening(patch: pytest.MonkeyPatch, deaf: list[str]) -> list[str]:
    """Returns a list to which checks add their names when they refuse; those that are deaf do not."""
    refused: list[str] = []

    def listened(check: Check, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            try:
                return original(*arguments, **options)
            except VerificationError:
                if check.holds in deaf:
                    return check.value(*arguments, **options)
                refused.append(check.holds)
                raise

        return called

    for check in CHECKS:
        for owner, name in check.functions:
            patch.setattr(owner, name, listened(check, getattr(owner, name)))
    return refused

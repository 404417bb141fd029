"""What may be asked of a comparison beside its model and its options; each stands once, with the words of its flag."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from permtriton.config import METHOD, RUNNING
from permtriton.driver.asked import Asked
from permtriton.evaluation.asked import Loads, Measures
from permtriton.evaluation.compare_methods import FUSED, METHODS
from permtriton.util.asking import flag, same_as

Words = str | Sequence[Any] | None  # one word, several separated by commas, or a list


@dataclass(frozen=True, kw_only=True)
class AskedComparison(Loads, Measures):
    """What `permtriton.compare` takes, which describes it; what has words is a flag of its command, too.

    Attributes:
        json: of the command alone.
    """

    sparsity: Words = flag(
        None,
        METHOD,
        "Sparsity pattern, or several, separated by commas, such as 2:4,4:8: each method runs with each of them. "
        "[default: 2:4]",
        metavar="N:M,...",
    )
    seeds: int | str | Sequence[int] = flag((0,), RUNNING, "Seeds, separated by commas.", unset="0")
    methods: Words = flag(
        None,
        METHOD,
        f"Methods ({', '.join(name for name in METHODS if not name.endswith(FUSED))}, and those that order channels "
        f"with{FUSED} after them), recipes, or steps joined by ' + ', such as 'heuristic + refit + distill' or, with a "
        "step of yours, 'heuristic + my_steps.py:Mine', separated by commas; by default all methods, and the default "
        "recipe with --ablate.",
    )
    ablate: str | None = flag(
        None,
        METHOD,
        "Run each method with several --values of one option, such as refit-exchanges.",
        metavar="OPTION",
    )
    values: Words = flag(
        None,
        METHOD,
        "With --ablate: the values, separated by commas, such as 0,2,4,8.",
    )
    config: str | Path | None = same_as(Asked, "config")
    json: bool = flag(False, RUNNING, "Print the report as JSON on standard output.", kind=bool, command=True)
    output: str | Path | None = flag(
        None,
        RUNNING,
        "JSON file to write the report to. Finished results are kept beside it: the same command, also with more "
        "methods, continues from them.",
        kind=Path,
        metavar="PATH",
    )
    overwrite: bool = flag(
        False,
        RUNNING,
        "Measure everything again, whatever is kept, and replace any earlier file.",
        kind=bool,
    )

"""What may be asked of a compilation beside its model and its options; each stands once, with the words of its flag."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from permtriton.checkpoint.format import HELP as FORMATS
from permtriton.config import METHOD, RUNNING
from permtriton.evaluation.asked import HUB, Loads, Measures
from permtriton.methods.step import Step
from permtriton.recipe import RECIPES
from permtriton.util.asking import flag, same_as

if TYPE_CHECKING:  # they import torch, which `permtriton --help` must not
    from permtriton.data.in_memory import Data
    from permtriton.data.media import Processor


@dataclass(frozen=True, kw_only=True)
class Asked(Loads):
    """What `permtriton.compile` takes, which describes it; what has words is a flag of ``permtriton compile``, too.

    Attributes:
        dry_run: of the command alone: `permtriton.dry_run` is a function.
        devices: of the command alone, with ``dry_run``.
    """

    recipe: "str | Sequence[Step] | None" = flag(
        None,
        METHOD,
        f"One of {', '.join(RECIPES)}, or steps separated by commas, such as heuristic,sparsegpt or, with a step of "
        "yours, heuristic,my_steps.py:Mine; permtriton recipes describes them.",
    )
    protocol: str | None = same_as(Measures, "protocol")
    data: "Data | None" = None
    text_column: str | None = None
    split: str | None = None
    tokenizer: "Processor | None" = None
    eval_data: "Data | None" = same_as(Measures, "eval_data", default="none", unset=None)
    eval_windows: int | None = same_as(Measures, "eval_windows")
    output: str | Path | None = flag(
        None, RUNNING, "Folder to write; MODEL-NofM here by default.", kind=Path, metavar="PATH"
    )
    save_format: str | None = flag(None, RUNNING, f"{FORMATS} By default dense.")
    push_to_hub: str | None = flag(
        None,
        HUB,
        "Repository on the hub to publish the output in, such as me/my-model-2of4; made before the work, so that a "
        "wrong name or token is found then.",
        metavar="REPOSITORY",
    )
    private: bool | None = flag(
        None,
        HUB,
        "Make the repository of --push-to-hub a private one; by default the hub decides.",
        kind=bool,
    )
    overwrite: bool = flag(False, RUNNING, "Replace an earlier output.", kind=bool)
    restart: bool = flag(False, RUNNING, "Start from scratch instead of resuming.", kind=bool)
    dry_run: bool = flag(
        False,
        RUNNING,
        "Show the plan and an estimate of time, memory and disk, then stop; nothing is written.",
        kind=bool,
        command=True,
    )
    devices: str | None = flag(
        None,
        RUNNING,
        "With --dry-run: plan for this many GPUs with this many GiB each, such as 8x80. Needs no text and no weights.",
        metavar="COUNTxGIB",
        command=True,
    )
    shard: bool | None = flag(
        None,
        RUNNING,
        "Under torchrun, spread the weights of layers over the GPUs by FSDP2; by default if one cannot hold them.",
        kind=bool,
        no=True,
        hidden=True,
    )
    onload: bool | None = flag(
        None,
        RUNNING,
        "Keep the model in host memory and bring its layers to the GPU one by one; by default if the GPU cannot hold "
        "the model. Not for steps that need all weights at once.",
        kind=bool,
        no=True,
        hidden=True,
    )
    config: str | Path | None = flag(
        None, RUNNING, "TOML file of options, with a table per step; flags win.", kind=Path, metavar="FILE"
    )

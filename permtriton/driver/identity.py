"""The inputs that decide the result of a run: an interrupted run continues only from states with the same ones."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from permtriton.config import ROUNDING_ONLY
from permtriton.data.samples import Samples
from permtriton.methods import steps
from permtriton.methods.planning import Planned
from permtriton.methods.recipe_config import CompileConfig
from permtriton.methods.step import Step
from permtriton.model.checks import model_hash
from permtriton.running.resume import StateFile, layers_beside, state_path
from permtriton.util import ranks
from permtriton.util.machine import device_name, versions

WRITING = "generated"  # the state of the text that the dense model writes


def states_beside(resume_path: Path, recipe: Sequence[Step]) -> list[Path]:
    """Returns the paths of the states that an interrupted run left, of permtriton's own steps and of the recipe's."""
    names = dict.fromkeys(
        (WRITING, steps.DenseShare.prefix, *(kind.name for kind in steps.STEPS), *(step.name for step in recipe))
    )
    paths = [state_path(resume_path, name) for name in names]
    return sorted(file for path in paths for file in (path, *layers_beside(path)) if file.is_file())


def one_per_step(states: Sequence[Path]) -> list[Path]:
    """Returns the first of each step's states: a step that works layer by layer leaves one per layer."""
    return list({re.sub(r"_\d+$", "", path.stem): path for path in reversed(states)}.values())


def run_identity(model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    """Returns what decides every result but the options and the text, as JSON values."""
    machine = device_name(device)
    if ranks.count() > 1:  # sums over ranks are rounded in another order, too
        machine = f"{ranks.count()} ranks, each on {machine}"
    return {"weights": model_hash(model), "versions": versions(), "machine": machine}


def text_hash(config: CompileConfig, samples: Samples) -> str:
    """Returns the hash of what a compilation reads: the samples and, if a step reads them, the surplus samples."""
    reads_spare = any(step.fresh_samples or step.extra_per_sample for step in config.steps)
    return (samples.joined(samples.surplus) if reads_spare and samples.surplus is not None else samples).sha256


def identify(start: Planned, device: torch.device) -> None:
    """Notes what decides the result, and refuses states of another run before any work is done."""
    workspace, config = start.workspace, start.config
    if workspace.resume_path is None:
        return
    options = {name: value for name, value in config.to_dict().items() if name not in ROUNDING_ONLY}
    workspace.inputs |= {"config": options, "text": text_hash(config, start.samples)}
    workspace.inputs |= run_identity(start.model, device)
    paths = ranks.on_first(partial(states_beside, workspace.resume_path, config.steps))
    machines = ranks.on_first(lambda: {StateFile(path, workspace.inputs).check() for path in paths})
    for path in one_per_step(paths):
        workspace.progress.say(f"found {path.name}: its step will continue where the interrupted run stopped")
    here = workspace.inputs["machine"]
    for machine in sorted(machines - {None, here}, key=str):
        workspace.progress.say(
            f"the interrupted run was on {machine}; this is {here}, which rounds sums differently: the result may "
            "differ from that of an uninterrupted run"
        )

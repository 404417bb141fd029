"""The inputs that decide the result of a run: an interrupted run continues only from states with equal inputs."""

from typing import Any

import torch
from transformers import PreTrainedModel

from permtriton.config import ROUNDING_ONLY
from permtriton.data.samples import Samples
from permtriton.methods.planning import Planned
from permtriton.model.checks import model_hash
from permtriton.running.resume import StateFile
from permtriton.util import ranks
from permtriton.util.machine import device_name, versions


def run_identity(model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    """Returns all inputs that decide a result, but for the options and the text, as JSON values."""
    machine = device_name(device)
    if ranks.count() > 1:  # sums over ranks are rounded in another order, too
        machine = f"{ranks.count()} ranks, each on {machine}"
    return {"weights": model_hash(model), "versions": versions(), "machine": machine}


def text_hash(samples: Samples) -> str:
    """Returns the hash of what a compilation may read: the samples and the surplus samples."""
    return (samples if samples.surplus is None else samples.joined(samples.surplus)).sha256


def check_states(start: Planned, device: torch.device) -> None:
    """Stores the deciding inputs in the workspace, and refuses states of another run before any work is done."""
    workspace, config = start.workspace, start.config
    if workspace.resume_path is None:
        return
    options = {name: value for name, value in config.to_dict().items() if name not in ROUNDING_ONLY}
    workspace.inputs |= {"config": options, "text": text_hash(start.samples)}
    workspace.inputs |= run_identity(start.model, device)

    def checked() -> tuple[list[str], set[str | None]]:
        states = workspace.states.values()
        machines = {StateFile(path, workspace.inputs).check() for paths in states for path in paths}
        return [paths[0].name for paths in states], machines

    names, machines = ranks.on_first(checked)
    for name in names:
        workspace.progress.say(f"found {name}: its step will continue where the interrupted run stopped")
    here = workspace.inputs["machine"]
    for machine in sorted(machines - {None, here}, key=str):
        workspace.progress.say(
            f"the interrupted run was on {machine}; this is {here}, which rounds sums differently: the result may "
            "differ from that of an uninterrupted run"
        )

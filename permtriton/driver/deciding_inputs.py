"""The inputs that decide the result of a run: an interrupted run continues only from states with equal inputs."""

from itertools import chain

from permtriton.config import ROUNDING_ONLY
from permtriton.data.samples import Samples
from permtriton.methods.planning import Planned
from permtriton.model.checks import model_hash
from permtriton.running.resume import StateFile
from permtriton.util import ranks
from permtriton.util.machine import versions


def text_hash(samples: Samples) -> str:
    """Returns the hash of what a compilation may read: the samples and the surplus samples."""
    return (samples if samples.surplus is None else samples.joined(samples.surplus)).sha256


def check_states(start: Planned) -> None:
    """Stores the deciding inputs in the workspace, and refuses states of another run before any work is done."""
    workspace, config = start.workspace, start.config
    if workspace.resume_path is None:
        return
    options = {name: value for name, value in config.to_dict().items() if name not in ROUNDING_ONLY}
    workspace.inputs |= {"config": options, "text": text_hash(start.samples)}
    workspace.inputs |= {"weights": model_hash(start.model), "versions": versions()}

    def checked() -> list[str]:
        states = workspace.states.values()
        for path in chain.from_iterable(states):
            StateFile(path, workspace.inputs).check()
        return [paths[0].name for paths in states]

    for name in ranks.on_first(checked):
        workspace.progress.say(f"found {name}: its step will continue where the interrupted run stopped")

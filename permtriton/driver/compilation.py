"""One compilation with its recipe: what continues an interrupted one, what its steps need, and what they reported."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.driver.options import CompileConfig
from permtriton.driver.run import Run
from permtriton.driver.step import Outcome, Step
from permtriton.methods import steps
from permtriton.model.checks import model_hash
from permtriton.passes.plan import linear_module
from permtriton.running import ranks
from permtriton.running.offload import Offload
from permtriton.running.state import StateFile
from permtriton.util.machine import device_name, versions
from permtriton.util.progress import Progress

# What is lowered where memory ran out, and then continues the same run.
ROUNDING_ONLY = ("micro_batch_size", "activation_checkpointing")
WRITING = "generated"  # the state of the text that the dense model writes


def states_beside(resume_path: Path) -> list[Path]:
    """Returns the paths of the states that an interrupted run left, of whatever steps."""
    names = (WRITING, *(kind.name for kind in steps.STEPS))
    paths = (resume_path.with_suffix(f".{name}{resume_path.suffix}") for name in names)
    return sorted(filter(Path.is_file, paths))


def run_identity(model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    """Returns what decides every result but the options and the text, as JSON values."""
    machine = device_name(device)
    if ranks.count() > 1:  # sums over ranks are rounded in another order, too
        machine = f"{ranks.count()} ranks, each on {machine}"
    return {"weights": model_hash(model), "versions": versions(), "machine": machine}


class Compilation(Run):
    """The run of a recipe. `permtriton.driver.prepare.prepare` fills in what is measured before the steps run.

    Attributes:
        config: every option.
        outcomes: step name -> what it reports.
    """

    config: CompileConfig

    def __init__(
        self,
        model: PreTrainedModel,
        config: CompileConfig,
        progress: Progress,
        resume_path: Path | None = None,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(model, config, progress, resume_path, offload)
        self.outcomes: dict[str, Outcome] = {}

    def identify(self, samples: Samples, device: torch.device) -> None:
        """Notes what decides the result, and refuses states of another run before any work is done.

        Raises:
            OutputError: a state beside the output belongs to another run, or is damaged.
        """
        if self.resume_path is None:
            return
        options = {name: value for name, value in self.config.to_dict().items() if name not in ROUNDING_ONLY}
        draws = any(step.draws for step in self.config.steps)
        text = samples.joined(samples.spare) if draws and samples.spare is not None else samples
        self._inputs = {"config": options, "text": text.sha256, **run_identity(self.model, device)}
        beside = partial(states_beside, self.resume_path)
        machines = ranks.on_first(lambda: {StateFile(path, self._inputs).check() for path in beside()})
        for path in ranks.on_first(beside):
            self.progress.say(f"found {path.name}: its step will continue where the interrupted run stopped")
        here = self._inputs["machine"]
        for machine in sorted(machines - {None, here}, key=str):
            self.progress.say(
                f"the interrupted run was on {machine}; this is {here}, which rounds sums differently: the result may "
                "differ from that of an uninterrupted run"
            )

    def keep_dense(self, steps: Sequence[Step]) -> None:
        """Keeps what later steps and the record need of the dense model, before the first one prunes it.

        Args:
            steps: the steps that are left.
        """
        if not self._dense_order and self.statistics:  # nothing was permuted
            self._dense_order = self._retained({})
            self.retained = {name: each.chosen for name, each in self._dense_order.items()}
        self.dense_corners = self.dense_corners or self.corners()
        if any(step.dense_weights for step in steps):
            for _, name in self.plan.linears():
                weight = linear_module(self.model, name).get_parameter("weight").detach()
                self.dense_weights[name] = self.empty(weight.shape, dtype=weight.dtype).copy_(weight)
        self.keep_objectives(steps)

"""What learning has found so far, and the file that keeps it between epochs."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from permtriton.errors import OutputError
from permtriton.relaxation import Relaxation


@dataclass(frozen=True)
class Epoch:
    """What one epoch did.

    Attributes:
        epoch: from 1; 0 is the base order.
        loss: mean cosine distance over the calibration set, under the hard permutation after the epoch.
        moved: channels that stand elsewhere than in the base order, over all spaces.
        tau: temperature at the end.
        seconds: of training and evaluation.
    """

    epoch: int
    loss: float
    moved: int
    tau: float
    seconds: float


@dataclass
class Learned:
    """The result of learning.

    Attributes:
        indices: space name -> unit index relative to the base order, int64.
        history: every epoch, the base order first.
        kept: number of the epoch that ``indices`` come from.
    """

    indices: dict[str, Tensor]
    history: list[Epoch] = field(default_factory=list)
    kept: int = 0


class ResumeFile:
    """State between epochs, so that an interrupted run continues where it stopped: a safetensors file.

    Args:
        path: of the file.
        fingerprint: of everything that decides the result; a file with another one is not continued from.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path, self._fingerprint = path, fingerprint

    def load(self, relaxation: Relaxation, optimizer: torch.optim.Optimizer) -> Learned | None:
        """Restores the state into ``relaxation`` and ``optimizer``; None where there is nothing to continue from."""
        if not self._path.is_file():
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("fingerprint") != self._fingerprint:
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            return None  # not a state file: learning starts anew and replaces it
        state = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
        for number, parameter in enumerate(relaxation.parameters()):
            parameter.data.copy_(tensors[f"parameter.{number}"])
            keys = ("step", "exp_avg", "exp_avg_sq")
            state["state"][number] = {key: tensors[f"optimizer.{number}.{key}"] for key in keys}
        optimizer.load_state_dict(state)
        prefix = "index."
        indices = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        history = [Epoch(**epoch) for epoch in json.loads(metadata["history"])]
        return Learned(indices, history, int(metadata["kept"]))

    def save(self, relaxation: Relaxation, optimizer: torch.optim.Optimizer, result: Learned) -> None:
        """Replaces the file by the present state; an interruption leaves the earlier one whole."""
        tensors = {f"index.{name}": index for name, index in result.indices.items()}
        for number, parameter in enumerate(relaxation.parameters()):
            tensors[f"parameter.{number}"] = parameter.detach()
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{number}.{key}"] = value
        metadata = {
            "fingerprint": self._fingerprint,
            "history": json.dumps([asdict(epoch) for epoch in result.history]),
            "kept": str(result.kept),
        }
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)
            temporary.replace(self._path)
        except (SafetensorError, OSError) as error:
            temporary.unlink(missing_ok=True)
            raise OutputError(
                f"learning state {self._path} cannot be written: {error}; make room and run again"
            ) from error

    def delete(self) -> None:
        """Removes the file, once its result is saved elsewhere."""
        self._path.unlink(missing_ok=True)

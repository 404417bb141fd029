"""The file that stores the state of learning between epochs."""

import json
from collections.abc import Mapping
from dataclasses import asdict

import torch

from permtriton.methods.learning import Epoch, Learned
from permtriton.methods.relaxation import Relaxation
from permtriton.permutation import identity
from permtriton.running.state import StateFile, read_records

OPTIMIZER_KEYS = ("step", "exp_avg", "exp_avg_sq")


class LearningFile(StateFile):
    """A safetensors file with the state between epochs, from which an interrupted run continues."""

    def load(self, relaxation: Relaxation, optimizer: torch.optim.Optimizer, epochs: int) -> Learned | None:
        """Restores the state into ``relaxation`` and ``optimizer`` and returns the result so far; None without a file.

        Args:
            relaxation: Logits of this run, to be replaced.
            epochs: Number of epochs that this run has.

        Raises:
            OutputError: The file belongs to another run, or is damaged.
        """
        state = self.read()
        if state is None:
            return None
        tensors, texts = state
        like = {f"index.{name}": identity(units) for name, units in relaxation.units.items()}
        for number, parameter in enumerate(relaxation.parameters()):
            like[f"parameter.{number}"] = parameter
            like |= {f"optimizer.{number}.{key}": parameter for key in OPTIMIZER_KEYS if key != "step"}
            like[f"optimizer.{number}.step"] = torch.tensor(0.0)
        self.check_tensors(tensors, like)
        result = Learned(
            {name: tensors[f"index.{name}"] for name in relaxation.units}, *self._read_history(texts, epochs)
        )
        restored = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
        for number, parameter in enumerate(relaxation.parameters()):
            parameter.data.copy_(tensors[f"parameter.{number}"])
            restored["state"][number] = {key: tensors[f"optimizer.{number}.{key}"] for key in OPTIMIZER_KEYS}
        optimizer.load_state_dict(restored)
        return result

    def _read_history(self, texts: Mapping[str, str], epochs: int) -> tuple[list[Epoch], int]:
        try:
            history = read_records(Epoch, json.loads(texts["history"]), epochs)
            kept = json.loads(texts["kept"])
        except (KeyError, ValueError) as error:
            raise self.damaged(f"its history cannot be read ({error})") from error
        if type(kept) is not int or not 0 <= kept < len(history):
            raise self.damaged(f"its history has {len(history)} epochs and keeps epoch {kept}")
        return history, kept

    def save(self, relaxation: Relaxation, optimizer: torch.optim.Optimizer, result: Learned) -> None:
        """Replaces the file by the current state; if interrupted, the earlier file stays intact.

        Raises:
            OutputError: The file cannot be written.
        """
        tensors = {f"index.{name}": index for name, index in result.indices.items()}
        for number, parameter in enumerate(relaxation.parameters()):
            tensors[f"parameter.{number}"] = parameter.detach()
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{number}.{key}"] = value
        history = json.dumps([asdict(epoch) for epoch in result.history])
        self.write(tensors, {"history": history, "kept": str(result.kept)})

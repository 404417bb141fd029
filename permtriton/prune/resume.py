"""The file that stores the state of learning between epochs."""

import json
from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from permtriton.permutation import is_permutation
from permtriton.prune.learn import Epoch, Learned
from permtriton.prune.relaxation import Relaxation
from permtriton.prune.state_file import StateFile

OPTIMIZER_KEYS = ("step", "exp_avg", "exp_avg_sq")


class ResumeFile(StateFile):
    """A safetensors file with the state between epochs, from which an interrupted run continues."""

    def load(self, relaxation: Relaxation, optimizer: torch.optim.Optimizer) -> Learned | None:
        """Restores the state into ``relaxation`` and ``optimizer`` and returns the result so far.

        Returns None where there is no file, or where it is not a state file with this fingerprint.

        Raises:
            OutputError: The file has this fingerprint, but is damaged.
        """
        state = self.read()
        if state is None:
            return None
        tensors, metadata = state
        self._check_tensors(tensors, relaxation)
        result = Learned({name: tensors[f"index.{name}"] for name in relaxation.units}, *self._read_history(metadata))
        restored = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
        for number, parameter in enumerate(relaxation.parameters()):
            parameter.data.copy_(tensors[f"parameter.{number}"])
            restored["state"][number] = {key: tensors[f"optimizer.{number}.{key}"] for key in OPTIMIZER_KEYS}
        optimizer.load_state_dict(restored)
        return result

    def _check_tensors(self, tensors: Mapping[str, Tensor], relaxation: Relaxation) -> None:
        expected: dict[str, tuple[int, ...]] = {f"index.{name}": (units,) for name, units in relaxation.units.items()}
        for number, parameter in enumerate(relaxation.parameters()):
            expected[f"parameter.{number}"] = tuple(parameter.shape)
            expected |= {f"optimizer.{number}.{k}": tuple(parameter.shape) for k in OPTIMIZER_KEYS if k != "step"}
            expected[f"optimizer.{number}.step"] = ()
        for name in sorted({*tensors, *expected}):
            found = tuple(tensors[name].shape) if name in tensors else None
            if found != expected.get(name):
                raise self.damaged(f"{name} has shape {found}, expected {expected.get(name)}")
            if name.startswith("index.") and not is_permutation(tensors[name]):
                raise self.damaged(f"{name} is not a permutation")
            if not bool(tensors[name].isfinite().all()):
                raise self.damaged(f"{name} holds values that are not finite")

    def _read_history(self, metadata: Mapping[str, str]) -> tuple[list[Epoch], int]:
        try:
            history = [Epoch(**epoch) for epoch in json.loads(metadata["history"])]
            kept = int(metadata["kept"])
        except (KeyError, TypeError, ValueError) as error:
            raise self.damaged(f"its history cannot be read ({error})") from error
        if [epoch.epoch for epoch in history] != list(range(len(history))) or not 0 <= kept < len(history):
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

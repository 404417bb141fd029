"""Files that store the state of a long stage, so that an interrupted run continues where it was."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from permtriton.errors import OutputError


class StateFile:
    """A safetensors file with the state of one stage.

    Args:
        path: Path of the file.
        fingerprint: Hash of everything that decides the result; a file with another fingerprint is ignored.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path, self._fingerprint = path, fingerprint

    def read(self) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """Returns the tensors and the texts of the state.

        Returns None where there is no file, or where it is not a state file with this fingerprint.

        Raises:
            OutputError: The file cannot be read.
        """
        if not self._path.is_file():
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("fingerprint") != self._fingerprint:
                    return None
                return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
        except SafetensorError:
            return None  # not a state file: the stage starts anew and replaces it
        except OSError as error:
            raise OutputError(f"state {self._path} cannot be read: {error}; delete it to start anew") from error

    def write(self, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
        """Replaces the file by a new state; if interrupted, the earlier file stays intact.

        Raises:
            OutputError: The file cannot be written.
        """
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, temporary, {**texts, "fingerprint": self._fingerprint})
            temporary.replace(self._path)
        except (SafetensorError, OSError) as error:
            temporary.unlink(missing_ok=True)
            raise OutputError(
                f"state {self._path} cannot be written: {error}; free disk space and run again"
            ) from error

    def damaged(self, problem: str) -> OutputError:
        """Returns the error for a state of this run that cannot be used."""
        return OutputError(f"state {self._path} is damaged: {problem}; delete the file to start anew")

    def delete(self) -> None:
        """Removes the file, once its result is saved elsewhere."""
        self._path.unlink(missing_ok=True)

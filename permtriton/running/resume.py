"""Files that store the state of a long stage, so that an interrupted run continues where it was."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from permtriton.errors import ModelError, OutputError, VerificationError
from permtriton.kernels.packing import pack, unpack_reference
from permtriton.model.checks import hash_tensors
from permtriton.util import ranks
from permtriton.util.durable import replace_file
from permtriton.util.sparsity import NMPattern

INPUTS = "inputs"  # key of the text that says which run a state belongs to
CHECKSUM = "sha256"  # key of the text with the hash of all else
DIFFERS = {
    "text": "the calibration sequences differ",
    "generated": "the dense model wrote another text",
    "dense": "another choice of linears stays dense, as it may with another micro-batch size or processor",
    "weights": "the model is another one (its weights or its config differ)",
    "start": (
        "the stages before it ended with other weights, as they may with another number of threads, micro-batch size "
        "or processor"
    ),
}


class State(Protocol):
    """A stored state from which a step continues; made from a path and the inputs that determine the result."""

    def __init__(self, path: Path, inputs: Mapping[str, Any]) -> None: ...

    def delete(self) -> None:
        """Removes the state's files, once its result is saved elsewhere."""


class StateFile:
    """A safetensors file with the state of one stage.

    Args:
        inputs: what decides the result, as JSON values: hashes (`DIFFERS`), ``config`` and ``versions``; ``machine`` is
            recorded, but not compared.
    """

    def __init__(self, path: Path, inputs: Mapping[str, Any]) -> None:
        self.path, self._inputs = path, dict(inputs)

    def check(self) -> str | None:
        """Refuses a file of another run, by its header, and returns the machine that it was written on.

        Returns:
            None if there is no file.
        """
        if not self.path.is_file():
            return None
        try:
            saved_inputs = dict(json.loads(self._open()[1][INPUTS]))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise self.damaged(f"its {INPUTS} cannot be read ({type(error).__name__}: {error})") from error
        differences = [
            line for key, present in self._inputs.items() for line in _differences(key, saved_inputs.get(key), present)
        ]
        if differences:
            raise OutputError(
                f"state {self.path} belongs to another run: {'; '.join(differences)}. To continue that run, give "
                "it what it had; to start from scratch, use `restart=True`"
            )
        return str(saved_inputs.get("machine"))

    def read(self) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """Returns the tensors and the texts of the state, or None where there is no file. The first rank reads it."""
        tensors: dict[str, Tensor] = {}

        def read() -> dict[str, str] | None:
            if self.check() is None:
                return None
            loaded, texts = self._open(tensors=True)
            if texts.pop(CHECKSUM, None) != _sha256(loaded, texts):
                raise self.damaged("its content is not what was written")
            tensors.update(loaded)
            return texts

        texts = ranks.on_first(read)
        return None if texts is None else (ranks.named_from_first(tensors), texts)

    def write(self, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
        """Replaces the file by a new state; if interrupted, the earlier file stays. The first rank writes it."""
        ranks.on_first(lambda: self._replace(tensors, texts))

    def _replace(self, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        metadata = {**texts, INPUTS: json.dumps(self._inputs)}
        metadata[CHECKSUM] = _sha256(contiguous, metadata)
        try:
            replace_file(self.path, lambda temporary: save_file(contiguous, temporary, metadata))
        except (SafetensorError, OSError) as error:
            raise OutputError(
                f"state {self.path} cannot be written: {error}; what was stored before is kept: free disk space and "
                "run the same command again"
            ) from error

    def damaged(self, problem: str) -> OutputError:
        return OutputError(
            f"state {self.path} is damaged: {problem}; delete the file to start from scratch, or use `restart=True`"
        )

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)

    def _open(self, tensors: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
        try:
            with safe_open(self.path, framework="pt") as file:
                names = list(file.keys()) if tensors else []
                return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
        except SafetensorError as error:
            raise self.damaged(f"it is not a whole safetensors file ({error})") from error
        except OSError as error:
            raise OutputError(
                f"state {self.path} cannot be read: {error}; make it readable, or delete it to start from scratch"
            ) from error


def layers_beside(path: Path) -> list[Path]:
    """Returns the files of `FinishedLayers` that exist for ``path``, in the order of the layers."""
    name = re.compile(rf"{re.escape(path.stem)}_(\d+){re.escape(path.suffix)}")
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    numbers = {int(match[1]): path for path in siblings if (match := name.fullmatch(path.name))}
    return [numbers[number] for number in sorted(numbers)]


class FinishedLayers:
    """The layers that a step has pruned so far, each in a `StateFile` of its own, ``.OUTPUT.STEP_NUMBER.safetensors``.

    With a single file, all finished layers would be written again after each layer.
    """

    def __init__(self, path: Path, inputs: Mapping[str, Any]) -> None:
        self._path, self._inputs = path, inputs

    def _layer(self, number: int) -> StateFile:
        return StateFile(self._path.with_name(f"{self._path.stem}_{number}{self._path.suffix}"), self._inputs)

    def keep(
        self, number: int, weights: Mapping[str, Tensor], patterns: Mapping[str, NMPattern], parts: Sequence[Any] = ()
    ) -> None:
        """Writes the pruned weights of a layer, packed.

        Args:
            weights: linear -> its weight, ``[in_features, out_features]``.
            parts: what the step reports of the layer, as JSON values.
        """
        tensors: dict[str, Tensor] = {}
        for name, weight in weights.items() if not ranks.number() else ():  # the first rank writes
            try:
                values, positions = pack(weight.T.contiguous(), patterns[name])
            except ModelError as error:
                raise VerificationError(f"{name}: {error}") from error
            tensors |= {f"{name}.values": values, f"{name}.positions": positions}
        self._layer(number).write(tensors, {"parts": json.dumps(list(parts))})

    def restore(
        self, number: int, weights: Mapping[str, Tensor], patterns: Mapping[str, NMPattern]
    ) -> list[dict[str, Any]] | None:
        """Copies a stored layer into ``weights`` and returns the ``parts`` given to `keep`; None if not stored."""
        if (saved_state := self._layer(number).read()) is None:
            return None
        tensors, texts = saved_state
        for name, weight in weights.items():
            values, positions = tensors[f"{name}.values"], tensors[f"{name}.positions"]
            weight.copy_(unpack_reference(values, positions, len(weight), patterns[name]).T)
        return json.loads(texts["parts"])

    def delete(self) -> None:
        for path in layers_beside(self._path):
            path.unlink(missing_ok=True)


def _sha256(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    sha256 = hashlib.sha256(json.dumps(texts, sort_keys=True).encode())
    hash_tensors(sha256, sorted(tensors.items()))
    return sha256.hexdigest()


def _differences(key: str, saved: Any, present: Any) -> list[str]:
    if key == "machine" or saved == present:
        return []
    if key in DIFFERS:
        return [DIFFERS[key]]
    if not isinstance(saved, dict):
        return [f"its {key} cannot be read"]
    names, common = {*saved, *present}, saved.keys() & present.keys()
    if "recipe" in common and saved["recipe"] != present["recipe"]:
        names = common  # options that only one recipe has follow from the recipes
    return [
        f"{name} was {saved.get(name, 'not there')} and is {present.get(name, 'not there')}"
        for name in sorted(names)
        if saved.get(name, ...) != present.get(name, ...)
    ]

"""Files that store the states of long steps, from which an interrupted run continues; and the clock of a run."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.errors import OutputError, reading
from permtriton.model.checks import hash_tensors, sample_hash
from permtriton.util import ranks
from permtriton.util.durable import replace_file
from permtriton.util.machine import release_memory
from permtriton.util.progress import NoProgress, Progress

State = tuple[dict[str, Tensor], dict[str, Any]]  # tensors and JSON values by name
INPUTS = "inputs"  # key of the text that says which run a state belongs to
CHECKSUM = "sha256"  # key of the text with the hash of the tensors and the other texts
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


class StateFile:
    """A safetensors file with the state of one step; if ``path`` is None, nothing is read or written.

    ``inputs`` are the JSON values that decide the result: the keys of `DIFFERS`, ``config`` and ``versions``.
    """

    def __init__(self, path: Path | None, inputs: Mapping[str, Any]) -> None:
        self.path, self._inputs = path, dict(inputs)

    def of_layer(self, number: int) -> "StateFile":
        """Returns the file with the state of one layer, ``.OUTPUT.STEP_NUMBER.safetensors``.

        With a single file, all finished layers would be written again after each layer.
        """
        path = self.path and self.path.with_name(f"{self.path.stem}_{number}{self.path.suffix}")
        return StateFile(path, self._inputs)

    def once(self, compute: Callable[[], State]) -> State:
        """Returns the state or, if there is no file, what ``compute`` returns, which is then written."""
        if (state := self.read()) is None:
            state = compute()
            self.write(state[0], **state[1])
        return state

    def check(self) -> bool:
        """Refuses a file of another run; returns whether there is a file."""
        if self.path is None or not self.path.is_file():
            return False
        with self._opened(self.path) as file:
            saved_inputs = dict(json.loads(file.metadata()[INPUTS]))
        differences = [
            line for key, present in self._inputs.items() for line in _differences(key, saved_inputs.get(key), present)
        ]
        if differences:
            raise OutputError(
                f"state {self.path} belongs to another run: {'; '.join(differences)}. To continue that "
                "run, restore what differs; to start from scratch, use `restart=True`"
            )
        return True

    def read(self) -> State | None:
        """Returns the tensors and values of the state, or None if there is no file. The first rank reads the file."""
        path, tensors = self.path, dict[str, Tensor]()
        if path is None:
            return None

        def read() -> dict[str, Any] | None:
            if not self.check():
                return None
            with self._opened(path) as file:
                tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (it is no dict)
                texts = dict(file.metadata())
                if texts.pop(CHECKSUM) != _sha256(tensors, texts):
                    raise ValueError("its content is not what was written")
                return {name: json.loads(text) for name, text in texts.items()}

        values = ranks.on_first(read)
        return None if values is None else (ranks.named_from_first(tensors), values)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        what = f"state {path} cannot be read: delete it to start from scratch, or use `restart=True`"
        with reading(what, OutputError), safe_open(path, framework="pt") as file:
            yield file

    def write(self, tensors: Mapping[str, Tensor], **values: Any) -> None:
        """Replaces the file by one with the tensors and JSON values; after an interruption, the earlier file is intact.

        The first rank writes it.
        """
        if self.path is not None:
            ranks.on_first(partial(self._replace, self.path, tensors, values))

    def _replace(self, path: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        metadata = {name: json.dumps(value) for name, value in {**values, INPUTS: self._inputs}.items()}
        metadata[CHECKSUM] = _sha256(contiguous, metadata)
        try:
            replace_file(path, lambda temporary: save_file(contiguous, temporary, metadata))
        except (SafetensorError, OSError) as error:
            raise OutputError(
                f"state {path} cannot be written: {error}; what was stored before is kept: free disk space and "
                "run the same command again"
            ) from error


@dataclass
class Workspace:
    """The clock of a run and the files of its states: both are needed before anything is known about the model."""

    progress: Progress = field(default_factory=NoProgress)
    # path of the files that keep the states of steps, each with its step's name before the suffix; None keeps no state
    resume_path: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # time per step and stage, filled by `timed`
    # the JSON values that decide the results: a state that was saved with other values is refused
    inputs: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Reports the block as a stage, adds its time to ``seconds[stage]``, and returns freed memory to the system."""
        start_time = time.perf_counter()
        with self.progress.stage(stage, 0):
            yield
            release_memory()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start_time

    def state(self, step: str, model: PreTrainedModel | None = None) -> StateFile:
        """Returns the file that keeps the state of a step that starts from a model, by default the dense one.

        No state is kept without ``resume_path``.
        """
        path = self.resume_path
        if path is None:
            return StateFile(None, {})
        # ``inputs`` has the dense model's hash. A changed model is hashed here: other thread counts round differently.
        start = "dense" if model is None else sample_hash(model)
        return StateFile(path.with_suffix(f".{step}{path.suffix}"), {**self.inputs, "start": start})

    @property
    def states(self) -> dict[str, list[Path]]:
        """Step -> its states on the disk; if a step has one per layer, they are in the order of the layers."""
        path, states = self.resume_path, dict[str, list[Path]]()
        if path is None or not path.parent.is_dir():
            return states
        form = re.compile(rf"{re.escape(path.stem)}\.([^.]+?)(?:_(\d+))?{re.escape(path.suffix)}")
        files = [(match, file) for file in path.parent.iterdir() if (match := form.fullmatch(file.name))]
        for match, file in sorted(files, key=lambda pair: int(pair[0][2] or 0)):
            if file.is_file():
                states.setdefault(match[1], []).append(file)
        return states


def _sha256(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    sha256 = hashlib.sha256(json.dumps(texts, sort_keys=True).encode())
    hash_tensors(sha256, sorted(tensors.items()))
    return sha256.hexdigest()


def _differences(key: str, saved: Any, present: Any) -> list[str]:
    if saved == present:
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

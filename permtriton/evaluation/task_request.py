"""The zero-shot tasks that a user asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import file_digest, sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from permtriton.errors import ConfigError
from permtriton.util import machine
from permtriton.util.extras import require
from permtriton.util.output_files import real_path
from permtriton.util.progress import Progress

if TYPE_CHECKING:
    from permtriton.evaluation.tasks import Tasks


@dataclass(frozen=True)
class TaskRequest:
    """Which zero-shot tasks to run, as the user wrote it: names, or None or ``none`` for no tasks."""

    names: str | Sequence[str] | None
    limit: int | None
    folder: Path | None

    def __post_init__(self) -> None:
        if self.names == "none":
            object.__setattr__(self, "names", None)

    def load(self, progress: Progress) -> "Tasks | None":
        if self.names is None:
            if self.limit is not None or self.folder is not None:
                raise ConfigError("`limit=` and `tasks_dir=` have no effect without `tasks=`: name tasks")
            return None
        require("an evaluation by tasks", "lm_eval", "accelerate")
        progress.say(f"loading tasks {', '.join(self._parts())}")
        with progress.stage("load", 0):
            from permtriton.evaluation.tasks import Tasks  # imports lm_eval, which takes seconds

            return Tasks(self._parts(), self.limit, self.folder)

    def versions(self) -> dict[str, str]:
        """Returns the versions that a report names: with tasks, that of lm_eval, too."""
        return {**machine.versions(), **({} if self.names is None else {"lm_eval": metadata.version("lm_eval")})}

    def identity(self, output: Path | None = None) -> dict[str, Any]:
        """Returns what decides the scores; empty without tasks.

        Args:
            output: file that the command writes; if it is in the folder of tasks, it is not hashed.
        """
        if self.names is None:
            return {}
        digest = sha256()
        for path in _files(self.folder) if self.folder else ():
            if output is None or real_path(path) != real_path(output):
                with path.open("rb") as file:
                    digest.update(file_digest(file, "sha256").digest())
        return {
            "names": self._parts(),
            "limit": self.limit,
            "files": digest.hexdigest(),
            "lm_eval": metadata.version("lm_eval"),
        }

    def _parts(self) -> list[str]:
        names = self.names or ""
        return [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder, except hidden ones and Python's compiled ones."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            yield path

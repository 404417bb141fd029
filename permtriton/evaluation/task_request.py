"""Which zero-shot tasks were asked for?"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from permtriton.errors import ConfigError
from permtriton.util import machine
from permtriton.util.extras import require
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
        """Returns the tasks with their data; None without tasks.

        Raises:
            ConfigError: an option has no effect without tasks, or as `permtriton.evaluation.tasks.Tasks`.
            TaskError: as `permtriton.evaluation.tasks.Tasks`.
        """
        if self.names is None:
            if self.limit is not None or self.folder is not None:
                raise ConfigError("`limit=` and `tasks_dir=` have no effect without `tasks=`: name tasks")
            return None
        require("an evaluation by tasks", "lm_eval", "accelerate")
        progress.say(f"loading tasks {', '.join(self._parts())}")
        from permtriton.evaluation.tasks import Tasks  # imports lm_eval, which takes seconds

        return Tasks(self._parts(), self.limit, self.folder)

    def versions(self) -> dict[str, str]:
        """Returns the versions that a report names: with tasks, that of lm_eval, too."""
        return {**machine.versions(), **({} if self.names is None else {"lm_eval": metadata.version("lm_eval")})}

    def identity(self) -> dict[str, Any]:
        """Returns what decides the scores; empty without tasks."""
        if self.names is None:
            return {}
        files = sorted(path for path in self.folder.rglob("*") if path.is_file()) if self.folder else []
        return {
            "names": self._parts(),
            "limit": self.limit,
            "files": sha256(b"".join(path.read_bytes() for path in files)).hexdigest(),
            "lm_eval": metadata.version("lm_eval"),
        }

    def _parts(self) -> list[str]:
        names = self.names or ""
        return [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]

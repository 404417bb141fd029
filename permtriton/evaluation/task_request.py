"""The zero-shot tasks that a user names. Only `load_tasks` imports lm_eval, because the import takes seconds."""

from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from permtriton.arguments import MeasureArgs
from permtriton.errors import ConfigError
from permtriton.util import machine
from permtriton.util.extras import require
from permtriton.util.progress import Progress

if TYPE_CHECKING:
    from permtriton.evaluation.tasks import Tasks


def load_tasks(args: MeasureArgs, progress: Progress) -> "Tasks | None":
    names = args.task_names
    if not names:
        if args.limit is not None or args.tasks_dir is not None:
            raise ConfigError("`limit=` and `tasks_dir=` have no effect without `tasks=`: name tasks")
        return None
    require("an evaluation by tasks", "lm_eval", "accelerate")
    progress.say(f"loading tasks {', '.join(names)}")
    with progress.stage("load", 0):
        from permtriton.evaluation.tasks import Tasks

        return Tasks(names, args.limit, None if args.tasks_dir is None else Path(args.tasks_dir))


def versions(args: MeasureArgs) -> dict[str, str]:
    return machine.versions() | ({"lm_eval": metadata.version("lm_eval")} if args.task_names else {})

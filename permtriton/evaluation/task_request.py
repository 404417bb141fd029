"""The zero-shot tasks that a user names. Only `load_tasks` imports lm_eval, because the import takes seconds."""

from hashlib import file_digest, sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from permtriton.arguments import MeasureArgs
from permtriton.errors import ConfigError
from permtriton.util import machine
from permtriton.util.extras import require
from permtriton.util.output_files import real_path
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


def task_identity(args: MeasureArgs, output: Path | None) -> dict[str, Any]:
    """Returns the inputs that decide the scores, as JSON values; empty without tasks.

    Args:
        output: file that the command writes. If it is in the folder of tasks, it is not hashed; hidden files and
            ``__pycache__`` are not hashed either.
    """
    if not args.task_names:
        return {}
    digest, folder = sha256(), Path(args.tasks_dir or ".")
    for path in sorted(folder.rglob("*")) if args.tasks_dir else ():
        parts = path.relative_to(folder).parts
        ignored = any(part.startswith(".") or part == "__pycache__" for part in parts) or not path.is_file()
        if not ignored and (output is None or real_path(path) != real_path(output)):
            with path.open("rb") as file:
                digest.update(file_digest(file, "sha256").digest())
    return {
        "names": args.task_names,
        "limit": args.limit,
        "files": digest.hexdigest(),
        "lm_eval": metadata.version("lm_eval"),
    }

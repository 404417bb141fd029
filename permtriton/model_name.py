"""What a model is called when others read it."""

import os
import re
from pathlib import Path

DEMO = "demo"


def shown_name(model: str) -> str:
    """Returns the name of a model for others to read: a hub name as it is, a folder without the path to it.

    A model that was made in memory is ``MODEL``.
    """
    if model in ("", DEMO):
        return model or "MODEL"
    return model if is_hub_name(model) else os.path.basename(os.path.abspath(model))


def is_hub_name(model: str) -> bool:
    """Whether a model's name can only be one on the hub: it has the form of one, and is no folder here or the demo."""
    return bool(re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", model)) and model != DEMO and not Path(model).exists()

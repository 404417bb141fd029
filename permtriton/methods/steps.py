"""All steps that a recipe may name, in the order of their stages. **Add a method here.**

A user's own step is named by its file or module and its class: ``my_steps.py:Mine`` or ``my_package.steps:Mine``.
"""

import sys
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from permtriton.errors import ConfigError, first_line, shown
from permtriton.methods.order.heuristic import Heuristic
from permtriton.methods.order.learned import Learned
from permtriton.methods.order.searched import Searched
from permtriton.methods.prune.dense_share import DenseShare
from permtriton.methods.prune.mask import Mask
from permtriton.methods.prune.refit import Refit
from permtriton.methods.prune.sparsegpt import SparseGPT
from permtriton.methods.recipe_config import CompileConfig
from permtriton.methods.step import Stage, Step
from permtriton.methods.train.distill import Distill
from permtriton.methods.train.round import Round

STEPS: tuple[type[Step], ...] = (Heuristic, Learned, Searched, Mask, SparseGPT, Refit, Distill, Round)


def problem_of(kind: Any) -> str:
    """Returns why a class cannot be a step of a recipe, as the end of a sentence; empty if it can be one."""
    if not (isinstance(kind, type) and Step in kind.__mro__ and is_dataclass(kind)):
        return "is no dataclass derived from permtriton.methods.Step"
    if missing := [attribute for attribute in ("name", "prefix", "summary", "stage") if not hasattr(kind, attribute)]:
        return f"does not say its {missing[0]}"
    if not isinstance(kind.stage, Stage):  # type: ignore[attr-defined]
        return f"has the stage {shown(kind.stage)}, expected one of {', '.join(map(str, Stage))}"  # type: ignore[attr-defined]
    if {".", "/"} & set(str(kind.name)):  # type: ignore[attr-defined]
        return f"has the name {shown(kind.name)}: expected no dot and no slash, as its states are named after it"  # type: ignore[attr-defined]
    step_by_word = {word: step for step in STEPS for word in (step.name, step.prefix)}
    if clash := next((word for word in (kind.name, kind.prefix) if step_by_word.get(word, kind) is not kind), ""):  # type: ignore[attr-defined]
        return f"has the name or prefix {clash} of permtriton's own step {step_by_word[clash].name}: choose another"
    return ""


@cache
def load(name: str) -> type[Step]:
    """Returns the class of a step of the user's own, named ``module:Class`` or ``file.py:Class``.

    A module is looked for in the current folder first; the path of a file is relative to it.
    """
    place, _, attribute = name.rpartition(":")
    file = Path(place)
    folder, module = (file.parent, file.stem) if file.suffix == ".py" else (Path(), place)
    sys.path.insert(0, entry := str(folder.resolve()))
    try:
        kind = getattr(import_module(module), attribute)
    except Exception as error:  # the user's code may raise any kind
        raise ConfigError(f"the step {name} cannot be imported: {first_line(error)}") from error
    finally:
        sys.path.remove(entry)
    if problem := problem_of(kind):
        raise ConfigError(f"the step {name} cannot be used: it {problem}")
    return kind


def all_steps(config: CompileConfig) -> tuple[Step, ...]:
    """Returns the steps of a compilation: `DenseShare`, if a share of the weights stays dense, then the recipe's."""
    return (*([DenseShare(config.dense_share)] if config.dense_share else []), *config.steps)

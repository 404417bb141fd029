"""All steps that a recipe may name, in the order of their stages. **Add a method here.**"""

from typing import Any

from permtriton.errors import shown
from permtriton.methods.order.heuristic import Heuristic
from permtriton.methods.order.learned import Learned
from permtriton.methods.order.searched import Searched
from permtriton.methods.prune.dense_share import DenseShare
from permtriton.methods.prune.mask import Mask
from permtriton.methods.prune.refit import Refit
from permtriton.methods.prune.sparsegpt import SparseGPT
from permtriton.methods.recipe_config import CompileConfig
from permtriton.methods.step import Step
from permtriton.methods.train.distill import Distill
from permtriton.methods.train.round import Round

STEPS: tuple[type[Step], ...] = (Heuristic, Learned, Searched, Mask, SparseGPT, Refit, Distill, Round)


def problem_of(kind: Any) -> str:
    """Returns why a class cannot be a step of a recipe, as the end of a sentence; empty if it can be one."""
    if not hasattr(kind, "__dataclass_fields__"):
        return "is no dataclass"
    if missing := [attribute for attribute in ("name", "prefix", "summary", "stage") if not hasattr(kind, attribute)]:
        return f"does not say its {missing[0]}"
    if {".", "/"} & set(kind.name):
        return f"has the name {shown(kind.name)}: expected no dot and no slash, as its states are named after it"
    step_by_word = {word: step for step in STEPS for word in (step.name, step.prefix)}
    if clash := next((word for word in (kind.name, kind.prefix) if step_by_word.get(word, kind) is not kind), ""):
        return f"has the name or prefix {clash} of permtriton's own step {step_by_word[clash].name}: choose another"
    return ""


def all_steps(config: CompileConfig) -> tuple[Step, ...]:
    """Returns the steps of a compilation: `DenseShare`, if a share of the weights stays dense, then the recipe's."""
    return (*([DenseShare(config.dense_share)] if config.dense_share else []), *config.steps)

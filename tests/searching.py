"""A small search problem, and ways to run it and compare its results."""

import torch
from transformers import PreTrainedModel

from benchmarks.known_run import Known
from permtriton import CompileConfig, NMPattern, config_from
from permtriton.data.samples import Samples
from permtriton.methods.measure.fisher import curvatures
from permtriton.methods.measure.importance import importances_of
from permtriton.methods.measure.losses import dense_objective, has_head
from permtriton.methods.measure.statistics import channel_norms
from permtriton.methods.order.hard_masks import hard_masked
from permtriton.methods.order.searched import Searched as Options
from permtriton.passes.plan import Plan
from permtriton.running.layer_walk import LayerWalk
from permtriton.util.progress import NoProgress

from . import zoo
from .learning import plant, tiny
from .runs import Order
from .zoo import find_plan

PATTERN = NMPattern(2, 4)
OPTIONS = {"recipe": "heuristic,searched,mask", "importance": "wanda", "search_rounds": 4,
           "activation_checkpointing": False}  # fmt: skip


class Problem:
    """A model with every argument that `search` takes; its experts, if any, must be unstacked."""

    def __init__(self, model: PreTrainedModel, plan: Plan, ids: torch.Tensor, pattern: NMPattern = PATTERN) -> None:
        self.model, self.plan, self.ids, self.pattern = model, plan, Samples.of(ids), pattern
        norms = channel_norms(LayerWalk(model, plan, self.ids, 4), NoProgress())
        self.importances = importances_of(model, plan, "wanda", norms)
        self.objective = dense_objective(model, "kl" if has_head(model) else "cosine", self.ids, 4)

    def settings(self, **options: object) -> tuple[Options, CompileConfig]:
        """The options of the search and those of the compilation."""
        config = config_from({"sparsity": str(self.pattern), **OPTIONS, **options})
        return config.steps[1], config

    def search(self, progress=None, state=None, **options: object) -> Order:
        step, config = self.settings(**options)
        known = {"importances": self.importances, "objective": self.objective, "state": state}
        return Order(*step.search(Known(self.model, self.plan, self.ids, config, progress, **known)))

    def masked(self, **options: object):
        _, config = self.settings(**options)
        run = Known(self.model, self.plan, self.ids, config, importances=self.importances)
        return hard_masked(run, self.model, self.objective, curvatures(run, self.objective.kind))

    def loss(self, indices: dict[str, torch.Tensor]) -> float:
        with self.masked() as masks:
            masks.set(indices)
            return masks.loss()

    @property
    def spaces(self) -> list:
        return [space for space in self.plan.spaces if not space.frozen]


def planted(dtype: torch.dtype = torch.float32) -> Problem:
    """A model whose order is bad by construction, see `plant`."""
    model = plant(tiny(dtype))
    return Problem(model, find_plan(model, PATTERN), zoo.tiny_ids(8, 12))

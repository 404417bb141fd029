"""A dense model to refit, and how far it is from itself afterwards."""

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.known_run import Known
from permtriton import CompileConfig
from permtriton.data.check_samples import check_samples
from permtriton.data.samples import Inputs
from permtriton.methods.prune.refit import Refit
from permtriton.methods.prune.sparsegpt import SparseGPT
from permtriton.methods.train.round import Round
from permtriton.model.forward import last_hidden_state
from permtriton.passes.plan import linear_module
from permtriton.running.placement import DevicePlacement

from . import zoo
from .folders import prune_weight
from .updating import PATTERN
from .zoo import find_plan

CONFIG = CompileConfig(sparsity=PATTERN)


class Problem:
    """A dense model, and how far it is from itself once it has been pruned."""

    def __init__(self, model, plan=None, ids: Inputs | None = None) -> None:
        self.model, self.plan = model, plan or find_plan(model, PATTERN)
        self.samples = check_samples(model, zoo.token_ids(24, 16) if ids is None else ids)
        self.weights = {name: linear_module(model, name).get_parameter("weight") for _, name in self.plan.linears()}
        self.dense = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.expected = self.hidden()

    @torch.no_grad()
    def hidden(self) -> Tensor:
        return last_hidden_state(self.model, self.samples).float()

    def error(self) -> float:
        return float((self.hidden() - self.expected).square().sum() / self.expected.square().sum())

    @torch.no_grad()
    def reset(self) -> "Problem":
        for name, weight in self.weights.items():
            weight.copy_(self.dense[name])
        return self

    def refit(self, progress=None, state=None, onloads=False, **options):
        known = {"dense_weights": self.dense, "state": state}
        run = Known(self.model, self.plan, self.samples, CONFIG, progress, **known)
        if onloads:
            run.placement = replace(run.placement, kind=DevicePlacement.ONLOADED)
        return Refit(**{"metric_tokens": 0, **options}).run(run).parts

    def update(self, progress=None, state=None) -> None:
        SparseGPT().run(Known(self.model, self.plan, self.samples, CONFIG, progress, state=state))

    def rounded(self, progress=None, state=None):
        for weight in self.weights.values():
            prune_weight(weight, pattern=PATTERN)
        return Round().run(Known(self.model, self.plan, self.samples, CONFIG, progress, state=state)).parts

    def sparsegpt(self) -> float:
        self.update()
        error = self.error()
        self.reset()
        return error

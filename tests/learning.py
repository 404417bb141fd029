"""A small learning problem, and ways to run it, stop it and compare its results."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.known_run import Known
from permtriton.data.samples import Samples
from permtriton.methods.measure.importance import importance_of
from permtriton.methods.measure.losses import Objective
from permtriton.methods.measure.statistics import channel_norms
from permtriton.methods.order.learned import Learned as Options
from permtriton.methods.recipe_config import CompileConfig
from permtriton.model.forward import cosine_loss, hidden_states
from permtriton.passes.plan import linear_module, weight_in_out
from permtriton.running.layer_walk import LayerWalk
from permtriton.util.permutation import identity
from permtriton.util.progress import NoProgress
from permtriton.util.sparsity import NMPattern

from . import zoo
from .runs import Order
from .zoo import find_plan

PATTERN = NMPattern(2, 4)
CPU = torch.device("cpu")
# Blocks of 16, so that the 24 units of `down` have a smaller last block; a learning rate that shows in a few steps.
QUICK = Options(block_size=16, epochs=3, batch_size=4, learning_rate=0.1)
STEPS = 2  # of an epoch of QUICK: 8 sequences in batches of 4


def tiny(dtype: torch.dtype = torch.float32, model_class=LlamaForCausalLM, **changes: object):
    sizes = {**zoo.TINY, "hidden_size": 32, "attention_bias": True, "mlp_bias": True}
    torch.manual_seed(0)
    model = model_class(LlamaConfig(**{**sizes, **changes})).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def plant(model: LlamaForCausalLM, run: int = 4) -> LlamaForCausalLM:
    """Alternates runs of ``run`` important channels and as many unimportant ones: 4 is a bad order, 2 the best one."""
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight[:, torch.arange(linear.in_features) % (2 * run) >= run] *= 0.02
    return model


class Problem:
    """A model with every argument that `learn` takes."""

    def __init__(
        self, model: LlamaForCausalLM, pattern: NMPattern = PATTERN, method: str = "wanda", layout: str = "portable"
    ) -> None:
        self.model, self.pattern = model, pattern
        self.plan = find_plan(model, pattern, layout=layout)
        self.ids = Samples.of(zoo.tiny_ids(8, 12))
        norms = channel_norms(LayerWalk(model, self.plan, self.ids, 4), NoProgress())
        self.importances = {}
        for site, name in self.plan.linears():
            statistic = norms[site.name].to(model.dtype)
            self.importances[name] = importance_of(method, weight_in_out(linear_module(model, name)), statistic)
        self.target = hidden_states(model, self.ids, 4)

    def learn(self, options: Options = QUICK, seed: int = 0, progress=None, resume=None, **running) -> Order:
        return Order(*options.learn(self.run(seed=seed, progress=progress, state=resume, **running)))

    def run(self, seed: int = 0, progress=None, state=None, **running) -> Known:
        config = CompileConfig(sparsity=self.pattern, seed=seed, **running)
        objective = Objective("cosine", self.model, self.ids, self.target)
        known = {"importances": self.importances, "objective": objective, "state": state}
        return Known(self.model, self.plan, self.ids, config, progress, **known)

    def loss(self, weights: dict[str, Tensor]) -> Tensor:
        """The loss with other weights, by module name, in place of the model's own."""
        named = {f"{name.removeprefix('model.')}.weight": weight for name, weight in weights.items()}
        arguments = {**self.ids.inputs, "use_cache": False}
        return cosine_loss(torch.func.functional_call(self.model.base_model, named, (), arguments)[0], self.target)

    @torch.no_grad()
    def hard_loss(self, indices: dict[str, Tensor]) -> float:
        """The loss under hard permutations, masks made one row and group at a time."""
        weights = {}
        for site, name in self.plan.linears():
            index = site.expand(indices[site.space.name]) if site.space.name in indices else identity(site.channels)
            weight = linear_module(self.model, name).weight
            scores = self.importances[name].scores(weight.t()).t()[:, index].unflatten(1, (-1, self.pattern.group))
            keep = torch.zeros_like(scores, dtype=torch.bool)
            keep.scatter_(2, scores.topk(self.pattern.kept, dim=2).indices, True)
            permuted = torch.where(keep.flatten(1), weight[:, index], 0)
            weights[name] = torch.empty_like(weight).index_copy_(1, index, permuted)
        return float(self.loss(weights))


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(plant(tiny()))


def state(model: torch.nn.Module) -> dict[str, object]:
    """Everything, apart from tensor values, that a careless learner could change in a model."""
    return {
        "parameters": {
            name: (id(p), p.requires_grad, p.stride(), p.grad is None) for name, p in model.named_parameters()
        },
        "saved": set(model.state_dict()),
        "classes": [(name, type(module)) for name, module in model.named_modules()],
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "training": [module.training for module in model.modules()],
        "config": model.config.to_dict(),
    }


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    before, tensors = state(model), copy.deepcopy(model.state_dict())
    yield
    assert state(model) == before
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


class Counting(NoProgress):
    """Records the steps of every call, and calls ``act`` at call number ``at``."""

    def __init__(self, at: int = 0, act: Callable[[], object] | None = None) -> None:
        self.steps, self.at, self.act = [], at, act

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        def advance(steps: int = 1, note: str = "") -> None:
            self.steps.append(steps)
            if len(self.steps) == self.at:
                self.act()

        yield advance


def stop(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act

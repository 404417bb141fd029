"""A small pruned model whose kept weights are trained, and what must hold of it afterwards."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.known_run import Known
from permtriton import CompileConfig, NMPattern
from permtriton.data.samples import Samples
from permtriton.methods.measure.importance import importances_of
from permtriton.methods.measure.losses import Objective, dense_objective, has_head
from permtriton.methods.prune.mask import mask_weights
from permtriton.methods.train.distill import Distill
from permtriton.passes.plan import Plan, check_pruned, linear_module, weight_in_out
from permtriton.util.progress import NoProgress

from . import zoo
from .runs import Told
from .zoo import find_plan

PATTERN = NMPattern(2, 4)
RATE = 0.03
OPTIONS = {
    "epochs": 3,
    "batch_size": 4,
    "learning_rate": RATE,
    "micro_batch_size": 4,
    "activation_checkpointing": False,
}
STEPS = 3  # of an epoch: 9 sequences in batches of 4, the tenth is held out


class Pruned:
    """A model pruned by magnitude, with every argument that `distill` takes.

    Its experts, if any, must be unstacked.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan | None = None, ids: Tensor | None = None) -> None:
        self.model, self.plan = model, plan or find_plan(model, PATTERN)
        self.ids = Samples.of(zoo.tiny_ids(10, 12) if ids is None else ids)
        self.objective: Objective = dense_objective(model, "kl" if has_head(model) else "cosine", self.ids, 4)
        self.weights = {name: linear_module(model, name).get_parameter("weight") for _, name in self.plan.linears()}
        self.dense = {name: weight.detach().clone() for name, weight in self.weights.items()}
        ones = {site.name: torch.ones(site.channels) for site in self.plan.sites}
        mask_weights(model, self.plan, importances_of(model, self.plan, "magnitude", ones))
        self.before = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def loss(self, rows: Tensor | None = None) -> float:
        if rows is None:
            return self.objective.mean(4)
        return float(self.objective.of(rows).detach())

    def distill(self, progress: NoProgress | None = None, state: object = None, **changes: object) -> Told:
        return self.trained(Distill, {**OPTIONS, **changes}, progress, state)

    def trained(self, step: type, values: dict[str, object], progress: NoProgress | None, state: object) -> Told:
        """What a step of these options, and those of the compilation, makes of the model."""
        own = {field.name: values.pop(field.name) for field in fields(step) if field.name in values}
        known = {"objective": self.objective, "samples_for": self.ids, "state": state}
        return Told(step(**own).run(Known(self.model, self.plan, self.ids, CompileConfig(**values), progress, **known)))

    @torch.no_grad()
    def reset(self) -> "Pruned":
        for name, weight in self.weights.items():
            weight.copy_(self.before[name])
        return self

    def trained_weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    def moved(self) -> set[str]:
        return {name for name, weight in self.weights.items() if not torch.equal(weight, self.before[name])}


def tiny(dtype: torch.dtype = torch.float32, layers: int = 2) -> Pruned:
    return Pruned(tiny_model(layers).to(dtype), copy.deepcopy(_tiny_plan(layers)))


def tiny_model(layers: int = 2) -> PreTrainedModel:
    model = zoo.tiny_llama(attention_bias=True, num_hidden_layers=layers)
    zoo.randomize(model)
    return model


@functools.cache
def _tiny_plan(layers: int) -> Plan:
    return find_plan(tiny_model(layers), PATTERN)


def facts(model: nn.Module) -> dict[str, object]:
    """Everything, apart from tensor values, that careless training could change in a model."""
    parameters = {
        n: (id(p), p.requires_grad, p.data_ptr(), p.stride(), p.grad is None, len(p._post_accumulate_grad_hooks or {}))
        for n, p in model.named_parameters()
    }
    return {
        "parameters": parameters,
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "training": [module.training for module in model.modules()],
        "config": model.config.to_dict(),
    }


@contextmanager
def only_kept_weights_change(pruned: Pruned) -> Iterator[None]:
    """Checks that everything but the kept weights is the same after the ``with`` block, and that the masks hold."""
    before, tensors = facts(pruned.model), copy.deepcopy(pruned.model.state_dict())
    yield
    assert facts(pruned.model) == before
    own = {weight.data_ptr() for weight in pruned.weights.values()}
    for name, tensor in pruned.model.state_dict().items():
        assert tensor.data_ptr() in own or torch.equal(tensor, tensors[name]), name
    for name, weight in pruned.weights.items():
        assert not (weight[pruned.before[name] == 0] != 0).any(), name
    check_pruned(pruned.model, pruned.plan)
    assert weight_in_out(linear_module(pruned.model, name)).isfinite().all()


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


class Recording(NoProgress):
    """Records steps, notes and lines, and calls ``act`` at call number ``at`` of a stage's function."""

    def __init__(self, at: int = 0, act: Callable[[], object] | None = None) -> None:
        self.steps, self.notes, self.lines, self.total, self.at, self.act = [], [], [], 0, at, act

    def say(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        self.total = total

        def advance(steps: int = 1, note: str = "") -> None:
            self.steps.append(steps)
            self.notes.append(note)
            if len(self.steps) == self.at and self.act:
                self.act()

        yield advance


def interrupt() -> None:
    raise KeyboardInterrupt

"""Fixtures of all tests, beside `conftest.py`: a process that only hands out tests to others need not import torch."""

import copy
import gc
import operator

import pytest
import torch
import transformers
from torch import Tensor, fx, nn

from permtriton.driver import prepare as preparing
from permtriton.methods import planning

from .desk import desk, model_folder  # noqa: F401 (fixtures of the tests of commands)
from .learning import problem  # noqa: F401 (fixture of the tests of learning)


@pytest.fixture(scope="session")
def soak(request) -> bool:
    """Whether tests of random cases try many of them: kills, damaged files."""
    return request.config.getoption("--soak")


@pytest.fixture(autouse=True, scope="session")
def _seldom_collected():
    """Traces make so many objects that collecting what is left of them takes a sixth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _quiet_and_small():
    """The models are tiny: a second thread costs more than it saves, especially next to another test process."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _as_at_the_start():
    torch.manual_seed(0)
    yield
    torch.set_float32_matmul_precision("highest")  # a command on a wide model may have changed it


_PLANS: dict = {}  # of this process: what is traced -> the options that were read, and what was found


@pytest.fixture(autouse=True)
def _traced_once(monkeypatch, request):
    """Compilations trace equal models once: tracing takes half of the time of compiling a tiny model.

    Tests of the trace and of the plan call `plan_model` and what it calls themselves, or are marked `plans`.
    """
    if request.node.get_closest_marker("plans"):
        return

    def plan_model(model, config, samples):
        known = _PLANS.setdefault(_traced(model, samples), [])
        same = (found for read, found in known if all(getattr(config, name) == read[name] for name in read))
        if (found := next(same, None)) is None:
            noting = _Noting(config)
            found = planning.plan_model(model, noting, samples)
            known.append((noting.read, found))
        plan, graph = found
        targets = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
        own = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
        attributes = {name: own[name] if name in own else operator.attrgetter(name)(graph) for name in targets}
        copied = fx.GraphModule(attributes, copy.deepcopy(graph.graph))
        copied.meta.update(graph.meta)
        return copy.deepcopy(plan), copied

    monkeypatch.setattr(preparing, "plan_model", plan_model)


class _Noting:
    """A config that notes which options a plan depends on, because they were read, and their values."""

    def __init__(self, config):
        self._config, self.read = config, {}

    def __getattr__(self, name):
        self.read[name] = getattr(self._config, name)
        return self.read[name]


def _traced(model, samples):
    """Everything that a plan and a graph depend on but options and the values of weights."""
    first: dict = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return (
        type(model),
        repr(model.config),
        model.config._attn_implementation,
        *[(name, type(each), "forward" in vars(each)) for name, each in model.named_modules()],
        *[(name, each.shape, each.dtype, each.device, first.setdefault(id(each), name)) for name, each in tensors],
        *[(name, None if samples.is_text else str(each[:1].tolist())) for name, each in samples.inputs.items()],
    )


@pytest.fixture
def trained_on(monkeypatch) -> list[Tensor]:
    """The token ids of each training step, as they come."""
    found: list[Tensor] = []
    forward = nn.Embedding.forward

    def watch(module: nn.Embedding, ids: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            found.append(ids.clone())
        return forward(module, ids)

    monkeypatch.setattr(nn.Embedding, "forward", watch)
    return found

import copy
import gc
import operator
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before the client of the hub reads it; a test that needs the hub stands in for it

import pytest
import torch
import transformers
from torch import Tensor, fx, nn

from permtriton.driver import planning
from permtriton.driver import prepare as preparing

from .desk import desk, model_folder  # noqa: F401 (fixtures of the tests of commands)
from .learning import problem  # noqa: F401 (fixture of the tests of learning)


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true", help="try many more random cases (`make soak`)")


def pytest_collection_modifyitems(config, items):
    """Leaves out what is marked slow, or of its cases those that the mark says; nothing with --soak."""
    _check_named_cases(items, whole=not any("::" in argument for argument in config.args))
    if config.getoption("--soak"):
        return
    left_out = [item for item in items if _is_slow(item)]
    items[:] = [item for item in items if not _is_slow(item)]
    config.hook.pytest_deselected(items=left_out)


def _check_named_cases(items, *, whole: bool) -> None:
    """Refuses a mark that names a case which is not there: another one would silently be left out, or run."""
    there: dict = {}
    for item in items:
        for mark in item.iter_markers("slow"):
            for names in mark.kwargs.values():
                there.setdefault(item.nodeid.partition("[")[0], (set(names), set()))[1].add(item.callspec.id)
    for test, (names, found) in there.items():
        if whole and names - found:
            raise pytest.UsageError(f"{test}: the mark slow names {sorted(names - found)}, none of its cases")


def _is_slow(item) -> bool:
    """Whether any of its marks says so: that of the test, or that of the case."""
    return any(_says_slow(mark.kwargs, item) for mark in item.iter_markers("slow"))


def _says_slow(names: dict, item) -> bool:
    if "only" in names:
        return item.callspec.id in names["only"]
    return not names or item.callspec.id not in names["but"]


@pytest.fixture(scope="session")
def soak(request) -> bool:
    """Whether tests of random cases try many of them: kills, damaged files. Mark such tests with `pytest.mark.soak`."""
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

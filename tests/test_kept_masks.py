"""Masked weights that learning keeps through a step: the gradient stays the same, and masks are computed once."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.known_run import Known
from permtriton.data.samples import Samples
from permtriton.errors import MemoryTooSmallError
from permtriton.methods.measure.losses import Objective
from permtriton.methods.order.learned import Learned as Options
from permtriton.methods.order.learned import OrderTrainer
from permtriton.methods.order.masked_model import masked_model
from permtriton.methods.order.relaxation import Relaxation
from permtriton.methods.recipe_config import CompileConfig
from permtriton.model.experts import unstacked_experts
from permtriton.model.forward import hidden_states
from permtriton.passes.plan import layer_modules

from . import zoo
from .graphs import random_curvatures, random_importances
from .learning import CPU, PATTERN
from .zoo import find_plan

LEARN = Options(block_size=16, batch_size=6, epochs=2, init="random")
MASK, MASK_BACKWARD = "permtriton.nm_mask.default", "permtriton.placement_gradient.default"


class Recorder:
    """An optimizer that only records gradients."""

    def __init__(self, relaxation: Relaxation) -> None:
        self.param_groups: list[dict[str, float]] = [{}]
        self._relaxation = relaxation

    def step(self) -> None:
        self.found = torch.cat([parameter.grad.flatten() for parameter in self._relaxation.parameters()])

    def zero_grad(self, **_options: object) -> None:
        self._relaxation.zero_grad()


class Step:
    """A learning step of a model, with its plan and random importances."""

    def __init__(self, model: nn.Module, layout: str = "fused", sequences: int = 6, **options: object) -> None:
        self.model, self.plan = model, find_plan(model, PATTERN, layout=layout)
        self.ids = Samples.of(zoo.token_ids(sequences, 8))
        self.target = hidden_states(model, self.ids, 6) + torch.randn(1, generator=torch.Generator().manual_seed(0))
        self.options = replace(LEARN, batch_size=sequences, **options)
        self.config = CompileConfig(sparsity=PATTERN, micro_batch_size=sequences)

    def run(self, keep: bool, steps: int = 1, wide: bool = False, layers: str = "", **running: object) -> Tensor:
        """Returns the gradient of all logits and scales."""
        config, options = replace(self.config, **running), replace(self.options, layers=layers or self.options.layers)
        relaxation = options.relaxation(options.spaces(self.plan), 0, CPU)
        optimizer = Recorder(relaxation.double() if wide else relaxation)
        importances = random_importances(self.plan, self.model)
        if wide:
            importances = {name: replace(f, scale=f.scale.double()) for name, f in importances.items()}
        curvatures = random_curvatures(self.plan, self.model) if options.gradient == "placement" else None
        objective = Objective("cosine", self.model, self.ids, self.target)
        known = {"importances": importances, "objective": objective, "low_memory": not keep}
        run = Known(self.model, self.plan, self.ids, config, **known)
        with (
            masked_model(run, relaxation, curvatures) as self.masks,
            mock.patch.object(torch.optim, "AdamW", return_value=optimizer),
        ):
            self.trainer = OrderTrainer(run, options, self.masks, relaxation)
            for _ in range(steps):
                self.loss = self.trainer.step(torch.arange(len(self.ids)), 0)
            self.evaluated = self.trainer.hard_loss(self.trainer.index(0))
        return optimizer.found


@pytest.fixture(scope="module")
def step() -> Step:
    return Step(zoo.tiny_llama(vocab_size=zoo.VOCABULARY))


def difference(found: Tensor, expected: Tensor) -> float:
    assert float(expected.abs().max()) > 0
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("llama", "portable", {}),  # tied channels of o; one space that all sites of the residual stream read
        ("llama", "fused", {"layers": "last:1"}),  # linears whose order is fixed
        ("llama", "fused", {"gradient": "published"}),
        ("gpt2", "fused", {}),  # weights stored [in, out]
        ("mixtral", "fused", {}),
    ],
)
@pytest.mark.slow
def test_the_gradient_is_the_same_in_exact_arithmetic(name, layout, options):
    """It is linear in that of the weight, with the curvature: of a sum over micro-batches, it is the sum of theirs."""
    with unstacked_experts(model := zoo.build(name)), zoo.float32_means_float64():
        step = Step(model.double(), layout, **options)
        expected = step.run(keep=False, wide=True, micro_batch_size=4)
        losses = step.loss, step.evaluated
        for checkpointing in (True, False):
            found = step.run(keep=True, wide=True, micro_batch_size=4, activation_checkpointing=checkpointing)
            assert difference(found, expected) < 1e-12
            assert (step.loss, step.evaluated) == pytest.approx(losses, rel=1e-12)


@pytest.mark.slow
def test_gradients_of_a_step_do_not_enter_the_next(step):
    assert torch.equal(step.run(keep=True, steps=2), step.run(keep=True, steps=1))


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_a_step_computes_every_mask_and_its_gradient_once(step):
    """And another evaluates: without keeping, it is three times per micro-batch, and once where it evaluates."""
    linears = len(list(step.plan.linears()))
    for keep, forwards, backwards in ((True, 2, 1), (False, 2 * 3 + 3, 3)):
        with Operators() as operators:
            step.run(keep, micro_batch_size=2, activation_checkpointing=True)
        assert operators.counts[MASK] == forwards * linears
        assert operators.counts[MASK_BACKWARD] == backwards * linears


def test_fixed_masks_are_computed_once_for_all_steps(step):
    counts = []
    for steps in (1, 3):
        with Operators() as operators:
            step.run(keep=True, steps=steps, layers="last:1")
        counts.append(operators.counts[MASK])
    assert counts[1] - counts[0] == 2 * 7, "the seven linears of the layer that learns"


def test_one_sequence_that_does_not_fit_is_refused(step):
    def hook(*_arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = layer_modules(step.model, step.plan)[0].register_forward_hook(hook)
    for keep in (True, False):
        with pytest.raises(MemoryTooSmallError):
            step.run(keep, micro_batch_size=1)
    handle.remove()

"""Where memory runs out, a stage goes on with fewer sequences at a time and gives the same result up to rounding.

A model that raises above some number of sequences stands for a GPU; in the backward pass the error comes when later
layers have added their gradients already, which must not count twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from permtriton import config_from
from permtriton.checkpoint import verify
from permtriton.driver.pipeline import compile_model
from permtriton.errors import VerificationError
from permtriton.passes.plan import layer_modules
from permtriton.util.micro_batch import MicroBatch, is_out_of_memory

from . import learning, searching, updating, zoo

CPU_ERROR = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"


@contextmanager
def small_memory(model, plan, sequences: int, backward: bool = False) -> Iterator[list[int]]:
    """The first layer raises on more than ``sequences``; yields the numbers on which it did."""
    refused: list[int] = []

    def refuse(tensor: Tensor) -> None:
        if tensor.shape[0] > sequences:
            refused.append(tensor.shape[0])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")

    def hook(_module, _inputs, output) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if not backward:
            refuse(hidden)
        elif hidden.requires_grad:
            hidden.register_hook(refuse)

    handle = layer_modules(model, plan)[0].register_forward_hook(hook)
    try:
        yield refused
    finally:
        handle.remove()


@pytest.fixture
def problem():
    return learning.Problem(learning.plant(learning.tiny()))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.slow
def test_learning(problem, backward):
    options = replace(learning.QUICK, epochs=1, gradient="published")  # the other one's Fisher pass is a run before
    expected = problem.learn(options, micro_batch_size=4)
    with small_memory(problem.model, problem.plan, 1, backward) as refused:
        found = problem.learn(options, micro_batch_size=4)
    assert refused == [4, 2], "once each: the smaller size stays"
    losses = [[epoch.loss for epoch in result.history] for result in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.slow
def test_search_and_row_weights(backward):
    problem = searching.planted()
    expected = problem.search(micro_batch_size=8, search_rounds=1)
    with small_memory(problem.model, problem.plan, 2, backward) as refused:
        found = problem.search(micro_batch_size=8, search_rounds=1)
    assert refused == [8, 4, 8, 4], "in the pass for row weights, and in the search"
    assert [each.loss for each in found.history] == pytest.approx([each.loss for each in expected.history], rel=1e-4)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.slow
def test_training_kept_weights(backward):
    pruned = updating.tiny()
    pruned.distill(epochs=1)
    expected = pruned.trained_weights()
    pruned.reset()
    with small_memory(pruned.model, pruned.plan, 2, backward) as refused:
        pruned.distill(epochs=1)
    assert refused[0] == 4
    found = pruned.trained_weights()
    assert all(torch.allclose(found[name], weight, atol=2e-4) for name, weight in expected.items())
    assert pruned.moved(), "something was trained"


@pytest.mark.slow
def test_a_gradient_that_could_not_be_collected_does_not_count_twice(monkeypatch):
    """Memory runs out in the hook that collects a gradient, before it has given up the gradient of the parameter."""
    pruned = updating.tiny()
    pruned.distill(epochs=1)
    expected = pruned.trained_weights()
    pruned.reset()
    multiply, failed = Tensor.__mul__, []

    def once(gradient: Tensor, mask: Tensor | float) -> Tensor:
        masks = isinstance(mask, Tensor) and mask.shape == gradient.shape
        if masks and not failed and torch._C._current_graph_task_id() >= 0:  # in a backward pass
            failed.append(gradient.shape)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return multiply(gradient, mask)

    monkeypatch.setattr(Tensor, "__mul__", once)
    pruned.distill(epochs=1)
    assert failed
    found = pruned.trained_weights()
    assert all(torch.allclose(found[name], weight, atol=2e-4) for name, weight in expected.items())


def test_a_second_model_that_does_not_fit_leaves_the_verified_checkpoint(tmp_path, monkeypatch):
    config = config_from({"recipe": "mask"})
    compiled = compile_model(zoo.tiny_llama(), None, config, ids=zoo.tiny_ids(2, 8))

    def fails(error: Exception) -> Callable[..., None]:
        def fail(*_args: object, **_named: object) -> None:
            raise error

        return fail

    for where, name in ((type(compiled.model), "from_pretrained"), (verify, "model_outputs")):
        for error in (RuntimeError(CPU_ERROR), torch.OutOfMemoryError("CUDA out of memory.")):
            with monkeypatch.context() as patched:
                patched.setattr(where, name, fails(error))
                compiled.save_pretrained(tmp_path / "out", overwrite=True)
            assert compiled.report["verification"]["reloaded"].startswith("not run: a second copy does not fit")
    monkeypatch.setattr(type(compiled.model), "from_pretrained", fails(ValueError()))
    with pytest.raises(VerificationError, match="cannot be loaded again: ValueError"):
        compiled.save_pretrained(tmp_path / "other")


def test_other_errors_pass_through():
    def fail(size: int) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        MicroBatch(4).run(fail)
    for error in (MemoryError(), RuntimeError(CPU_ERROR), torch.OutOfMemoryError("x")):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(ValueError(CPU_ERROR))

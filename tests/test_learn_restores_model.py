"""Learning leaves the model as it was, whether it finishes, fails or is interrupted."""

from dataclasses import replace

import pytest

from permtriton.errors import CalibrationError, PermTritonError

from .learning import QUICK, Counting, Problem, plant, stop, tiny, unchanged


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_model_comes_back_unchanged(problem, checkpointing):
    problem.model.lm_head.weight.requires_grad_(False)
    with unchanged(problem.model):
        problem.learn(activation_checkpointing=checkpointing)
    problem.model.lm_head.weight.requires_grad_(True)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 4])
def test_the_model_comes_back_unchanged_after_an_error(problem, error, at):
    with unchanged(problem.model), pytest.raises(type(error)):
        problem.learn(progress=Counting(at, stop(error)))


@pytest.mark.slow
def test_parameters_keep_their_order():
    """Optimizer states are matched to parameters by order."""
    fresh = Problem(plant(tiny()))
    before = [name for name, _ in fresh.model.named_parameters()]
    fresh.learn(replace(QUICK, epochs=1))
    assert [name for name, _ in fresh.model.named_parameters()] == before


@pytest.mark.slow
def test_a_forward_of_a_layers_own_comes_back():
    """Offloading and quantisation libraries put their own ``forward`` on modules."""
    wrapped = Problem(plant(tiny()))
    layer = wrapped.model.model.layers[0]
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs)
    mine = layer.forward
    wrapped.learn(replace(QUICK, epochs=1))
    assert vars(layer).get("forward") is mine


def test_a_loss_that_is_not_finite_is_refused():
    broken = Problem(plant(tiny()))
    broken.target.fill_(float("nan"))
    with unchanged(broken.model), pytest.raises(CalibrationError, match=r"learning loss is nan.*`dtype=float32`"):
        broken.learn()


def test_a_learning_rate_that_explodes_is_refused(problem):
    with unchanged(problem.model), pytest.raises(PermTritonError):
        problem.learn(replace(QUICK, learning_rate=1e30))

"""Outputs that modules of a layer keep while its weights change in turns: computed once, and the same."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.passes.plan import layer_modules

from . import test_seq2seq, zoo
from .expert_stacks import unstacked
from .refits import Problem
from .updating import Recording, tiny_model


def in_place() -> PreTrainedModel:
    """A LLaMA that changes what one of its linears has returned."""
    model = zoo.tiny_llama(num_hidden_layers=3, vocab_size=zoo.VOCABULARY)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.SiLU(inplace=True)
    return model


PROBLEMS = {
    "in place": lambda: Problem(in_place()),
    "gpt_neox": lambda: Problem(*zoo.planned("gpt_neox")),
    "t5": lambda: Problem(test_seq2seq.build("t5")),
    "mixtral": lambda: Problem(*unstacked("mixtral")),
}


@pytest.mark.parametrize("name", ["in place", "gpt_neox", "t5", "mixtral"])
@pytest.mark.slow
def test_where_layers_come_to_a_gpu_one_by_one_the_result_is_the_same(name):
    """Then every run of a layer computes all of it, by the same calls: the bits are equal."""
    problem, progress = PROBLEMS[name](), Recording()
    problem.refit()
    expected = {name: value.clone() for name, value in problem.model.state_dict().items()}
    problem.reset().refit(progress, onloads=True)
    assert all(torch.equal(value, expected[name]) for name, value in problem.model.state_dict().items())
    assert sum(progress.steps) == progress.total


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.slow
def test_each_product_of_the_pruned_model_is_computed_once(refuses, monkeypatch):
    """Once per sequence, whether sequences run together or one by one; the last linear of all has no reader."""
    problem = Problem(tiny_model(layers=3), ids=zoo.tiny_ids(6, 16))
    names = {weight: name for name, weight in problem.weights.items()}
    multiply, computed = nn.functional.linear, Counter()

    def count(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight in names and int((weight == 0).sum()) >= weight.numel() // 2:  # not the dense model's
            computed[names[weight]] += len(inputs)
        return multiply(inputs, weight, bias)

    def refuse(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if refuses and len(inputs[0]) > 1:
            raise RuntimeError("one sequence only")

    layer_modules(problem.model, problem.plan)[1].register_forward_pre_hook(refuse)
    monkeypatch.setattr(nn.functional, "linear", count)
    problem.refit()
    *others, last = problem.weights
    assert last not in computed
    assert computed == dict.fromkeys(others, 6)

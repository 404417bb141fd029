from collections import Counter

import pytest
import torch
from transformers import AlbertConfig, AlbertModel

from permtriton.model.plan import layer_modules, linear_module
from permtriton.planning import find_plan
from permtriton.prune.layer_inputs import from_model, layer_by_layer
from permtriton.prune.statistics import hessians
from permtriton.sparsity import NMPattern

from . import zoo
from .expert_stacks import unstacked

IDS = zoo.token_ids(5, 12)


def ignore(*_: object) -> None:
    pass


def prune(model, sites):
    """Changes a layer as SparseGPT does: what later layers read is other."""
    for site in sites:
        for name in site.linears:
            linear_module(model, name).weight.data[::2] *= 0.5


def model_of(name: str):
    if name == "shared":
        model = zoo.tiny_llama(num_hidden_layers=4, vocab_size=zoo.VOCABULARY)
        first, last = model.model.layers[0], model.model.layers[3]
        last.self_attn, last.mlp = first.self_attn, first.mlp
        return model, find_plan(model, NMPattern(2, 4))
    if name != "albert":
        return unstacked(name) if name == "mixtral" else zoo.planned(name)
    torch.manual_seed(0)
    model = AlbertModel(AlbertConfig(**{**zoo.SIZES, "embedding_size": 32})).eval()
    zoo.randomize(model)
    return model, find_plan(model, NMPattern(2, 4))


@pytest.mark.parametrize("changing", [False, True])
@pytest.mark.parametrize("name", ["llama_eager", "gpt2", "gemma2", "mixtral", "albert", "shared"])
def test_layers_one_by_one_read_what_they_read_in_the_model(name, changing):
    """Also where layers share weights, so that all of them, or the first and the last one, need the model."""
    model, plan = model_of(name)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    expected = []
    for sites in plan.layers():
        expected.append(hessians(model, from_model(model, sites, IDS, 2), ignore))
        if changing:
            prune(model, sites)
    model.load_state_dict(weights)
    for layer, before in zip(layer_by_layer(model, plan, IDS, 2, changing=changing), expected, strict=True):
        found = hessians(model, layer, ignore)
        assert found.keys() == before.keys()
        for site, hessian in found.items():
            torch.testing.assert_close(hessian, before[site], rtol=1e-4, atol=1e-4 * float(before[site].abs().max()))
        if changing:
            prune(model, layer.sites)
    changed = any(not torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert changed == changing, "weights that were negated for a trial are as they were"


@pytest.mark.parametrize(("changing", "runs"), [(False, 1), (True, 2)])
def test_time_is_linear_in_the_depth(changing, runs):
    """Beside the recording of the chain, each layer runs once per part, and once more if its weights change."""
    model = zoo.tiny_llama(num_hidden_layers=6)
    plan = find_plan(model, NMPattern(2, 4))
    ids, calls = zoo.tiny_ids(5, 12), Counter()
    for number, layer in enumerate(layer_modules(model, plan)):
        layer.register_forward_pre_hook(lambda *_, number=number: calls.update([number]))
    seen = 0
    for layer in layer_by_layer(model, plan, ids, 5, changing=changing):
        before = calls.total()
        hessians(model, layer, ignore)
        assert calls.total() - before == 1
        seen += 1
    assert seen == 6
    recorded = 2 + len(ids)  # two trials of one sequence, then every sequence
    together = 1 + 2  # both ways to run the first two sequences
    assert set(calls.values()) == {recorded + together + runs}


@pytest.mark.parametrize("changing", [False, True])
def test_a_layer_that_takes_one_sequence_at_a_time(changing):
    """Where sequences run one by one, each of them is seen, and each once."""
    model, plan = zoo.planned("llama_eager")
    expected = [hessians(model, from_model(model, sites, IDS, 5), ignore) for sites in plan.layers()]

    def refuse(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[0] > 1:
            raise RuntimeError("one sequence only")

    layer_modules(model, plan)[1].register_forward_pre_hook(refuse)
    for layer, before in zip(layer_by_layer(model, plan, IDS, 5, changing=changing), expected, strict=True):
        for site, hessian in hessians(model, layer, ignore).items():
            torch.testing.assert_close(hessian, before[site], rtol=1e-4, atol=1e-4 * float(before[site].abs().max()))


def test_an_interrupt_while_weights_are_negated_leaves_them_as_they_were():
    model, plan = zoo.planned("llama_eager")
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    negated = []

    def interrupt(*_: object) -> None:
        negated.append(any(not torch.equal(value, weights[key]) for key, value in model.state_dict().items()))
        if negated[-1]:
            raise KeyboardInterrupt

    layer_modules(model, plan)[-1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(layer_by_layer(model, plan, IDS, 2, changing=True))
    assert negated == [False, True]
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())

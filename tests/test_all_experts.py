"""Mixtures: how many tokens each expert is sent, and statistics of every expert on every token."""

import pytest
import torch

import permtriton
from permtriton.model.experts import RoutedExperts, unstacked_experts

from . import zoo

TOP_K, RARE = 2, 4


def mixture(seed: int = 0):
    """Mixtral with five experts, the last of which is sent few tokens."""
    model = zoo.build("mixtral")
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight.data
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) / 8)
        weight[RARE] *= 0.05  # its score is seldom among the highest
    return model


def counted(model, ids) -> dict[str, list[int]]:
    """Tokens by expert, as the model's own experts are called."""
    found, handles = {}, []

    def hook(name):
        def count(_module, inputs):
            found[name] = (found.get(name, 0) + torch.bincount(inputs[1].flatten(), minlength=5)).clone()

        return count

    for name, module in model.named_modules():
        if name.endswith("experts"):
            handles.append(module.register_forward_pre_hook(hook(name)))
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return {name: count.tolist() for name, count in found.items()}


@pytest.mark.parametrize("importance", ["wanda", "obs"])  # one run of the model, and layer by layer
@pytest.mark.slow
def test_the_record_counts_the_tokens_of_each_expert(importance):
    model, ids = mixture(), zoo.token_ids()
    expected = counted(model, ids)
    compiled = permtriton.compile(model, data=ids, importance=importance, recipe="heuristic,mask")
    assert compiled.report["expert_tokens"] == expected
    assert {sum(each) for each in expected.values()} == {TOP_K * ids.numel()}
    assert "expert_tokens" not in permtriton.compile(zoo.build("llama"), data=ids, recipe="mask").report


@pytest.mark.slow
def test_few_tokens_are_said_unless_all_are_measured():
    said = {}
    for wanted in (False, True):
        events = []
        permtriton.compile(
            mixture(), data=zoo.token_ids(), recipe="mask", calibrate_all_experts=wanted, progress=events.append
        )
        said[wanted] = " ".join(event.text for event in events if event.text)
    assert "experts received fewer calibration tokens than they have intermediate channels" in said[False]
    assert "`calibrate_all_experts=true`" in said[False]
    assert "fewer calibration tokens" not in said[True]


@torch.no_grad()
def test_every_expert_sees_every_token_and_the_result_is_the_same():
    model, ids = mixture(), zoo.token_ids()
    before = model(ids).logits
    with unstacked_experts(model):
        experts = [each for each in model.modules() if isinstance(each, RoutedExperts)]
        read = {}
        for each in experts:
            each.measuring = each.all_measured = True
            for number in range(len(each)):
                linear = each.linear(number, "down_proj")
                linear.register_forward_pre_hook(lambda module, inputs: read.update({module: inputs[0].shape[0]}))
        after = model(ids).logits
    assert set(read.values()) == {ids.numel()}
    assert len(read) == 5 * len(experts)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_it_needs_experts():
    with pytest.raises(permtriton.PermTritonError, match="has no effect on a LlamaForCausalLM"):
        permtriton.compile(zoo.build("llama"), data=zoo.token_ids(), recipe="mask", calibrate_all_experts=True)

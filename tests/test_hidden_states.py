"""What ``permtriton.json`` says of hidden states is true of those that the model returns, or is "unknown"."""

import functools

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from benchmarks.architectures import tiny
from permtriton import config_from
from permtriton.checkpoint.plan_entries import hidden_order_of
from permtriton.driver.pipeline import compile_model
from permtriton.model.checks import same_channels

from . import zoo

STATES = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
KNOWN, UNKNOWN = (
    ("LlamaForCausalLM", "T5ForConditionalGeneration"),
    ("FSMTForConditionalGeneration", "ReformerModelWithLMHead"),
)
OWN_ORDER = ("T5ForConditionalGeneration", "CohereAsrForConditionalGeneration")  # of the encoder's last state, if fused
OPTIONS = {"recipe": "heuristic,mask", "importance": "magnitude", "sparsity": "7:8", "skip_indivisible": True}


@torch.no_grad()
def states(model: PreTrainedModel) -> dict[str, tuple[Tensor, ...]]:
    torch.manual_seed(0)  # Reformer draws its hashes
    result = model(**tiny.inputs(model, samples=2), output_hidden_states=True)
    return {name: result[name] for name in STATES if name in result}


def near(dense: Tensor, found: Tensor) -> bool:
    """Whether states are those of a lightly pruned model, in the same order: in another one, the cosine is about 0."""
    return dense.shape == found.shape and float(torch.cosine_similarity(dense, found, dim=-1).mean()) > 0.7


@functools.cache
def compiled_states(name: str, layout: str) -> tuple[dict, dict, dict]:
    """Returns what the record says, and the states of the dense and of the compiled model."""
    dense, model = tiny.build(name), tiny.build(name)
    compiled = compile_model(model, None, config_from({**OPTIONS, "layout": layout}), ids=tiny.inputs(model))
    return compiled.report["hidden_states"], states(dense), states(model)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("LlamaForCausalLM", "portable"), *((name, "fused") for name in (KNOWN[1], *UNKNOWN, OWN_ORDER[1]))],
)
@pytest.mark.slow
def test_the_order_in_the_record_is_that_of_the_states(name, layout):
    record, dense, found = compiled_states(name, layout)
    undo = record.get("undo", slice(None))
    right = all(near(a, b[..., undo]) for key in dense for a, b in zip(dense[key], found[key], strict=True))
    assert right == (record["permuted"] != "unknown")
    assert layout == "fused" or right == (name in KNOWN)
    assert layout == "portable" or right == (name not in OWN_ORDER)


@pytest.mark.slow
def test_the_order_of_the_last_state_is_known_where_that_of_others_is_not():
    record, dense, found = compiled_states("CohereAsrForConditionalGeneration", "portable")
    assert record["why"].startswith("encoder_hidden_states: ")
    last = [each["decoder_hidden_states"][-1] for each in (dense, found)]
    order = hidden_order_of({"hidden_states": record})
    assert near(last[0][..., order], last[1])
    assert not near(*last)


@pytest.mark.slow
def test_embeddings_of_another_width_have_an_order_of_their_own():
    """ALBERT's are projected to the stream: what ``inputs_embeds`` must be in is not the stream's order."""
    record, dense, found = compiled_states("AlbertForMaskedLM", "portable")
    assert record["permuted"] == "unknown"
    assert record["why"].startswith("inputs_embeds: ")
    assert near(dense["hidden_states"][-1], found["hidden_states"][-1][..., record["last"]["undo"]])


class Paired(LlamaModel):
    """A backbone whose first output is no tensor."""

    def forward(self, input_ids, **_):
        states = super().forward(input_ids=input_ids).last_hidden_state
        return ((input_ids, states),)


class PairedForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = Paired(config)

    def forward(self, input_ids, **_):
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)[0][1]))


@pytest.mark.slow
def test_the_order_is_unknown_where_no_last_state_is_returned():
    """Nothing is there to compare with what the plan says of it."""
    torch.manual_seed(0)
    model = PairedForCausalLM(zoo.tiny_llama().config).eval()
    record = compile_model(model, None, config_from(OPTIONS), ids=zoo.tiny_ids(4, 16)).report["hidden_states"]
    assert record.get("last", record)["permuted"], "the plan says so"
    assert record["permuted"] == "unknown"
    assert record["why"] == "last_hidden_state: the model returns none to compare with"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_are_told_apart_beside_one_that_is_a_thousand_times_as_large(dtype):
    """Real models have such channels, beside which the others are within the tolerance of outputs."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 16, 64, generator=generator)
    states[..., 5] *= 1000
    rounded = states.to(dtype).float()
    assert same_channels(states, rounded, dtype)
    swapped = torch.arange(64)
    swapped[[7, 30]] = swapped[[30, 7]]
    assert not same_channels(states, rounded[..., swapped], dtype)
    assert not same_channels(states, rounded[..., :32], dtype)
    assert not same_channels(states, rounded * torch.nan, dtype)

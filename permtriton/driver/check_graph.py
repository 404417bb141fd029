"""Compares a traced graph with its model: both are run on the same samples, and must give the same outputs."""

import math

import torch
from torch import fx
from transformers import PreTrainedModel

from permtriton.data.samples import Samples, start_of
from permtriton.model.checks import check_same_outputs, model_outputs
from permtriton.passes.trace import OTHER_VALUES


def check_graph(graph: fx.GraphModule, model: PreTrainedModel, samples: Samples, stage: str) -> str:
    """Checks that a graph and its model give the same outputs on the first sample.

    Returns:
        Why the outputs were not compared; empty if they were.
    """
    if OTHER_VALUES in graph.meta:
        return "not compared: the graph takes all rows where the model selects some by their values"
    if model.dtype.itemsize < 4 and any("topk" in str(node.target) for node in graph.graph.nodes):
        return f"not compared: in {model.dtype} rounding sends tokens to other experts"
    sample = _traced_sample(graph, model, samples)
    with torch.no_grad():
        traced = graph(*sample.inputs.values())[0].float().cpu()
    check_same_outputs(traced, model_outputs(model, sample), model.dtype, stage)
    return ""


def _traced_sample(graph: fx.GraphModule, model: PreTrainedModel, samples: Samples) -> Samples:
    """Returns the first sample in the traced shapes, its tensors in the order of the graph's arguments."""
    taken = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            rows = samples.inputs[str(node.target)][:1]
            if samples.is_text:
                tokens = node.meta["val"].shape[1]
                rows = start_of(rows.repeat(1, math.ceil(tokens / rows.shape[1])), tokens)  # a sample may be shorter
            taken[str(node.target)] = rows
    return Samples(taken).to(model.device, model.dtype)

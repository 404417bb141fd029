"""Compares a traced graph with its model: both are run on the same samples, and must give the same outputs."""

import math

import torch
from torch import Tensor, fx
from transformers import PreTrainedModel

from permtriton.data.samples import Samples, start_of
from permtriton.model.checks import check_same_outputs, model_outputs
from permtriton.passes.trace import OTHER_VALUES


def comparison_refusal(graph: fx.GraphModule, model: PreTrainedModel) -> str:
    """Returns why a graph need not give the outputs of its model; empty where it must."""
    if OTHER_VALUES in graph.meta:
        return "not compared: the graph takes all rows where the model selects some by their values"
    if model.dtype.itemsize < 4 and any("topk" in str(node.target) for node in graph.graph.nodes):
        return f"not compared: in {model.dtype} rounding sends tokens to other experts"
    return ""


def traced_sample(graph: fx.GraphModule, model: PreTrainedModel, samples: Samples) -> Samples:
    """Returns the first sample in the traced shapes, on which a graph is compared with its model."""
    taken = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            rows = samples.inputs[str(node.target)][:1]
            if samples.is_text:
                tokens = node.meta["val"].shape[1]
                rows = start_of(rows.repeat(1, math.ceil(tokens / rows.shape[1])), tokens)  # a sample may be shorter
            taken[str(node.target)] = rows
    return Samples(taken).to(model.device, model.dtype)


def check_graph(graph: fx.GraphModule, model: PreTrainedModel, sample: Samples, stage: str) -> None:
    check_same_outputs(graph_outputs(graph, sample), lambda: model_outputs(model, sample), model, stage)


@torch.no_grad()
def graph_outputs(graph: fx.GraphModule, sample: Samples) -> Tensor:
    """Returns the first output of a graph, as `permtriton.model.checks.model_outputs` gives that of a model."""
    taken = [sample.inputs[str(node.target)] for node in graph.graph.nodes if node.op == "placeholder"]
    return graph(*taken)[0].float().cpu()

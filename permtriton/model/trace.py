"""Traces a model to a `torch.fx` graph over the model's own parameters, with the last hidden state as an output."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from transformers import PreTrainedModel

from permtriton.errors import ModelError
from permtriton.model.forward import without_cache

TRACE_TOKENS = 4  # few, so that following channels is cheap; more than one, so that mixing of tokens shows
GUARDS = {torch.ops.aten._assert_tensor_metadata.default}  # checks that the graph does not need


@dataclass(frozen=True)
class Traced:
    """A model as a graph.

    Attributes:
        graph_module: ``graph_module(input_ids)`` returns the model's outputs and its last hidden state as a flat tuple.
            ``input_ids`` (int64 ``[1, TRACE_TOKENS]``) is the only placeholder. Every parameter is one ``get_attr``
            node whose target is its first name in ``model.named_parameters()`` and whose value is the model's own
            ``nn.Parameter``; buffers and constants are ``get_attr`` nodes, too.
        outputs: positions of the model's own outputs in that tuple.
        hidden: position of the last hidden state in that tuple.
    """

    graph_module: fx.GraphModule
    outputs: tuple[int, ...]
    hidden: int

    @property
    def hidden_node(self) -> fx.Node:
        """The graph node of the last hidden state."""
        output = next(node for node in reversed(self.graph_module.graph.nodes) if node.op == "output")
        results: Any = output.args[0]
        return results[self.hidden]


class _Probed(nn.Module):
    """Returns every tensor that the model returns, and the last hidden state after them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        hidden_states: list[Tensor] = []
        # Some heads call the decoder of their backbone directly, so all are hooked; the outermost one returns last.
        backbones = [m for m in self.model.modules() if isinstance(m, PreTrainedModel) and m is not self.model]
        handles = [
            module.register_forward_hook(lambda _m, _a, output: hidden_states.append(output[0]))
            for module in backbones or [self.model]
        ]
        try:
            output = self.model(input_ids=input_ids)
        finally:
            for handle in handles:
                handle.remove()
        return (*(value for value in output.to_tuple() if isinstance(value, Tensor)), hidden_states[-1])


def trace(model: PreTrainedModel) -> Traced:
    """Traces ``model`` on one short sequence. No weight is copied, and the model may be on the meta device.

    Raises:
        ModelError: the model is an encoder-decoder, does not run on token ids alone, or cannot be exported by
            ``torch.export``.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} cannot be traced: it is an encoder-decoder, and its decoder_input_ids and "
            "cross-attention are not traced. permtriton takes models that run on input_ids alone: an encoder "
            "(as BERT) or a decoder (as LLaMA)"
        )
    ids = torch.zeros((1, TRACE_TOKENS), dtype=torch.int64, device=model.device)
    probed = _Probed(model)
    try:
        with torch.no_grad(), without_cache(model), _attributes_kept(model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The tensor attribute", category=UserWarning)  # restored below
            exported = torch.export.export(probed, (ids,), strict=False)
    except Exception as error:  # torch.export raises many kinds
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        raise ModelError(
            f"{type(model).__name__} cannot be traced: {type(error).__name__}: {first_line}. permtriton needs a model "
            "that runs on input_ids alone (no decoder inputs, images or sound) and that torch.export can follow"
        ) from error
    graph_module = unlifted(exported, model, prefix="model.")
    count = len(exported.graph_signature.user_outputs)
    return Traced(graph_module, tuple(range(count - 1)), count - 1)


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restores every module attribute that running the model changes, such as the frequencies of a rotary embedding.

    During an export the model runs on tensors without values. If it stored them, later runs would fail.
    """
    before = [(vars(module), {k: (v, _copied(v)) for k, v in vars(module).items()}) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, values in before:
            attributes.clear()
            for name, (value, copied) in values.items():
                attributes[name] = value
                if isinstance(value, dict | set):
                    value.clear()
                    value.update(copied)
                elif isinstance(value, list):
                    value[:] = copied


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | set | list) else None


def unlifted(exported: ExportedProgram, model: nn.Module, prefix: str = "") -> fx.GraphModule:
    """Returns an exported program as a graph that reads the model's own parameters and buffers by ``get_attr`` nodes.

    Args:
        exported: exported program; its parameters and buffers are lifted to placeholders.
        model: module that holds the parameters and buffers.
        prefix: prefix of the program's names for them, which the names in ``model`` lack.
    """
    first_names = _first_names(model)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    readers: dict[str, fx.Node] = {}
    attributes: dict[str, Any] = {}
    inputs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    for node in exported.graph.nodes:
        if node.op == "output":
            kept = [s.kind is OutputKind.USER_OUTPUT for s in exported.graph_signature.output_specs]
            results = [value for value, keep in zip(node.args[0], kept, strict=True) if keep]
            graph.output(tuple(copies.get(value, value) for value in results))
        elif node.op == "placeholder" and inputs[node.name].kind is not InputKind.USER_INPUT:
            spec = inputs[node.name]
            name = str(spec.target)
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                name = name.removeprefix(prefix)
                name = first_names.get(name, name)
                value = model.get_parameter(name) if spec.kind is InputKind.PARAMETER else model.get_buffer(name)
            else:
                value = exported.constants[name]
            if name not in readers:
                attributes[name] = value
                readers[name] = graph.create_node("get_attr", name, name=node.name)
                readers[name].meta = dict(node.meta)
            copies[node] = readers[name]
        elif node.target not in GUARDS:
            if node.op == "get_attr":
                attributes[str(node.target)] = getattr(exported.graph_module, str(node.target))
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(attributes, graph, f"{type(model).__name__}Graph")


def _first_names(model: nn.Module) -> dict[str, str]:
    """Returns every name of each parameter -> the first name of that parameter."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}

"""Traces a model to a `torch.fx` graph over the model's own parameters, with the last hidden state as an output."""

import copy
import io
import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._functorch.predispatch import _vmap_increment_nesting
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import ModelError
from permtriton.model.copied_files import is_embedder
from permtriton.model.core import ENCODER_STATE, check_towers, has_head, recorded_states
from permtriton.model.forward import without_cache
from permtriton.passes.recorded_branches import Answers, converted, samples_like
from permtriton.passes.trace_inputs import examples

OTHER_VALUES = "other_values"  # in the meta of a graph that has the model's channels but computes other values
STORED = {InputKind.PARAMETER, InputKind.BUFFER}
GUARDS = {torch.ops.aten._assert_tensor_metadata.default}  # checks that the graph does not need


class _Probed(nn.Module):
    """Returns the model's output tensors except ``left_out``, then the last hidden state.

    If ``masked``, the model gets a mask of ones, which some models (LongT5) make only when they are not exported.
    """

    def __init__(self, model: PreTrainedModel, masked: bool, left_out: str) -> None:
        super().__init__()
        self.model, self.masked, self.left_out = model, masked, left_out

    def forward(self, **arguments: Tensor) -> tuple[Tensor, ...]:
        if self.masked:
            arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
        # torch.export would split the graph where gradients are switched, and generate the code of each part again.
        gradients_stay_off = mock.patch.object(torch._C, "_set_grad_enabled", return_value=None)
        with recorded_states(self.model) as states, gradients_stay_off:
            output = self.model(**arguments)
        return (*(v for name, v in output.items() if isinstance(v, Tensor) and name != self.left_out), states[-1])


def trace(model: PreTrainedModel, sample: Samples | None = None) -> tuple[fx.GraphModule, range]:
    """Traces ``model`` on one sample. No weight is copied, and the model may be on the meta device.

    Args:
        sample: sample whose shapes are traced; None for the first of
            `permtriton.passes.trace_inputs.examples` that the model takes.

    Returns:
        The graph, and the positions of the results that users of the model see. ``graph_module(*inputs)`` returns a
        flat tuple: the model's outputs, and at its end the last hidden state, which users see only of a model of
        sentence-transformers. The encoder's last hidden state, which an encoder-decoder with a head returns beside its
        logits, is left out: like the states between layers, it is internal, and its channels may move.

        The placeholders have the names and shapes of the sample that was traced, such as ``input_ids`` (int64
        ``[1, TRACE_TOKENS]``). Every parameter is one ``get_attr`` node whose target is its first name in
        ``model.named_parameters()`` and whose value is the model's own ``nn.Parameter``; buffers and constants are
        ``get_attr`` nodes, too. The graph's ``meta`` has `OTHER_VALUES` where the model selects rows by computed
        values: the graph takes all rows (`permtriton.passes.recorded_branches`).
    """
    check_towers(model)
    embedder = is_embedder(model)
    left_out = ENCODER_STATE if has_head(model) and not embedder else ""
    samples = [sample] if sample is not None else examples(model)
    problems: list[Exception] = []
    for inputs, masked in product(samples, (False, True)):
        if masked and ("input_ids" not in inputs.inputs or inputs is not samples[0]):
            continue
        try:
            arguments = dict(inputs.to(model.device, model.dtype).inputs)
            exported, alike = _exported(_Probed(model, masked, left_out), arguments)
        except Exception as error:  # torch.export raises many kinds
            problems.append(error)
            continue
        graph_module = unlifted(exported, model, prefix="model.")
        _check_not_random(model, graph_module)
        if not alike:
            graph_module.meta[OTHER_VALUES] = True
        return graph_module, range(len(exported.graph_signature.user_outputs) - 1 + embedder)
    raise ModelError(
        f"{type(model).__name__} cannot be traced: {_described(problems[0])}. permtriton needs a model that runs on "
        f"{model.main_input_name} alone, or on a mapping of what else its forward needs (`ids=` in Python, a "
        ".safetensors file on the command line), and whose branches do not depend on the values of its inputs; of a "
        "model with towers for text and images, save one tower as a model of its own"
    ) from problems[0]


def _check_not_random(model: PreTrainedModel, graph_module: fx.GraphModule) -> None:
    """Refuses a model whose outputs differ from run to run."""
    random = torch.Tag.nondeterministic_seeded
    for operator in {node.target: None for node in graph_module.graph.nodes}:
        # Attention and dropout have the tag, too; both take a rate of dropout, which is 0 outside of training.
        if random in getattr(operator, "tags", ()) and "drop" not in str(operator._schema):
            raise ModelError(
                f"{type(model).__name__} draws random numbers when it runs ({operator}), so that its outputs cannot be "
                "compared with the dense model's: permtriton needs a model that returns the same for the same inputs"
            )


def _described(error: Exception) -> str:
    """Returns an error in one line, with the last line of the model's code that ran before it."""
    frames = traceback.extract_tb(error.__traceback__)
    code = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "/torch/" not in frame.filename]
    return f"{type(error).__name__} at {code[-1]}: {next(iter(str(error).strip().splitlines()), 'no message')}"


def _exported(probed: _Probed, arguments: dict[str, Tensor]) -> tuple[ExportedProgram, bool]:
    """Returns a model as an exported program, and whether the program computes the model's values."""
    # A stack trace for each node would take a tenth of the time.
    no_stack_traces = mock.patch.object(fx.config, "do_not_emit_stack_traces", True, create=True)
    with torch.no_grad(), without_cache(probed.model), _attributes_kept(probed.model), _quiet(), no_stack_traces:
        try:
            return export_program(probed, **arguments), True
        except Exception:  # torch.export raises many kinds
            with suppress(Exception):  # the model's code may raise any
                return _exported_with_answers(_on_cpu(probed), arguments)
            raise


def _exported_with_answers(probed: _Probed, arguments: dict[str, Tensor]) -> tuple[ExportedProgram, bool]:
    """Exports a model whose branches depend on values but are the same for all samples."""
    arguments = {name: torch.zeros_like(value, device=probed.model.device) for name, value in arguments.items()}
    all_answers = []
    for sample in samples_like(arguments):
        with Answers() as answers:
            probed(**sample)
        all_answers.append(answers.answers)
    if any(answers != all_answers[0] for answers in all_answers):
        raise ModelError("the model's branches depend on values")
    with Answers(all_answers[0]) as answers, converted():
        return export_program(probed, **arguments), not answers.takes_all


def _on_cpu(probed: _Probed) -> _Probed:
    """Returns a model that can run: for meta tensors, it has zeros on the CPU, which take no memory until written."""
    if probed.model.device.type != "meta":
        return probed
    return copy.deepcopy(probed)._apply(lambda tensor: torch.zeros_like(tensor, device="cpu"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside the context, drops logs, warnings and what is printed on standard error.

    torch.export prints the partial graph of a model that it cannot trace, which our error sums up in one line, and
    warns of changed attributes, which `_attributes_kept` restores.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def export_program(module: nn.Module, *inputs: Tensor, **named: Tensor) -> ExportedProgram:
    """Returns a module as an exported program in which no operator writes into memory that another one reads.

    Writing into a slice, for example, becomes an operator that returns the whole tensor with that slice replaced. Code
    under ``torch.vmap`` becomes operators on whole tensors: the calls that enter and leave it have no traceable result.
    """
    exported = torch.export.export(module, inputs, named, strict=False)
    targets = {node.target for node in exported.graph.nodes}
    schemas = [getattr(target, "_schema", None) for target in targets]
    rewritten = _vmap_increment_nesting in targets or any(schema and schema.is_mutable for schema in schemas)
    return exported.run_decompositions({}) if rewritten else exported


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restores every module attribute that running the model changes, such as the frequencies of a rotary embedding.

    During an export the model runs on tensors without values. If the model kept these, later runs would fail.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    values = [value for _, kept in attributes for value in kept.values() if isinstance(value, dict | set | list)]
    contents = [value.copy() for value in values]
    try:
        yield
    finally:
        for present, kept in attributes:
            present.clear()
            present.update(kept)
        for value, content in zip(values, contents, strict=True):
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)


def unlifted(exported: ExportedProgram, model: nn.Module, prefix: str = "") -> fx.GraphModule:
    """Returns an exported program as a graph that reads the model's own parameters and buffers by ``get_attr`` nodes.

    Args:
        exported: exported program; its parameters and buffers are lifted to placeholders.
        model: module that holds the parameters and buffers.
        prefix: prefix that names of parameters and buffers have in the program, but not in ``model``.
    """
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    first_names = {name: first.setdefault(id(parameter), name) for name, parameter in named}  # of tied parameters
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    readers: dict[str, fx.Node] = {}
    attributes: dict[str, Any] = {}
    signature = exported.graph_signature
    lifted = {spec.arg.name: spec for spec in signature.input_specs if spec.kind is not InputKind.USER_INPUT}
    for node in exported.graph.nodes:
        if node.op == "output":
            results = zip(node.args[0], signature.output_specs, strict=True)
            kept = [value for value, spec in results if spec.kind is OutputKind.USER_OUTPUT]
            graph.output(tuple(copies.get(value, value) for value in kept))
        elif node.name in lifted:
            name, is_constant = str(lifted[node.name].target), lifted[node.name].kind not in STORED
            if not is_constant:
                name = name.removeprefix(prefix)
                name = first_names.get(name, name)
            if name not in readers:
                attributes[name] = exported.constants[name] if is_constant else attrgetter(name)(model)
                readers[name] = graph.create_node("get_attr", name, name=node.name)
                readers[name].meta = dict(node.meta)
            copies[node] = readers[name]
        elif node.target not in GUARDS:
            if node.op == "get_attr":
                attributes[str(node.target)] = getattr(exported.graph_module, str(node.target))
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in reversed(graph.nodes):  # remove what is only read for its shape, such as BART's slice of embeddings
        reads_attribute = any(source.op == "get_attr" for source in node.all_input_nodes)
        if node.op == "call_function" and not node.users and not reads_attribute and not node.is_impure():
            graph.erase_node(node)
    return fx.GraphModule(attributes, graph, f"{type(model).__name__}Graph")

"""Running the layers of a model one by one, on arguments that were recorded when the model ran.

A chain is a sequence of layers: each takes the output of the layer before it, and no other argument (positions, masks)
depends on the layers' weights. Once these other arguments are recorded, the layers run without the model.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.model.checks import TOLERANCE, relative_difference
from permtriton.model.forward import last_hidden_state, replaced_forwards
from permtriton.util.hooks import hooked
from permtriton.util.store import Store

PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class _Call:
    """One call of a layer."""

    hidden: Tensor | None  # the call's hidden states; None if the layer before returned them, or there are none
    leaves: list[Any]  # the other arguments, flattened by pytree
    structure: pytree.TreeSpec  # structure of the other arguments
    repeatable: bool  # whether the layer can run without the model, on these arguments and other hidden states
    follows: str = ""  # name of the layer that ran before, if that layer returned the hidden states; else empty
    form: "Form | None" = None  # form of the output; None if it holds more than hidden states and plain values


@dataclass(frozen=True)
class Form:
    """How a layer returns hidden states of ``shape`` per sequence: alone, or among values that are no tensors."""

    leaves: list[Any]  # the flat output, with None at position ``at``, which is that of the hidden states
    at: int
    structure: pytree.TreeSpec
    shape: torch.Size

    def of(self, hidden: Tensor) -> Any:
        return pytree.tree_unflatten([*self.leaves[: self.at], hidden, *self.leaves[self.at + 1 :]], self.structure)


class LayerCalls:
    """A layer, and the arguments except hidden states of its recorded calls, which are numbered from 0.

    Attributes:
        form: form of the last recorded output, as in `_Call`; None before the first call.
        together: whether calls that were recorded on one sequence each can run as one call on several sequences.
    """

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self.layer, self._device = layer, device
        self.form: Form | None = None
        self.together = False
        self._leaves: list[list[Any]] = []  # per call; an argument that equals that of the first call is stored once
        self._structure: pytree.TreeSpec | None = None

    def add(self, call: _Call) -> None:
        first = self._leaves[0] if self._leaves else call.leaves
        self.form, self._structure = call.form, call.structure
        self._leaves.append([a if same(a, b) else b for a, b in zip(first, call.leaves, strict=True)])

    def __call__(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Returns the output for the sequences ``rows``: ``[len(rows), tokens, hidden]``, as ``hidden`` is."""
        if self.together:
            return self.run(hidden, rows.tolist())
        return torch.cat([self.run(states, [row]) for states, row in zip(hidden.split(1), rows.tolist(), strict=True)])

    def run(self, hidden: Tensor, numbers: list[int]) -> Tensor:
        """Returns the output for ``hidden``, on any device, with the arguments of the calls ``numbers``, joined."""
        assert self._structure is not None
        leaves = [_joined(values) for values in zip(*(self._leaves[number] for number in numbers), strict=True)]
        positional, named = pytree.tree_unflatten(leaves, self._structure)
        hidden = hidden.to(self._device)
        if "hidden_states" in named:
            return _hidden_of(self.layer(*positional, **{**named, "hidden_states": hidden}))
        return _hidden_of(self.layer(hidden, *positional[1:], **named))

    @torch.no_grad()
    def try_together(self, hidden: Tensor) -> None:
        """Sets ``together``: tests on two sequences whether several can run in one call, though recorded one by one."""
        hidden, rows, self.together = hidden[:2], torch.arange(len(hidden[:2])), False
        arguments = list(zip(*self._leaves, strict=True))
        if not all(_joinable(values) for values in arguments if any(value is not values[0] for value in values)):
            return
        expected = self(hidden, rows)
        try:
            joint = self.run(hidden, rows.tolist())
        except (RuntimeError, ValueError, IndexError):  # shapes that hold for one sequence only
            return
        difference = relative_difference(expected, joint) if joint.shape == expected.shape else math.inf
        self.together = difference <= TOLERANCE[hidden.dtype]


@torch.no_grad()
def record_calls(model: PreTrainedModel, calls: Mapping[str, LayerCalls], batch: Samples) -> Tensor:
    """Runs the model on one batch and adds each layer's call to ``calls``; returns the input of the first layer.

    The layers of a chain take the same other arguments whatever hidden states reach them. So from the second batch on,
    layers whose form of output is known compute nothing.

    Args:
        calls: the chain's layers by name, in execution order.
    """
    layers = {name: layer_calls.layer for name, layer_calls in calls.items()}
    forms = {layer_calls.layer: layer_calls.form for layer_calls in calls.values() if layer_calls.form is not None}
    with left_out(forms):
        recorded_calls = recorded(model, layers, batch)
    for name, (call,) in recorded_calls.items():
        calls[name].add(call)
    hidden = next(iter(recorded_calls.values()))[0].hidden
    assert hidden is not None
    return hidden


@torch.no_grad()
def find_chains(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], sample: Samples, weights: Iterable[Tensor]
) -> list[list[str]]:
    """Returns the chains, as names of layers; layers that cannot run without the model are in no chain.

    Args:
        weights: weights that change, or take two sets of values in turn, while chains run. A chain ends before a layer
            of which an argument, other than hidden states, depends on such weights of the chain's earlier layers. The
            argument may depend on other weights, which are final by then: a decoder layer reads the encoder's output.
    """
    recorded_calls = recorded(model, layers, sample)
    chains: list[list[str]] = []
    for name, calls in recorded_calls.items():
        if len(calls) == 1 and calls[0].repeatable:
            if chains and calls[0].follows == chains[-1][-1]:
                chains[-1].append(name)
            else:
                chains.append([name])
    changing = {id(weight) for weight in weights}
    return [part for chain in chains for part in _parted(model, layers, sample, chain, changing, recorded_calls)]


def _parted(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    sample: Samples,
    chain: list[str],
    changing: set[int],
    recorded_calls: Mapping[str, list[_Call]],
) -> list[list[str]]:
    """Splits a chain before each layer with an argument, besides hidden states, that depends on earlier layers."""
    if len(chain) == 1:
        return [chain]
    forms = {layers[name]: form for name in chain if (form := recorded_calls[name][0].form) is not None}
    running = [layers[name] for name in chain if layers[name] not in forms]
    changed = [weight for layer in running for weight in layer.parameters() if id(weight) in changing]
    with _half_negated(changed), left_out(forms):
        second_calls = recorded(model, layers, sample)
    parts = [chain[:1]]
    for name in chain[1:]:
        leaves, other_calls = recorded_calls[name][0].leaves, [call.leaves for call in second_calls[name]]
        if len(other_calls) == 1 and len(leaves) == len(other_calls[0]) and all(map(same, leaves, other_calls[0])):
            parts[-1].append(name)
        else:
            parts.append([name])
    return parts


@contextmanager
def _half_negated(weights: Iterable[Tensor]) -> Iterator[None]:
    """Inside the context, every second weight tensor is negated, which is undone exactly and needs no copy.

    Negating all would leave even functions of the weights unchanged, such as products of queries and keys.
    """
    negated = []
    try:
        for weight in list({id(weight): weight for weight in weights}.values())[::2]:
            weight.neg_()
            negated.append(weight)
        yield
    finally:
        for weight in negated:
            weight.neg_()


def left_out(forms: Mapping[nn.Module, Form]) -> AbstractContextManager[None]:
    """Inside the context, the layers of ``forms`` compute nothing and return zeros in the form of their outputs."""

    def replacement(layer: nn.Module) -> Callable[..., Any]:
        def forward(*positional: Any, **named: Any) -> Any:
            hidden = hidden_argument(positional, named)
            return forms[layer].of(hidden.new_zeros((hidden.shape[0], *forms[layer].shape)))

        return forward

    return replaced_forwards(forms, replacement)


def recorded(model: PreTrainedModel, layers: Mapping[str, nn.Module], samples: Samples) -> dict[str, list[_Call]]:
    """Runs the model on all samples in one batch, and returns the calls of each layer by its name.

    Of the hidden states that layers pass on to one another, only the latest stay in memory.
    """
    calls: dict[str, list[_Call]] = {name: [] for name in layers}
    open_calls: dict[str, _Call] = {}
    last: tuple[str, Tensor | None] = ("", None)  # name of the layer that ran last, and the hidden states it returned

    def before(name: str) -> Callable[..., None]:
        def hook(_layer: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            call = _call_of(positional, named, len(samples))
            follows = last[0] if call.hidden is not None and same(call.hidden, last[1]) else ""
            open_calls[name] = replace(call, hidden=None if follows else call.hidden, follows=follows)

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(_layer: nn.Module, _inputs: object, output: Any) -> None:
            nonlocal last
            call, hidden = open_calls.pop(name), _hidden_of(output)
            if isinstance(hidden, Tensor):
                last = (name, hidden.detach().clone())
                calls[name].append(replace(call, form=_form(output)))
            else:
                last = ("", None)
                calls[name].append(replace(call, repeatable=False))

        return hook

    starts = (layer.register_forward_pre_hook(before(name), with_kwargs=True) for name, layer in layers.items())
    ends = (layer.register_forward_hook(after(name)) for name, layer in layers.items())
    with hooked(starts), hooked(ends):
        last_hidden_state(model, samples)
    return calls


def _form(output: Any) -> Form | None:
    """Returns the form of an output; None if it has another tensor or object, such as a position bias."""
    leaves, structure = pytree.tree_flatten(output)
    hidden = _hidden_of(output)
    if not all(isinstance(leaf, PLAIN) for leaf in leaves) or sum(isinstance(leaf, Tensor) for leaf in leaves) > 1:
        return None
    other_leaves = [None if leaf is hidden else leaf for leaf in leaves]
    return Form(other_leaves, [leaf is hidden for leaf in leaves].index(True), structure, hidden.shape[1:])


def hidden_argument(positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return named.get("hidden_states", positional[0] if positional else None)


def _call_of(positional: tuple[Any, ...], named: dict[str, Any], sequences: int) -> _Call:
    hidden = hidden_argument(positional, named)
    other_kwargs = {**named, "hidden_states": None} if "hidden_states" in named else named
    other_args = positional if "hidden_states" in named else (None, *positional[1:])
    leaves, structure = pytree.tree_flatten((other_args, other_kwargs))
    takes_hidden = isinstance(hidden, Tensor) and hidden.ndim == 3 and hidden.shape[0] == sequences
    # A layer could add values for later layers to a list or dict.
    collections = any(isinstance(value, list | dict) for value in (*other_args, *other_kwargs.values()))
    repeatable = takes_hidden and not collections and all(isinstance(leaf, PLAIN) for leaf in leaves)
    return _Call(hidden.detach().clone() if takes_hidden else None, leaves, structure, repeatable)


def _hidden_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)


def _joinable(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == 1 for value in values)


def _joined(values: tuple[Any, ...]) -> Any:
    """Returns one argument of several sequences, joined along the first dimension unless it is the same for all."""
    return values[0] if all(value is values[0] for value in values) else torch.cat(values)


class LayerStream:
    """A model's longest chain of layers, with their arguments for every batch: each layer runs on all batches in turn.

    The model itself computes what comes before and after the chain, so that its outputs stay the same, bit for bit.

    Attributes:
        layers: the chain's layers, with one call per batch; empty if the model can only run as a whole, because it has
            no chain of two layers or more, or a layer of the chain returns more than a `Form` holds.
        hidden: hidden states of each batch, ``[sequences, tokens, hidden]``: what the first layer reads; after
            `forward`, what the last layer returns.
    """

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, layers: Mapping[str, nn.Module], batches: Sequence[Samples], store: Store
    ) -> None:
        self._model, self._store = model, store
        self.layers: list[LayerCalls] = []
        self.hidden: list[Tensor] = []
        self._forms: dict[nn.Module, Form] = {}
        chain = max(find_chains(model, layers, batches[0][:1], ()), key=len, default=[])
        if len(chain) < 2:
            return
        calls = {name: LayerCalls(layers[name], model.device) for name in chain}
        for batch in batches:
            hidden = record_calls(model, calls, batch)
            self._forms = {layer.layer: layer.form for layer in calls.values() if layer.form is not None}
            if len(self._forms) < len(chain):
                return
            self.hidden.append(self._kept(hidden))
        self.layers = list(calls.values())

    def _kept(self, hidden: Tensor) -> Tensor:
        return self._store.empty(hidden.shape, dtype=hidden.dtype).copy_(hidden)

    @torch.no_grad()
    def forward(self) -> None:
        """Runs each layer on all batches, one layer after another."""
        for layer in self.layers:
            for batch, hidden in enumerate(self.hidden):
                output = layer.run(hidden, [batch])
                if output.shape != hidden.shape or output.dtype != hidden.dtype:
                    self.hidden[batch] = self._kept(output)
                else:
                    hidden.copy_(output)

    @contextmanager
    def returning(self, hidden: Tensor) -> Iterator[None]:
        """Inside the context, the model computes no layer of the chain, and the last one returns ``hidden``."""
        last = self.layers[-1].layer

        def forward(*positional: Any, **named: Any) -> Any:
            return self._forms[last].of(hidden.to(self._model.device))

        with left_out(self._forms), replaced_forwards([last], lambda _: forward):
            yield

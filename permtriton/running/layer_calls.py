"""Running the layers of a model one by one, on arguments that were recorded when the model ran.

A chain is a sequence of layers, each of which takes the output of the layer before, and whose other arguments
(positions, masks) do not depend on their weights. Such layers run without the model, once these are recorded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from permtriton.util.store import MEMORY, Store

CallContext = Callable[[Tensor], AbstractContextManager[None]]  # numbers of sequences -> context of the call
PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class _Call:
    """One call of a layer.

    Attributes:
        hidden: its hidden states; None if the layer before returned the same, or if it takes none.
        leaves, structure: its other arguments, flattened by pytree.
        problem: why the call cannot be repeated; empty if it can.
        follows: name of the layer that ran before, if it returned these hidden states; else empty.
        form: form of its output; None if there is more in it than hidden states and plain values.
    """

    hidden: Tensor | None
    leaves: list[Any]
    structure: pytree.TreeSpec
    problem: str
    follows: str
    form: "Form | None" = None


@dataclass(frozen=True)
class Form:
    """How a layer returns hidden states, of ``shape`` per sequence: alone, or among values that are no tensors."""

    leaves: list[Any]  # the flat output, with None in place of the hidden states, which are ``at`` this position
    at: int
    structure: pytree.TreeSpec
    shape: torch.Size

    def of(self, hidden: Tensor) -> Any:
        return pytree.tree_unflatten([*self.leaves[: self.at], hidden, *self.leaves[self.at + 1 :]], self.structure)


def as_it_is(_of: object) -> AbstractContextManager[None]:
    """Returns a context that changes nothing; sequence numbers or the name of a layer, as its argument, are ignored."""
    return nullcontext()


class LayerCalls:
    """A layer and, per sequence, its arguments except hidden states; ``together``: whether one call runs several."""

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self._layer, self._device = layer, device
        self._leaves: list[list[Any]] = []  # per sequence; what is equal for all sequences is stored once
        self._structure: pytree.TreeSpec | None = None
        self.together = False

    def _add(self, call: _Call) -> None:
        first = self._leaves[0] if self._leaves else call.leaves
        self._structure = call.structure
        self._leaves.append([a if same(a, b) else b for a, b in zip(first, call.leaves, strict=True)])

    def __call__(self, hidden: Tensor, rows: Tensor, call_context: CallContext = as_it_is) -> Tensor:
        """Returns the layer's output ``[len(rows), tokens, hidden]`` for the sequences numbered ``rows``.

        Args:
            hidden: hidden states of these sequences, ``[len(rows), tokens, hidden]``, on any device.
            call_context: makes the context of each call from the numbers of the sequences that run in it.
        """
        assert self._structure is not None
        hidden, parts = hidden.to(self._device), [rows] if self.together else rows.split(1)
        outputs = []
        for states, part in zip(hidden.split(len(parts[0])), parts, strict=True):
            leaves = [self._leaves[row] for row in part.tolist()]
            with call_context(part):
                joined = [_joined(values) for values in zip(*leaves, strict=True)]
                outputs.append(run_layer(self._layer, states, joined, self._structure))
        return outputs[0] if self.together else torch.cat(outputs)

    @torch.no_grad()
    def try_together(self, hidden: Tensor) -> None:
        """Tests on two sequences whether several can run in one call: arguments were recorded for one at a time."""
        self.together = self._fits_together(hidden[:2], torch.arange(hidden[:2].shape[0]))

    def _fits_together(self, hidden: Tensor, rows: Tensor) -> bool:
        for values in zip(*self._leaves, strict=True):
            if any(value is not values[0] for value in values) and not _joinable(values):
                return False
        self.together = False
        expected = self(hidden, rows)
        self.together = True
        try:
            joint = self(hidden, rows)
        except (RuntimeError, ValueError, IndexError):  # shapes that hold for one sequence only
            return False
        return joint.shape == expected.shape and relative_difference(expected, joint) <= TOLERANCE[hidden.dtype]


def run_layer(layer: nn.Module, hidden: Tensor, leaves: list[Any], structure: pytree.TreeSpec) -> Tensor:
    """Calls a layer with recorded arguments but other hidden states, and returns the hidden states of its output."""
    positional, named = pytree.tree_unflatten(leaves, structure)
    if "hidden_states" in named:
        return _hidden_of(layer(*positional, **{**named, "hidden_states": hidden}))
    return _hidden_of(layer(hidden, *positional[1:], **named))


@torch.no_grad()
def record_chain(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], samples: Samples, store: Store = MEMORY
) -> tuple[dict[str, LayerCalls], Tensor]:
    """Returns the calls of a chain's layers for every sequence, and the hidden states that its first layer reads.

    The arguments of a chain's layers do not depend on their hidden states. So the layers run for the first sequence
    only: for the others, the model runs without them.

    Returns:
        Name -> calls, in execution order, and hidden states ``[sequences, tokens, hidden]`` in ``store``.
    """
    calls = {name: LayerCalls(layer, model.device) for name, layer in layers.items()}
    start, hidden = next(iter(layers)), torch.empty(0)
    recorded_calls = recorded(model, layers, samples[:1])
    forms = {layers[name]: call.form for name, (call,) in recorded_calls.items() if call.form is not None}
    for number, row in enumerate(samples.split(1)):
        if number:
            with left_out(forms):
                recorded_calls = recorded(model, layers, row)
        first = recorded_calls[start][0].hidden
        assert first is not None
        if not number:
            hidden = store.empty((len(samples), *first.shape[1:]), dtype=first.dtype)
        hidden[number] = first[0]
        for name, (call,) in recorded_calls.items():
            calls[name]._add(call)
    return calls, hidden


@torch.no_grad()
def find_chains(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    sample: Samples,
    weights: Iterable[Tensor],
) -> tuple[list[list[str]], dict[str, str]]:
    """Returns the chains, as names of layers, and name -> why a layer cannot run without the model.

    Args:
        sample: one sample to run the model on.
        weights: the weights that change, or are run with two sets of values, while chains run. A chain ends before a
            layer if an argument of it, other than hidden states, depends on such weights in the chain. The argument may
            depend on other weights, which are final when the chain starts: a decoder reads the encoder's output.
    """
    recorded_calls = recorded(model, layers, sample)
    chains: list[list[str]] = []
    problems: dict[str, str] = {}
    previous = ""
    for name, calls in recorded_calls.items():
        if len(calls) != 1 or calls[0].problem:
            problems[name] = calls[0].problem if len(calls) == 1 else f"runs {len(calls)} times in a forward pass"
        elif previous and calls[0].follows == previous:
            chains[-1].append(name)
        else:
            chains.append([name])
        previous = "" if name in problems else name
    changing = {id(weight) for weight in weights}
    parts = [part for chain in chains for part in _parted(model, layers, sample, chain, changing, recorded_calls)]
    return parts, problems


def _parted(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    sample: Samples,
    chain: list[str],
    changing: set[int],
    recorded_calls: Mapping[str, list[_Call]],
) -> list[list[str]]:
    """Returns the parts of a chain inside which no layer's arguments depend on what the layers before it compute."""
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
    """Inside the context, layers compute nothing and return zeros in the form of their outputs."""

    def replacement(layer: nn.Module) -> Callable[..., Any]:
        def forward(*positional: Any, **named: Any) -> Any:
            hidden = hidden_argument(positional, named)
            return forms[layer].of(hidden.new_zeros((hidden.shape[0], *forms[layer].shape)))

        return forward

    return replaced_forwards(forms, replacement)


def recorded(model: PreTrainedModel, layers: Mapping[str, nn.Module], samples: Samples) -> dict[str, list[_Call]]:
    """Runs the model on all samples in one batch, and returns the calls of each layer by its name."""
    calls: dict[str, list[_Call]] = {name: [] for name in layers}
    with _hooked(layers, calls, len(samples)):
        last_hidden_state(model, samples)
    return calls


@contextmanager
def _hooked(layers: Mapping[str, nn.Module], calls: dict[str, list[_Call]], sequences: int) -> Iterator[None]:
    """Inside the context, records calls. Of the hidden states between layers, only the last ones stay in memory."""
    open_calls: dict[str, _Call] = {}
    last: tuple[str, Tensor | None] = ("", None)

    def before(name: str) -> Callable[..., None]:
        def hook(_layer: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden, leaves, structure, problem = _taken_apart(positional, named, sequences)
            follows = last[0] if hidden is not None and same(hidden, last[1]) else ""
            open_calls[name] = _Call(None if follows else hidden, leaves, structure, problem, follows)

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
                calls[name].append(replace(call, problem=f"returns a {type(hidden).__name__} before its hidden states"))

        return hook

    starts = (layer.register_forward_pre_hook(before(name), with_kwargs=True) for name, layer in layers.items())
    ends = (layer.register_forward_hook(after(name)) for name, layer in layers.items())
    with hooked(starts), hooked(ends):
        yield


def _form(output: Any) -> Form | None:
    """Returns the form of an output; None if it has more, such as a position bias, which the next layer may take."""
    leaves, structure = pytree.tree_flatten(output)
    hidden = _hidden_of(output)
    if not all(isinstance(leaf, PLAIN) for leaf in leaves) or sum(isinstance(leaf, Tensor) for leaf in leaves) > 1:
        return None
    other_leaves = [None if leaf is hidden else leaf for leaf in leaves]
    return Form(other_leaves, [leaf is hidden for leaf in leaves].index(True), structure, hidden.shape[1:])


def hidden_argument(positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return named.get("hidden_states", positional[0] if positional else None)


def _taken_apart(
    positional: tuple[Any, ...], named: dict[str, Any], sequences: int
) -> tuple[Tensor | None, list[Any], pytree.TreeSpec, str]:
    """Returns a call's hidden states, its other arguments, their structure, and why it cannot be repeated, or ""."""
    hidden = hidden_argument(positional, named)
    other_kwargs = {**named, "hidden_states": None} if "hidden_states" in named else named
    other_args = positional if "hidden_states" in named else (None, *positional[1:])
    leaves, structure = pytree.tree_flatten((other_args, other_kwargs))
    problem = ""
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[0] != sequences:
        problem, hidden = "does not take hidden states [sequences, tokens, hidden]", None
    for value in (*other_args, *other_kwargs.values()):
        if isinstance(value, list | dict):  # layers could pass values on in it
            problem = f"takes a {type(value).__name__}"
    for leaf in leaves:
        if not isinstance(leaf, PLAIN):
            problem = f"takes a {type(leaf).__name__}"
    return None if hidden is None else hidden.detach().clone(), leaves, structure, problem


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

"""Running the layers of a model one by one, on arguments that were recorded when the model ran.

A chain is a sequence of layers: each takes the output of the layer before it, and no other argument (positions, masks)
depends on the layers' weights. Once these other arguments are recorded, the layers run without the model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
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
from permtriton.util import ranks

PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


@dataclass(frozen=True, eq=False)
class Frame:
    """What surrounds the hidden states in a layer's arguments or in its output, flattened by pytree."""

    leaves: list[Any]  # the values, with None for the hidden states
    at: int  # position of the hidden states among the leaves
    structure: pytree.TreeSpec
    shape: torch.Size  # of the hidden states of one sequence

    @classmethod
    def around(cls, hidden: Tensor, values: Any, types: tuple[type, ...]) -> "Frame | None":
        """Returns the frame of hidden states among ``values``; None if another value has none of the ``types``.

        It is None, too, if pytree does not see the hidden states, because a class that it does not know holds them.
        """
        leaves, structure = pytree.tree_flatten(values)
        at = next((number for number, leaf in enumerate(leaves) if leaf is hidden), None)
        if at is None:
            return None
        leaves[at] = None
        return cls(leaves, at, structure, hidden.shape[1:]) if all(isinstance(leaf, types) for leaf in leaves) else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frame) or len(other.leaves) != len(self.leaves):
            return False
        return all(map(same, self.leaves, other.leaves))

    def filled(self, hidden: Tensor) -> Any:
        return pytree.tree_unflatten([*self.leaves[: self.at], hidden, *self.leaves[self.at + 1 :]], self.structure)


@dataclass(frozen=True)
class _Call:
    hidden: Tensor | None  # hidden states that the layer read; None if it read none, or the layer before returned them
    arguments: Frame | None  # None if the layer cannot run without the model on these and other hidden states
    follows: str  # name of the layer that ran before, if that layer returned the hidden states; else empty
    form: Frame | None  # form of the output; None if the output holds more than hidden states and plain values


class LayerCalls:
    """A layer, and its recorded calls, numbered from 0: their arguments except hidden states.

    Attributes:
        form: form of the last recorded output, as in `_Call`; None before the first call.
        together: whether calls that were recorded on one sequence each can run as one call on several sequences.
    """

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self.layer, self._device = layer, device
        self.form: Frame | None = None
        self.together = False
        self._arguments: list[Frame] = []  # per call; a value that equals the first call's value is stored once

    def add(self, call: _Call) -> None:
        assert call.arguments is not None
        first = self._arguments[0] if self._arguments else call.arguments
        leaves = [a if same(a, b) else b for a, b in zip(first.leaves, call.arguments.leaves, strict=True)]
        self.form = call.form
        self._arguments.append(replace(call.arguments, leaves=leaves))

    def __call__(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Returns the output for the sequences ``rows``; it and ``hidden`` are ``[len(rows), tokens, hidden]``."""
        if self.together:
            return self.run(hidden, rows.tolist())
        return torch.cat([self.run(states, [row]) for states, row in zip(hidden.split(1), rows.tolist(), strict=True)])

    def run(self, hidden: Tensor, numbers: list[int]) -> Tensor:
        """Returns the output for ``hidden``, on any device, with the joined arguments of the calls ``numbers``."""
        frames = [self._arguments[number] for number in numbers]
        leaves = [_joined(values) for values in zip(*(frame.leaves for frame in frames), strict=True)]
        positional, named = replace(frames[0], leaves=leaves).filled(hidden.to(self._device))
        return _hidden_of(self.layer(*positional, **named))

    @torch.no_grad()
    def try_together(self, hidden: Tensor) -> None:
        """Sets ``together``: every rank tests whether two of its sequences can run in one call."""
        self.together = False
        self.together = all(ranks.gather(self._runs_together(hidden[:2], torch.arange(len(hidden[:2])))))

    def _runs_together(self, hidden: Tensor, rows: Tensor) -> bool:
        arguments = list(zip(*(frame.leaves for frame in self._arguments), strict=True))
        if not all(_joinable(values) for values in arguments if any(value is not values[0] for value in values)):
            return False
        expected = self(hidden, rows)
        try:
            joint = self.run(hidden, rows.tolist())
        except (RuntimeError, ValueError, IndexError):  # shapes that hold for one sequence only
            return False
        return joint.shape == expected.shape and relative_difference(expected, joint) <= TOLERANCE[hidden.dtype]


@torch.no_grad()
def record_calls(model: PreTrainedModel, calls: Mapping[str, LayerCalls], batch: Samples) -> Tensor:
    """Runs the model on one batch and adds each layer's call to ``calls``; returns the input of the first layer.

    Other arguments of a chain's layers do not depend on hidden states. From the second batch on, layers whose form of
    output is known therefore compute nothing.

    Args:
        calls: the chain's layers by name, in execution order.
    """
    layers = {name: layer_calls.layer for name, layer_calls in calls.items()}
    with left_out({layer_calls.layer: layer_calls.form for layer_calls in calls.values()}):
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
            that takes an argument, other than hidden states, which depends on such weights of the chain's earlier
            layers. Other weights are final by then, and may decide an argument: a decoder reads the encoder's output.
    """
    recorded_calls = recorded(model, layers, sample)
    passing: list[list[str]] = []  # layers that pass hidden states on to one another
    for name, calls in recorded_calls.items():
        if len(calls) == 1 and calls[0].arguments is not None:
            if passing and calls[0].follows == passing[-1][-1]:
                passing[-1].append(name)
            else:
                passing.append([name])
    changing, chains = {id(weight) for weight in weights}, list[list[str]]()
    for names in passing:
        chains.append(names[:1])
        if len(names) == 1:
            continue
        forms = {layers[name]: recorded_calls[name][0].form for name in names}
        running = [layer for layer, form in forms.items() if form is None]
        changed = [weight for layer in running for weight in layer.parameters() if id(weight) in changing]
        with _half_negated(changed), left_out(forms):
            second_calls = recorded(model, layers, sample)
        for name in names[1:]:
            (first,), again = recorded_calls[name], second_calls[name]
            if len(again) == 1 and first.arguments == again[0].arguments:
                chains[-1].append(name)
            else:
                chains.append([name])
    return chains


@contextmanager
def _half_negated(weights: Iterable[Tensor]) -> Iterator[None]:
    """Inside the context, every second weight is negated: this needs no copy, and is undone exactly at the end.

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


def left_out(forms: Mapping[nn.Module, Frame | None]) -> AbstractContextManager[None]:
    """Inside the context, layers whose form of output is not None compute nothing, and return zeros in this form."""
    known = {layer: form for layer, form in forms.items() if form is not None}

    def replacement(layer: nn.Module) -> Callable[..., Any]:
        form = known[layer]

        def forward(*positional: Any, **named: Any) -> Any:
            hidden = hidden_argument(positional, named)
            return form.filled(hidden.new_zeros((hidden.shape[0], *form.shape)))

        return forward

    return replaced_forwards(known, replacement)


def recorded(model: PreTrainedModel, layers: Mapping[str, nn.Module], samples: Samples) -> dict[str, list[_Call]]:
    """Runs the model on all samples in one batch, and returns the calls of each layer by its name.

    Of the hidden states that layers pass on to one another, only the latest stay in memory.
    """
    calls: dict[str, list[_Call]] = {name: [] for name in layers}
    names = {layer: name for name, layer in layers.items()}
    last: tuple[str, Tensor | None] = ("", None)  # name of the layer that ran last, and the hidden states it returned

    def recording(layer: nn.Module) -> Callable[..., Any]:
        compute, name = layer.forward, names[layer]

        def forward(*positional: Any, **named: Any) -> Any:
            nonlocal last
            hidden, arguments = hidden_argument(positional, named), None
            takes_hidden = isinstance(hidden, Tensor) and hidden.ndim == 3 and hidden.shape[0] == len(samples)
            # A layer could add values for later layers to a list or dict.
            if takes_hidden and not any(isinstance(value, list | dict) for value in (*positional, *named.values())):
                arguments = Frame.around(hidden, (positional, named), (Tensor, *PLAIN))
            follows = last[0] if takes_hidden and same(hidden, last[1]) else ""
            start = hidden.detach().clone() if takes_hidden and not follows else None
            output = compute(*positional, **named)
            returned, form = _hidden_of(output), None
            if isinstance(returned, Tensor):
                last, form = (name, returned.detach().clone()), Frame.around(returned, output, PLAIN)
            else:
                last, arguments = ("", None), None
            calls[name].append(_Call(start, arguments, follows, form))
            return output

        return forward

    with replaced_forwards(layers.values(), recording):
        last_hidden_state(model, samples)
    return calls


def hidden_argument(positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return named.get("hidden_states", positional[0] if positional else None)


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

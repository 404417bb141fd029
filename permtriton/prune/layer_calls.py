"""Running the layers of a model one by one, on arguments that were recorded when the model ran.

A chain is a run of layers of which each takes the output of the one before, and whose other arguments (positions,
masks) do not depend on weights. Inside a chain, layers run without the model; where one starts, the model runs once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from permtriton.micro_batch import MicroBatch
from permtriton.model.checks import TOLERANCE, relative_difference
from permtriton.model.forward import last_hidden_state

PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class _Call:
    """One call of a layer: its hidden states, its other arguments, and the hidden states that it returned."""

    hidden: Tensor | None
    leaves: list[Any]
    structure: pytree.TreeSpec
    problem: str
    output: Tensor


class LayerCalls:
    """A layer with its arguments, apart from hidden states, for every sequence.

    Args:
        layer: the layer.

    Attributes:
        together: whether several sequences run in one call.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._leaves: list[list[Any]] = []  # per sequence; what is equal for all sequences is stored once
        self._structure: pytree.TreeSpec | None = None
        self.together = False

    def _add(self, call: _Call) -> None:
        first = self._leaves[0] if self._leaves else call.leaves
        self._structure = call.structure
        self._leaves.append(
            [one if _same(one, other) else other for one, other in zip(first, call.leaves, strict=True)]
        )

    def __call__(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Returns the layer's output ``[len(rows), tokens, hidden]``.

        Args:
            hidden: the hidden states of some sequences, ``[len(rows), tokens, hidden]``, on any device.
            rows: numbers of the sequences, int64 ``[...]``.
        """
        leaves = [self._leaves[row] for row in rows.tolist()]
        hidden = hidden.to(next(self._layer.parameters()).device)
        if self.together:
            return self._run(hidden, [_joined(values) for values in zip(*leaves, strict=True)])
        return torch.cat([self._run(one, own) for one, own in zip(hidden.split(1), leaves, strict=True)])

    def _run(self, hidden: Tensor, leaves: list[Any]) -> Tensor:
        assert self._structure is not None
        positional, named = pytree.tree_unflatten(leaves, self._structure)
        if "hidden_states" in named:
            return _hidden_of(self._layer(*positional, **{**named, "hidden_states": hidden}))
        return _hidden_of(self._layer(hidden, *positional[1:], **named))

    @torch.no_grad()
    def run(self, hidden: Tensor, batch: int) -> Tensor:
        """Returns the output for all sequences, on the CPU.

        Args:
            hidden: the hidden states of all sequences, ``[sequences, tokens, hidden]``.
            batch: sequences per call.
        """
        rows = torch.arange(hidden.shape[0])
        return MicroBatch(batch).run(
            lambda size: torch.cat([self(hidden[part], part).cpu() for part in rows.split(size)])
        )

    @torch.no_grad()
    def try_together(self, hidden: Tensor) -> None:
        """Decides whether sequences run together: arguments were recorded from sequences one at a time.

        Args:
            hidden: the hidden states of all sequences, of which the first two are tried, both ways.
        """
        self.together = self._fits_together(hidden[:2], torch.arange(hidden[:2].shape[0]))

    def _fits_together(self, hidden: Tensor, rows: Tensor) -> bool:
        for values in zip(*self._leaves, strict=True):
            if any(value is not values[0] for value in values) and not _joinable(values):
                return False
        self.together = False
        expected = self(hidden, rows)
        self.together = True
        try:
            found = self(hidden, rows)
        except (RuntimeError, ValueError, IndexError):  # shapes that hold for one sequence only
            return False
        return found.shape == expected.shape and relative_difference(expected, found) <= TOLERANCE[hidden.dtype]


@torch.no_grad()
def record_chain(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], ids: Tensor
) -> tuple[dict[str, LayerCalls], Tensor]:
    """Runs the model on every sequence and returns the calls of a chain's layers, and what its first layer reads.

    Args:
        model: model to run.
        layers: name -> layer, for the layers of a chain, in execution order.
        ids: int64 ``[sequences, tokens]``.

    Returns:
        Name -> calls, and hidden states ``[sequences, tokens, hidden]`` on the CPU.
    """
    calls = {name: LayerCalls(layer) for name, layer in layers.items()}
    hidden = []
    for row in ids.split(1):
        found = _recorded(model, layers, row)
        for name, (call,) in found.items():
            calls[name]._add(call)
        first = found[next(iter(layers))][0].hidden
        assert first is not None
        hidden.append(first.cpu())
    return calls, torch.cat(hidden)


@torch.no_grad()
def find_chains(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    ids: Tensor,
    weights: Iterable[Tensor],
) -> tuple[list[list[str]], dict[str, str]]:
    """Returns the chains, as names of layers, and name -> why a layer cannot run without the model.

    Args:
        model: the model.
        layers: name -> layer, in execution order.
        ids: a sequence to try, int64 ``[1, tokens]``.
        weights: the weights that will change, or have two values: an argument that depends on them ends a chain.
    """
    found = _recorded(model, layers, ids)
    with _half_negated(weights):
        others = _recorded(model, layers, ids)
    chains: list[list[str]] = []
    problems: dict[str, str] = {}
    previous = ""
    for name, calls in found.items():
        if len(calls) != 1 or calls[0].problem:
            problems[name] = calls[0].problem if len(calls) == 1 else f"runs {len(calls)} times in a forward pass"
        elif previous and _follows(found[previous][0], calls[0]) and _independent(calls[0], others[name][0]):
            chains[-1].append(name)
        else:
            chains.append([name])
        previous = "" if name in problems else name
    return chains, problems


@contextmanager
def _half_negated(weights: Iterable[Tensor]) -> Iterator[None]:
    """Inside the context, every other weight has the other sign, which is undone exactly and needs no copy.

    Not all of them: what is even in the weights, such as products of queries and keys, would not change.
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


def _follows(previous: _Call, call: _Call) -> bool:
    return (
        call.hidden is not None and call.hidden.shape == previous.output.shape and _same(call.hidden, previous.output)
    )


def _independent(call: _Call, other: _Call) -> bool:
    return len(call.leaves) == len(other.leaves) and all(map(_same, call.leaves, other.leaves))


def _recorded(model: PreTrainedModel, layers: Mapping[str, nn.Module], ids: Tensor) -> dict[str, list[_Call]]:
    calls: dict[str, list[_Call]] = {name: [] for name in layers}
    with _hooked(layers, calls):
        last_hidden_state(model, ids)
    return calls


@contextmanager
def _hooked(layers: Mapping[str, nn.Module], calls: dict[str, list[_Call]]) -> Iterator[None]:
    inputs: dict[str, tuple[Tensor | None, list[Any], pytree.TreeSpec, str]] = {}

    def before(name: str) -> Callable[..., None]:
        def hook(_layer: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            inputs[name] = _taken_apart(positional, named)

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(_layer: nn.Module, _inputs: object, output: Any) -> None:
            calls[name].append(_Call(*inputs.pop(name), _hidden_of(output).detach().clone()))

        return hook

    handles = []
    try:
        for name, layer in layers.items():
            handles.append(layer.register_forward_pre_hook(before(name), with_kwargs=True))
            handles.append(layer.register_forward_hook(after(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _taken_apart(
    positional: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Tensor | None, list[Any], pytree.TreeSpec, str]:
    """Returns a call's hidden states, its other arguments, their structure, and why it cannot be repeated, if so."""
    hidden = named.get("hidden_states", positional[0] if positional else None)
    rest_named = {**named, "hidden_states": None} if "hidden_states" in named else named
    rest = positional if "hidden_states" in named else (None, *positional[1:])
    leaves, structure = pytree.tree_flatten((rest, rest_named))
    problem = ""
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[0] != 1:
        problem, hidden = "does not take hidden states [sequences, tokens, hidden]", None
    for value in (*rest, *rest_named.values()):
        if isinstance(value, list | dict):  # layers could hand on values in it
            problem = f"takes a {type(value).__name__}"
    for leaf in leaves:
        if not isinstance(leaf, PLAIN):
            problem = f"takes a {type(leaf).__name__}"
    return None if hidden is None else hidden.detach().clone(), leaves, structure, problem


def _hidden_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)


def _joinable(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == 1 for value in values)


def _joined(values: tuple[Any, ...]) -> Any:
    """Returns one argument of several sequences, joined along the first dimension unless it is the same for all."""
    return values[0] if all(value is values[0] for value in values) else torch.cat(values)

"""Modules that hold each expert's weights as ``nn.Linear``s, in place of modules that hold them stacked.

transformers stacks experts in three ways: a module that sends tokens to its experts, a module whose input is divided
among its experts already, and a module of one linear per expert, whose input rows are sorted by expert. `FORMS` tells
these apart by the arguments of ``forward``.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

GATED, PLAIN, SECOND = "gate_up_proj", "up_proj", "down_proj"  # first weight with a gate, first without; second
SINGLE = "weight"  # of a module that holds one linear per expert
MARKS = ("has_gate", "has_bias", "is_transposed")  # what transformers' decorator sets on a class of experts
PROBE_TOKENS, PROBE_TOP_K, PROBE_LARGEST = 8, 2, 30.0  # inputs so large that a clamp in the activation shows


class UnstackedExperts(nn.ModuleList):
    """Experts as ``nn.Linear``s named ``<expert>.<projection>``; ``forward`` has the original module's arguments.

    Args:
        stacked: original module. The storage of its parameters is shared, not copied.
    """

    def __init__(self, stacked: nn.Module) -> None:
        self.projections = projections(stacked)
        self.is_transposed = is_transposed(stacked)
        super().__init__(
            nn.ModuleDict({name: _linear(stacked, name, number, self.is_transposed) for name in self.projections})
            for number in range(stacked.get_parameter(self.projections[0]).shape[0])
        )
        self._stacked: tuple[Any] = (stacked,)  # in a tuple, so that it does not become a submodule
        self.train(stacked.training)

    def linear(self, number: int, projection: str) -> nn.Linear:
        linear: nn.Linear = self.get_submodule(f"{number}.{projection}")  # type: ignore[assignment]
        return linear

    def probe(self, generator: torch.Generator) -> tuple[Any, ...]:
        """Returns random arguments of ``forward`` for a few tokens, to compare this module with the original one."""
        raise NotImplementedError

    def restacked(self) -> nn.Module:
        """Returns the original module with the linears' present weights, which stay in the linears, too."""
        (stacked,) = self._stacked
        for name in self.projections:
            linears = [self.linear(number, name) for number in range(len(self))]
            weights = [linear.weight.detach() for linear in linears]
            stacked.get_parameter(name).data = _stack([w.t() for w in weights] if self.is_transposed else weights)
            if linears[0].bias is not None:
                stacked.get_parameter(bias_of(name)).data = _stack([linear.bias.detach() for linear in linears])
        return stacked.train(self.training)

    def _expert(self, number: int, hidden_states: Tensor) -> Tensor:
        """Applies an expert's linears and, between them, the original's activation, which may gate, clamp or scale."""
        (stacked,), (first, second) = self._stacked, self.projections
        states = self.linear(number, first)(hidden_states)
        if first == PLAIN:
            states = stacked.act_fn(states)
        elif hasattr(stacked, "_apply_gate"):
            states = stacked._apply_gate(states)
        else:
            gate, up = states.chunk(2, dim=-1)
            states = stacked.act_fn(gate) * up
        return self.linear(number, second)(states)

    def _random_tokens(self, count: int, generator: torch.Generator) -> Tensor:
        weight = self.linear(0, self.projections[0]).weight
        sizes = torch.linspace(PROBE_LARGEST / count, PROBE_LARGEST, count).unsqueeze(1)
        return (torch.randn(count, weight.shape[1], generator=generator) * sizes).to(weight)


class RoutedExperts(UnstackedExperts):
    """Experts to which a router sends tokens. Each has linears ``gate_up_proj`` (or ``up_proj``) and ``down_proj``.

    Attributes:
        measuring: whether statistics are being taken.
        all_measured: whether every expert runs on every token while ``measuring``; this does not change the result.
        sent: number of tokens sent to each expert while ``measuring``, and at the end the number of all tokens, int64
            ``[experts + 1]``; None before the first measurement.
    """

    measuring = all_measured = False
    sent: Tensor | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns each token's sum of its experts' outputs, times their routing weights, ``[tokens, hidden]``.

        Args:
            top_k_index: experts of each token, int64 ``[tokens, k]``; experts outside this module are ignored.
        """
        if torch.compiler.is_compiling():
            return self._dense(hidden_states, top_k_index, top_k_weights)
        if self.measuring:
            self._count(top_k_index)
        every_token = self.measuring and self.all_measured
        result = torch.zeros_like(hidden_states)
        for number in range(len(self)) if every_token else torch.unique(top_k_index).tolist():
            if 0 <= number < len(self):
                tokens, positions = torch.where(top_k_index == number)
                if every_token:
                    outputs = self._expert(number, hidden_states)[tokens]
                else:
                    outputs = self._expert(number, hidden_states[tokens])
                weighted = outputs * top_k_weights[tokens, positions, None]
                result.index_add_(0, tokens, weighted.to(result.dtype))
        return result

    def _count(self, top_k_index: Tensor) -> None:
        chosen = top_k_index[(top_k_index >= 0) & (top_k_index < len(self))]
        count = torch.cat([chosen.bincount(minlength=len(self)), chosen.new_tensor([top_k_index.shape[0]])])
        self.sent = count if self.sent is None else self.sent + count

    def _dense(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs every expert on every token, so that no shape depends on the routing and all linears read one tensor."""
        chosen = top_k_index.unsqueeze(-1) == torch.arange(len(self), device=top_k_index.device)
        weights = (chosen * top_k_weights.unsqueeze(-1)).sum(1).t().unsqueeze(-1).unbind(0)
        parts = [self._expert(number, hidden_states) * weight for number, weight in enumerate(weights)]
        return sum(parts[1:], parts[0]).to(hidden_states.dtype)

    def probe(self, generator: torch.Generator) -> tuple[Any, ...]:
        tokens = self._random_tokens(PROBE_TOKENS, generator)
        scores = torch.rand(PROBE_TOKENS, len(self), generator=generator)
        weights, index = scores.topk(min(PROBE_TOP_K, len(self)))
        return tokens, index.to(tokens.device), weights.to(tokens)


class BatchedExperts(UnstackedExperts):
    """Experts whose input has a part for each of them: all tokens, times their routing weights for this expert."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns each expert's output for its part, in the shape of the input, ``[experts * tokens, hidden]``."""
        parts = hidden_states.view(len(self), -1, hidden_states.shape[-1]).unbind(0)
        return torch.cat([self._expert(number, part) for number, part in enumerate(parts)])

    def probe(self, generator: torch.Generator) -> tuple[Any, ...]:
        return (self._random_tokens(PROBE_TOKENS * len(self), generator),)


class SortedLinears(UnstackedExperts):
    """One linear per expert, named ``weight``, on rows that are sorted by expert."""

    def forward(self, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
        """Returns each row times the weight of its expert, ``[rows, out]``.

        Args:
            inputs: ``[rows, in]``: those of expert 0, then those of expert 1, and so on.
            expert_size: number of rows of each expert.
        """
        if torch.compiler.is_compiling():
            return self._dense(inputs, expert_size)
        parts = inputs.split(list(expert_size))
        return torch.cat([self.linear(number, SINGLE)(part) for number, part in enumerate(parts)])

    def _dense(self, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
        """Runs every expert on all rows, with other experts' rows set to 0, so that no shape depends on the routing."""
        positions = torch.arange(inputs.shape[0], device=inputs.device).unsqueeze(-1)
        results, start = [], 0
        for number, size in enumerate(expert_size):
            of_expert = (positions >= start) & (positions < start + size)
            results.append(self.linear(number, SINGLE)(inputs * of_expert))
            start = start + size
        return sum(results[1:], results[0])

    def probe(self, generator: torch.Generator) -> tuple[Any, ...]:
        sizes = list(range(1, len(self) + 1))
        return self._random_tokens(sum(sizes), generator), sizes


# names of the arguments of ``forward`` -> the class that replaces a module with them
FORMS: dict[tuple[str, ...], type[UnstackedExperts]] = {
    ("hidden_states", "top_k_index", "top_k_weights"): RoutedExperts,
    ("hidden_states", "router_indices", "routing_weights"): RoutedExperts,
    ("hidden_states",): BatchedExperts,
    ("inputs", "expert_size"): SortedLinears,
}


def stacks(module: nn.Module) -> list[str]:
    """Returns the names of a module's stacks of experts.

    They are its 3-D parameters if transformers' decorator marks its class as experts, if two of them have the usual
    names, or if the only one is ``weight`` and ``forward`` takes rows that are sorted by expert. The 3-D parameters of
    other modules, such as recurrent gates and convolutions, are not experts.
    """
    names = [key for key, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
    usual = SECOND in names and (GATED in names or PLAIN in names)
    single = names == [SINGLE] and FORMS.get(arguments_of(module)) is SortedLinears
    return names if usual or single or any(hasattr(module, mark) for mark in MARKS) else []


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def input_dim(model: nn.Module, parameter: str) -> int:
    """Returns which dimension of a weight is its input: the last one, unless the weight is stored transposed."""
    owner = model.get_submodule(parameter.rpartition(".")[0])
    if isinstance(owner, UnstackedExperts) or stacks(owner):
        return 1 if is_transposed(owner) else 2
    return 0 if isinstance(owner, Conv1D) else model.get_parameter(parameter).ndim - 1


def projections(stacked: nn.Module) -> tuple[str, ...]:
    """Returns the names of the stacked weights in a module of experts, in the order in which they are multiplied."""
    if not hasattr(stacked, SECOND):
        return (SINGLE,)
    return (PLAIN if hasattr(stacked, PLAIN) else GATED), SECOND


def bias_of(projection: str) -> str:
    return f"{projection}_bias"


def is_transposed(experts: nn.Module) -> bool:
    """Whether (un)stacked weights are ``[experts, in, out]``: by an attribute of their module, else by their shapes."""
    marked = getattr(experts, "is_transposed", None)
    if marked is not None or not hasattr(experts, SECOND):
        return bool(marked)
    return not fits(experts, transposed=False) and fits(experts, transposed=True)


def fits(stacked: nn.Module, transposed: bool) -> bool:
    """Whether the weights are ``[experts, 2I, hidden]`` (``I`` without a gate) and ``[experts, hidden, I]``.

    With ``transposed``, the last two dimensions of both weights are exchanged.
    """
    names = projections(stacked)
    first, second = (stacked.get_parameter(name).mT if transposed else stacked.get_parameter(name) for name in names)
    hidden, width = second.shape[-2:]
    return first.shape == (len(second), 2 * width if names[0] == GATED else width, hidden)


def release(module: nn.Module) -> None:
    """Frees the storage of a module's parameters."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)


def _linear(stacked: nn.Module, name: str, number: int, transposed: bool) -> nn.Linear:
    weights = stacked.get_parameter(name)
    biases = getattr(stacked, bias_of(name), None)
    weight = weights.data[number].t() if transposed else weights.data[number]
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=biases is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=weights.requires_grad)
    if biases is not None:
        linear.bias = nn.Parameter(biases.data[number], requires_grad=biases.requires_grad)
    return linear


def _stack(weights: list[Tensor]) -> Tensor:
    first, size = weights[0], weights[0].numel()
    in_place = all(
        weight.is_contiguous()
        and weight.untyped_storage()._cdata == first.untyped_storage()._cdata
        and weight.storage_offset() == first.storage_offset() + number * size
        for number, weight in enumerate(weights)
    )
    if in_place:
        return first.as_strided((len(weights), *first.shape), (size, *first.stride()), first.storage_offset())
    return torch.stack(weights)

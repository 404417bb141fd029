"""Mixture-of-experts as linears.

transformers keeps all experts of a layer in two parameters, ``gate_up_proj [E, 2I, H]`` (``up_proj [E, I, H]`` without
a gate) and ``down_proj [E, H, I]``, in some classes transposed, and their biases in two more.
`unstack_experts` replaces their module by one that holds the same storage as two ``nn.Linear`` per expert, so that
tracing, hooks, masks and folding treat experts as any other linears. `restack_experts` puts the original module back,
with the present weights of the linears. Stacked experts are recognised by their structure, and the replacement is
checked by its outputs.
"""

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from permtriton.model.checks import TOLERANCE

FIRST, SECOND = ("gate_up_proj", "up_proj"), "down_proj"  # the first is one of two
ARGUMENTS = (["hidden_states", "top_k_index", "top_k_weights"], ["hidden_states", "router_indices", "routing_weights"])
# Attributes that transformers' decorator gives to classes of experts: the only supported value, and the meaning of any
# other. A class without the decorator is taken to have the supported values.
MARKS = ("has_gate", "has_bias", "is_transposed")  # what transformers' decorator sets on a class of experts
SUPPORTED = {"has_post_expert_norm": (False, "it has a norm after each expert")}
PROBE_TOKENS, PROBE_TOP_K, PROBE_LARGEST = 8, 2, 30.0  # inputs so large that a clamped activation shows


@dataclass(frozen=True)
class Unstacked:
    """The result of `unstack_experts`.

    Attributes:
        names: names of the modules that were replaced.
        refused: name of a stacked parameter that stays stacked, and therefore dense -> why.
    """

    names: tuple[str, ...]
    refused: dict[str, str]


class UnstackedExperts(nn.ModuleList):
    """Experts as ``nn.Linear``s named ``<expert>.gate_up_proj`` (or ``up_proj``) and ``<expert>.down_proj``.

    Takes the same arguments as the original module.

    Args:
        stacked: original module. The storage of its parameters is shared, not copied.
    """

    def __init__(self, stacked: nn.Module) -> None:
        self.projections = _projections(stacked)
        self.transposed = bool(getattr(stacked, "is_transposed", False))
        super().__init__(
            nn.ModuleDict({name: _linear(stacked, name, number, self.transposed) for name in self.projections})
            for number in range(stacked.get_parameter(SECOND).shape[0])
        )
        self._stacked: tuple[Any] = (stacked,)  # in a tuple, so that it does not become a submodule
        self.train(stacked.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the weighted sum of each token's experts, ``[tokens, hidden]``.

        Args:
            hidden_states: ``[tokens, hidden]``.
            top_k_index: experts of each token, int64 ``[tokens, k]``; numbers that are not this module's are ignored.
            top_k_weights: weights of these experts, ``[tokens, k]``.
        """
        if torch.compiler.is_compiling():
            return self._dense(hidden_states, top_k_index, top_k_weights)
        result = torch.zeros_like(hidden_states)
        for number in torch.unique(top_k_index).tolist():
            if 0 <= number < len(self):
                tokens, positions = torch.where(top_k_index == number)
                weighted = self._expert(number, hidden_states[tokens]) * top_k_weights[tokens, positions, None]
                result.index_add_(0, tokens, weighted.to(result.dtype))
        return result

    def _dense(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs every expert on every token, so that no shape depends on the routing and all linears read one tensor."""
        chosen = top_k_index.unsqueeze(-1) == torch.arange(len(self), device=top_k_index.device)
        weights = (chosen * top_k_weights.unsqueeze(-1)).sum(1).t().unsqueeze(-1).unbind(0)
        parts = [self._expert(number, hidden_states) * weight for number, weight in enumerate(weights)]
        return sum(parts[1:], parts[0]).to(hidden_states.dtype)

    def _expert(self, number: int, hidden_states: Tensor) -> Tensor:
        first, second = self.projections
        gated = _apply_gate(self._stacked[0], self.linear(number, first)(hidden_states))
        return self.linear(number, second)(gated)

    def linear(self, number: int, projection: str) -> nn.Linear:
        """Returns the linear ``projection`` of expert ``number``."""
        linear: nn.Linear = self.get_submodule(f"{number}.{projection}")  # type: ignore[assignment]
        return linear

    def restacked(self) -> nn.Module:
        """Returns the original module with the present weights of the linears, which keep them, too."""
        (stacked,) = self._stacked
        for name, parameters in self._parts().items():
            transposed = self.transposed and parameters[0].ndim == 2
            parts = [parameter.detach().t() if transposed else parameter.detach() for parameter in parameters]
            stacked.get_parameter(name).data = _stack(parts)
        return stacked.train(self.training)

    def release(self) -> None:
        """Frees the linears' storage."""
        for parameters in self._parts().values():
            for parameter in parameters:
                parameter.data = parameter.data.new_empty(0)

    def _parts(self) -> dict[str, list[Tensor]]:
        """Returns the name of each stacked parameter -> the parameters of the linears that are its parts."""
        parts: dict[str, list[Tensor]] = {}
        for name in self.projections:
            linears = [self.linear(number, name) for number in range(len(self))]
            parts[name] = [linear.get_parameter("weight") for linear in linears]
            if linears[0].bias is not None:
                parts[_bias(name)] = [linear.get_parameter("bias") for linear in linears]
        return parts


def unstack_experts(model: nn.Module) -> Unstacked:
    """Replaces every module of ``model`` that holds stacked experts by `UnstackedExperts`.

    Weights are shared, not copied. Each replacement is compared with the original on a small random input, except on
    the meta device, where the structure alone decides. A module whose replacement does not match stays as it is, and
    the reason is returned. After an error or an interrupt all modules are back.
    """
    names: list[str] = []
    refused: dict[str, str] = {}
    replacements: dict[nn.Module, UnstackedExperts] = {}
    for name, module in model.named_modules():
        stacked_names = stacks(module)
        if not stacked_names or module is model:  # the model itself has no parent in which it could be replaced
            continue
        problem = _unsupported(module)
        if not problem:
            unstacked = UnstackedExperts(module)
            problem = _mismatch(module, unstacked)
        if problem:
            refused.update(
                {f"{name}.{key}": f"stacked experts of a {type(module).__name__}: {problem}" for key in stacked_names}
            )
            continue
        replacements[module] = unstacked
        names.append(name)
    slots = _slots(model)
    try:
        for module, unstacked in replacements.items():
            _assign(slots[module], unstacked)
            _release(module)
    except BaseException:
        for module, unstacked in replacements.items():
            _assign(slots[module], unstacked.restacked())
        raise
    return Unstacked(tuple(names), refused)


def restack_experts(model: nn.Module, kept: Collection[nn.Module] = ()) -> None:
    """Replaces every `UnstackedExperts` but those in ``kept`` by its original module, holding its linears' weights.

    The stacked parameters are the same objects as before. Weights are copied only if the linears of a module no longer
    share a storage, and then one module at a time; its linears are empty afterwards. After an error or an interrupt
    some modules may still be unstacked: no weight is lost, and another call continues.
    """
    for module, slots in _slots(model).items():
        if isinstance(module, UnstackedExperts) and module not in kept:
            _assign(slots, module.restacked())
            module.release()


@contextmanager
def unstacked_experts(model: nn.Module) -> Iterator[Unstacked]:
    """Unstacks experts inside the ``with`` block, and restacks them at its end.

    Re-entrant: a nested block unstacks nothing and only reports the refused parameters again.
    """
    before = {module for module in model.modules() if isinstance(module, UnstackedExperts)}
    try:
        yield unstack_experts(model)
    finally:
        restack_experts(model, before)


def stacked_name(model: nn.Module, linear: str) -> tuple[str, int] | None:
    """Returns the stacked parameter that a linear is part of, and the number of its expert; None for other linears.

    ``model.layers.0.mlp.experts.3.gate_up_proj`` is expert 3 of ``model.layers.0.mlp.experts.gate_up_proj``, whether
    ``model`` is unstacked at present or not.
    """
    path, _, projection = linear.rpartition(".")
    owner, _, number = path.rpartition(".")
    if projection not in (*FIRST, SECOND) or not number.isdecimal():
        return None
    try:
        experts = model.get_submodule(owner)
    except AttributeError:
        return None
    parameter = getattr(experts, projection, None)
    if isinstance(experts, UnstackedExperts) or (isinstance(parameter, nn.Parameter) and parameter.ndim == 3):
        return f"{owner}.{projection}", int(number)
    return None


def stacked_input_dim(model: nn.Module, parameter: str) -> int:
    """Returns the input dimension of a stacked parameter: 2, or 1 where it is stored transposed."""
    experts = model.get_submodule(parameter.rpartition(".")[0])
    name = "transposed" if isinstance(experts, UnstackedExperts) else "is_transposed"
    return 1 if getattr(experts, name, False) else 2


def expert_of(model: nn.Module, linear: str) -> tuple[UnstackedExperts, bool] | None:
    """Returns the experts that a linear belongs to, and whether it reads their input; None for other linears.

    A linear of an expert sees only the tokens that are sent to this expert, possibly none. All tokens pass through the
    module of the experts.
    """
    name = stacked_name(model, linear)
    if name is None:
        return None
    owner, _, projection = name[0].rpartition(".")
    experts = model.get_submodule(owner)
    return (experts, projection != SECOND) if isinstance(experts, UnstackedExperts) else None


def stacks(module: nn.Module) -> list[str]:
    """Returns the names of a module's stacks of experts.

    They are its 3-D parameters, if transformers' decorator marks its class as experts or two of them have the usual
    names. Other modules have 3-D parameters, too: recurrent gates, convolutions.
    """
    names = [key for key, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
    usual = SECOND in names and not {*FIRST}.isdisjoint(names)
    return names if usual or any(hasattr(module, mark) for mark in MARKS) else []


def _apply_gate(stacked: Any, gate_up: Tensor) -> Tensor:
    """Joins gate and up as the original module does, which may clamp or scale them."""
    if _projections(stacked)[0] != "gate_up_proj":
        return stacked.act_fn(gate_up)
    if hasattr(stacked, "_apply_gate"):
        return stacked._apply_gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return stacked.act_fn(gate) * up


def _projections(stacked: nn.Module) -> tuple[str, str]:
    return next((name for name in FIRST if hasattr(stacked, name)), FIRST[0]), SECOND


def _bias(projection: str) -> str:
    return f"{projection}_bias"


def _linear(stacked: nn.Module, name: str, number: int, transposed: bool) -> nn.Linear:
    weights = stacked.get_parameter(name)
    biases = getattr(stacked, _bias(name), None)
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


def _slots(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Returns each module -> the parents that hold it, and its name in each of them."""
    slots: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is not None:
                slots.setdefault(child, []).append((parent, key))
    return slots


def _assign(slots: list[tuple[nn.Module, str]], module: nn.Module) -> None:
    for parent, key in slots:
        parent._modules[key] = module


def _release(stacked: nn.Module) -> None:
    """Drops the original module's hold on the storage, which is freed once the linears get other weights."""
    for parameter in stacked.parameters(recurse=False):
        parameter.data = parameter.data.new_empty(0)


def _unsupported(module: nn.Module) -> str:
    """Returns why a module with 3-D parameters cannot be unstacked; empty if it can."""
    unusual = [meaning for flag, (value, meaning) in SUPPORTED.items() if getattr(module, flag, value) != value]
    if unusual:
        return f"{', '.join(unusual)}, which is not supported"
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    names = _projections(module)
    if set(tensors) not in ({*names}, {*names, *map(_bias, names)}):
        return f"it holds {', '.join(sorted(tensors))}; supported are {' and '.join(names)} with or without biases"
    first, second = (tensors[name].mT if getattr(module, "is_transposed", False) else tensors[name] for name in names)
    halves = 2 if names[0] == "gate_up_proj" else 1
    if first.shape[1] % halves or tuple(second.shape) != (first.shape[0], first.shape[2], first.shape[1] // halves):
        return (
            f"{names[0]} {list(tensors[names[0]].shape)} and {SECOND} {list(tensors[SECOND].shape)} do not fit "
            "together as [experts, 2 x intermediate, hidden] and [experts, hidden, intermediate]"
        )
    if first.dtype not in TOLERANCE or {tensor.dtype for tensor in tensors.values()} != {first.dtype}:
        return f"its weights are {first.dtype} and {second.dtype}"
    if not callable(getattr(module, "act_fn", None)) and not callable(getattr(module, "_apply_gate", None)):
        return "it has no act_fn"
    if list(inspect.signature(module.forward).parameters) not in ARGUMENTS:
        return f"its arguments are not {', '.join(ARGUMENTS[0])}"
    return ""


@torch.no_grad()
def _mismatch(stacked: nn.Module, unstacked: UnstackedExperts) -> str:
    """Returns how both differ on random tokens with random routing; empty if they agree, or on the meta device."""
    weight = unstacked.linear(0, unstacked.projections[0]).weight
    if weight.device.type == "meta":
        return ""
    experts, hidden = len(unstacked), weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    sizes = torch.linspace(PROBE_LARGEST / PROBE_TOKENS, PROBE_LARGEST, PROBE_TOKENS).unsqueeze(1)
    tokens = (torch.randn(PROBE_TOKENS, hidden, generator=generator) * sizes).to(weight)
    scores = torch.rand(PROBE_TOKENS, experts, generator=generator)
    weights, index = (part.to(weight.device) for part in scores.topk(min(PROBE_TOP_K, experts)))
    try:
        expected = stacked(tokens, index, weights.to(weight.dtype)).double()
        output = unstacked(tokens, index, weights.to(weight.dtype)).double()
    except Exception as error:  # the model's code may raise any kind
        return f"running it on its own failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    finite = expected.isfinite().all(1)
    scale = expected.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    difference = ((expected - output).abs().amax(1) / scale)[finite]
    if difference.numel() and bool((difference <= TOLERANCE[weight.dtype]).all()):
        return ""
    largest = f"{float(difference.max()):.1e}" if difference.numel() else "not finite"
    return f"its experts, run one by one, give other outputs than the module (relative difference {largest})"

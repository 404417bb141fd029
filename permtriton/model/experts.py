"""Mixture-of-experts as linears.

transformers keeps all experts of a layer in two parameters, ``gate_up_proj [E, 2I, H]`` (``up_proj [E, I, H]`` without
a gate) and ``down_proj [E, H, I]``, in some classes transposed, and their biases in two more. `unstack_experts`
replaces such a module by one that holds the same storage as ``nn.Linear``s, two per expert, so that tracing, hooks,
masks and folding treat experts like all other linears. `restack_experts` puts the original module back, with the
present weights of the linears. Stacked experts are recognised by their structure, and the replacement is checked by its
outputs.

The module either sends tokens to its experts, or its input is divided among its experts already. `FORMS` tells these
apart by the arguments of ``forward``.
"""

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton.errors import ConfigError
from permtriton.model.checks import TOLERANCE
from permtriton.model.modules import replace_module

GATED, PLAIN, SECOND = "gate_up_proj", "up_proj", "down_proj"  # first weight with a gate, first without; second
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")  # names of this number in configs
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


# names of the arguments of ``forward`` -> the class that replaces a module with them
FORMS: dict[tuple[str, ...], type[UnstackedExperts]] = {
    ("hidden_states", "top_k_index", "top_k_weights"): RoutedExperts,
    ("hidden_states", "router_indices", "routing_weights"): RoutedExperts,
    ("hidden_states",): BatchedExperts,
}


def stacks(module: nn.Module) -> list[str]:
    """Returns the names of a module's stacks of experts.

    They are its 3-D parameters if transformers' decorator marks its class as experts, or if two of them have the usual
    names. The 3-D parameters of other modules, such as recurrent gates and convolutions, are not experts.
    """
    names = [key for key, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
    usual = SECOND in names and (GATED in names or PLAIN in names)
    return names if usual or any(hasattr(module, mark) for mark in MARKS) else []


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


def unstack_experts(model: nn.Module) -> dict[str, str]:
    """Replaces every module of ``model`` that holds stacked experts by `UnstackedExperts`.

    Weights are shared, not copied. Each replacement is compared with the original on a small random input, except on
    the meta device, where the structure alone decides. A module whose replacement does not match stays.

    Returns:
        Name of each parameter that stays stacked, and is therefore not pruned -> the reason.
    """
    refused: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        stacked_names = stacks(module)
        if not stacked_names or module is model:  # the model itself has no parent in which it could be replaced
            continue
        unstacked = _unstacked(module)
        if isinstance(unstacked, str):
            reason = f"stacked experts of a {type(module).__name__}: {unstacked}"
            refused |= {f"{name}.{key}": reason for key in stacked_names}
        else:
            replace_module(model, name, unstacked)
            release(module)  # so that the storage is free as soon as the linears have another
    return refused


def restack_experts(model: nn.Module, kept: Collection[nn.Module] = ()) -> None:
    """Replaces every `UnstackedExperts` but those in ``kept`` by its original module, holding its linears' weights.

    The stacked parameters are the same objects as before. Weights are copied only if the linears of a module no longer
    share a storage, one module at a time. The linears are empty afterwards. After an error or an interrupt
    some modules may still be unstacked: no weight is lost, and another call continues.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, UnstackedExperts) and module not in kept:
            replace_module(model, name, module.restacked())
            release(module)


@contextmanager
def unstacked_experts(model: nn.Module) -> Iterator[dict[str, str]]:
    """Unstacks experts inside the ``with`` block, and restacks them at its end; yields what `unstack_experts` returns.

    Re-entrant: a nested block unstacks nothing and only reports the refused parameters again.
    """
    before = {module for module in model.modules() if isinstance(module, UnstackedExperts)}
    try:
        yield unstack_experts(model)
    finally:
        restack_experts(model, before)


@contextmanager
def measured_experts(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block, experts count the tokens sent to them, and run on all tokens if ``all_measured``."""
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    try:
        for module in experts:
            module.measuring = True
        yield
    finally:
        for module in experts:
            module.measuring = False


def measure_all_experts(model: nn.Module, all_measured: bool) -> None:
    """Sets whether routed experts run on every token while statistics are taken; refuses True if a model has none."""
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    if all_measured and not experts:
        raise ConfigError(
            f"`calibrate_all_experts=true` has no effect on a {type(model).__name__}, which has no experts "
            "that see only some of the tokens: leave it out"
        )
    for module in experts:
        module.all_measured = all_measured


def stacked_name(model: nn.Module, linear: str) -> str | None:
    """Returns the name of the stacked parameter that a linear is part of; None if the linear is no part of one.

    ``model.layers.0.mlp.experts.3.gate_up_proj`` is part of ``model.layers.0.mlp.experts.gate_up_proj``, whether
    ``model`` is unstacked at present or not.
    """
    path, _, projection = linear.rpartition(".")
    owner = path.rpartition(".")[0]
    experts = model.get_submodule(owner)
    is_part = isinstance(experts, UnstackedExperts) or projection in stacks(experts)
    return f"{owner}.{projection}" if is_part else None


def expert_of(model: nn.Module, linear: str) -> tuple[RoutedExperts, bool] | None:
    """Returns the routed experts that a linear belongs to, and whether it reads their input; None for other linears.

    Such a linear sees only the tokens that are sent to its expert, possibly none, while all tokens pass through the
    module of the experts. Other forms of experts run in every forward pass, as other linears do.
    """
    path, _, projection = linear.rpartition(".")
    experts = model.get_submodule(path.rpartition(".")[0])
    return (experts, projection != SECOND) if isinstance(experts, RoutedExperts) else None


def share_sent(model: PreTrainedModel, experts: UnstackedExperts) -> float:
    """Returns the share of tokens that an expert gets on average, by the config; 1 if the config does not say.

    `BatchedExperts` get all tokens. If the numbers of experts per token differ between layers, their mean is taken.
    """
    text = model.config.get_text_config()
    sent = next((number for name in EXPERTS_PER_TOKEN if (number := getattr(text, name, None))), None)
    if not sent or isinstance(experts, BatchedExperts):
        return 1.0
    return (fmean(sent) if isinstance(sent, list | tuple) else sent) / len(experts)


def _unstacked(module: nn.Module) -> UnstackedExperts | str:
    """Returns a module of linears in place of stacked experts, or why none can be made."""
    if getattr(module, "has_post_expert_norm", False):
        return "it has a norm after each expert, which is not supported"
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = projections(module)
    if set(tensors) not in ({*names}, {*names, *map(bias_of, names)}):
        return f"it holds {', '.join(sorted(tensors))}; supported are {' and '.join(names)} with or without biases"
    if not fits(module, is_transposed(module)):
        shapes = " and ".join(f"{name} {list(tensors[name].shape)}" for name in names)
        return (
            f"{shapes} do not fit together as [experts, 2 x intermediate, hidden] and [experts, hidden, intermediate]"
        )
    if not callable(getattr(module, "act_fn", None)) and not callable(getattr(module, "_apply_gate", None)):
        return "it has no act_fn"
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= TOLERANCE.keys():
        return f"its weights are {' and '.join(sorted(map(str, dtypes)))}"
    form = FORMS.get(arguments_of(module))
    if form is None:
        return f"its arguments are not those of known experts, such as {', '.join(next(iter(FORMS)))}"
    unstacked = form(module)
    return _mismatch(module, unstacked) or unstacked


@torch.no_grad()
def _mismatch(stacked: nn.Module, unstacked: UnstackedExperts) -> str:
    """Returns how the outputs of both modules differ on random tokens; empty if they agree, or on the meta device."""
    weight = unstacked.linear(0, unstacked.projections[0]).weight
    if weight.device.type == "meta":
        return ""
    arguments = unstacked.probe(torch.Generator().manual_seed(0))
    try:
        expected, output = stacked(*arguments).double(), unstacked(*arguments).double()
    except Exception as error:  # the model's code may raise any exception
        return f"running it on its own failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    finite = expected.isfinite().all(1)
    scale = expected.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    difference = ((expected - output).abs().amax(1) / scale)[finite]
    if difference.numel() and bool((difference <= TOLERANCE[weight.dtype]).all()):
        return ""
    largest = f"{float(difference.max()):.1e}" if difference.numel() else "not finite"
    return f"its experts, run one by one, give other outputs than the module (relative difference {largest})"


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

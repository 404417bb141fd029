"""Mixture-of-experts as linears.

transformers keeps all experts of a layer in two parameters, ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]``.
`unstack_experts` puts a module in their place that holds the same storage as two ``nn.Linear`` an expert, so that
tracing, hooks, masks and folding treat experts as any other linears; `restack_experts` puts the original module back
with whatever the linears then hold. A stack is known by its structure and proved by what it computes.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from permtriton.errors import VerificationError

FIRST, SECOND = "gate_up_proj", "down_proj"
ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
# What transformers' decorator of expert classes says about a stack: the only value that is understood, and what another
# value means. A class without the decorator is taken to be plain.
PLAIN = {
    "is_transposed": (False, "its weights are stored transposed"),
    "has_bias": (False, "its experts have biases"),
    "has_gate": (True, "its experts have no gate"),
    "is_concatenated": (True, "it stores gate and up rows interleaved"),
    "has_post_expert_norm": (False, "it has a norm after each expert"),
}
# Largest allowed difference of two runs of the same function in another order, relative to the largest output: of the
# whole model, or of a stack and its linears. Norms and rotary angles work in float32 whatever the model's type.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
PROBE_TOKENS, PROBE_TOP_K, PROBE_LARGEST = 8, 2, 30.0  # inputs up to a size at which a clamped activation shows


@dataclass(frozen=True)
class Unstacked:
    """What `unstack_experts` did.

    Attributes:
        names: modules that now hold a linear for each expert's projections.
        refused: stacked parameter -> why it stays as it is, and so dense.
    """

    names: tuple[str, ...]
    refused: dict[str, str]


class UnstackedExperts(nn.ModuleList):
    """Experts as ``nn.Linear``s named ``<expert>.gate_up_proj`` and ``<expert>.down_proj``; called as the original is.

    Args:
        stacked: the original module. Its parameters' storage is shared, not copied.
    """

    def __init__(self, stacked: nn.Module) -> None:
        first, second = stacked.get_parameter(FIRST), stacked.get_parameter(SECOND)
        super().__init__(
            nn.ModuleDict({FIRST: _linear(first, number), SECOND: _linear(second, number)})
            for number in range(first.shape[0])
        )
        self._stacked: tuple[Any] = (stacked,)  # in a tuple, so that it is no submodule
        self.train(stacked.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns each token's experts, weighted and summed.

        Args:
            hidden_states: ``[tokens, hidden]``.
            top_k_index: int64 ``[tokens, k]``, the experts of each token; others than this module's are left out.
            top_k_weights: ``[tokens, k]``.
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
        """Every expert on every token: no shape depends on the routing, and every linear reads the same tensor."""
        chosen = top_k_index.unsqueeze(-1) == torch.arange(len(self), device=top_k_index.device)
        weights = (chosen * top_k_weights.unsqueeze(-1)).sum(1).t().unsqueeze(-1).unbind(0)
        parts = [self._expert(number, hidden_states) * weight for number, weight in enumerate(weights)]
        return sum(parts[1:], parts[0]).to(hidden_states.dtype)

    def _expert(self, number: int, hidden_states: Tensor) -> Tensor:
        gated = _apply_gate(self._stacked[0], self.linear(number, FIRST)(hidden_states))
        return self.linear(number, SECOND)(gated)

    def linear(self, number: int, projection: str) -> nn.Linear:
        """Returns the linear of one expert that ``projection`` names."""
        linear: nn.Linear = self.get_submodule(f"{number}.{projection}")  # type: ignore[assignment]
        return linear

    def restacked(self) -> nn.Module:
        """Returns the original module, holding what the linears hold now; they keep it, too."""
        (stacked,) = self._stacked
        weights = {name: _stack([weight.detach() for weight in self._weights(name)]) for name in (FIRST, SECOND)}
        for name, weight in weights.items():
            stacked.get_parameter(name).data = weight
        return stacked.train(self.training)

    def release(self) -> None:
        """Lets go of the linears' storage."""
        for name in (FIRST, SECOND):
            for weight in self._weights(name):
                weight.data = weight.data.new_empty(0)

    def _weights(self, projection: str) -> list[Tensor]:
        return [self.linear(number, projection).weight for number in range(len(self))]


def unstack_experts(model: nn.Module) -> Unstacked:
    """Replaces every module of ``model`` that holds stacked experts by `UnstackedExperts`.

    Weights are shared, not copied. Each replacement is compared with the original on a small random input, except on
    the meta device, where the structure is trusted. A stack that does not match stays as it is, with the reason; after
    an error or an interrupt, all do.
    """
    names: list[str] = []
    refused: dict[str, str] = {}
    replacements: dict[nn.Module, UnstackedExperts] = {}
    for name, module in model.named_modules():
        stacks = _stacks(module)
        if not stacks or module is model:  # which nothing holds that could hold something else
            continue
        problem = _problem(module)
        if not problem:
            unstacked = UnstackedExperts(module)
            problem = _mismatch(module, unstacked)
        if problem:
            refused.update(
                {f"{name}.{key}": f"stacked experts of a {type(module).__name__}: {problem}" for key in stacks}
            )
            continue
        replacements[module] = unstacked
        names.append(name)
    places = _places(model)
    try:
        for module, unstacked in replacements.items():
            _place(places[module], unstacked)
            _release(module)
    except BaseException:
        for module, unstacked in replacements.items():
            _place(places[module], unstacked.restacked())
        raise
    return Unstacked(tuple(names), refused)


def restack_experts(model: nn.Module) -> None:
    """Puts the original modules back in the place of every `UnstackedExperts`, with the linears' present weights.

    The stacked parameters are the objects they were; a copy is made only where linears no longer share a storage, of
    one module at a time, whose linears are empty afterwards. After an error or an interrupt, some modules are back and
    the others are as they were: no weight is lost, and another call goes on.
    """
    _restack(model, lambda _module: True)


def _restack(model: nn.Module, chosen: Callable[[UnstackedExperts], bool]) -> None:
    for module, places in _places(model).items():
        if isinstance(module, UnstackedExperts) and chosen(module):
            _place(places, module.restacked())
            module.release()


@contextmanager
def unstacked_experts(model: nn.Module) -> Iterator[Unstacked]:
    """`unstack_experts` for a while; inside another one nothing happens but that the refused are told again."""
    before = {module for module in model.modules() if isinstance(module, UnstackedExperts)}
    try:
        yield unstack_experts(model)
    finally:
        _restack(model, lambda module: module not in before)


def stacked_name(model: nn.Module, linear: str) -> tuple[str, int] | None:
    """Returns the stacked parameter and the number of the expert that a linear's name means, or None for any other.

    ``model.layers.0.mlp.experts.3.gate_up_proj`` is expert 3 of ``model.layers.0.mlp.experts.gate_up_proj``, whether
    ``model`` is unstacked at present or not.
    """
    path, _, projection = linear.rpartition(".")
    owner, _, number = path.rpartition(".")
    if projection not in (FIRST, SECOND) or not number.isdecimal():
        return None
    try:
        experts = model.get_submodule(owner)
    except AttributeError:
        return None
    parameter = getattr(experts, projection, None)
    if isinstance(experts, UnstackedExperts) or (isinstance(parameter, nn.Parameter) and parameter.ndim == 3):
        return f"{owner}.{projection}", int(number)
    return None


def routed(model: nn.Module, linear: str) -> tuple[UnstackedExperts, bool] | None:
    """Returns the experts that a linear is one of, and whether it is the first to read a token; None for any other.

    Only tokens sent to an expert reach its linears, and none may; the experts' module itself sees them all.
    """
    name = stacked_name(model, linear)
    if name is None:
        return None
    owner, _, projection = name[0].rpartition(".")
    experts = model.get_submodule(owner)
    return (experts, projection == FIRST) if isinstance(experts, UnstackedExperts) else None


class Routing:
    """Sends the tokens of one run of a model to the experts that they went to in another.

    Which experts a token goes to is a step function: in float16 and bfloat16 another order of a sum is enough to swap
    experts that score alike, and the token's output then jumps. To compare two models that compute the same function,
    run the first in `recorded` and the second in `replayed`. The weights of the chosen experts are never replayed.

    Args:
        model: with its experts stacked or not; that may differ between the two runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._chosen: list[Tensor] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Remembers the experts that the model chooses."""
        self._chosen = []

        def record(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if _chooses(inputs):
                self._chosen.append(inputs[1].clone())

        with self._hooked(record):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Chooses the remembered experts again; the same token ids must run.

        Raises:
            VerificationError: the model itself would choose so differently that it is not the same function.
        """
        remaining = list(self._chosen)

        def replay(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if not _chooses(inputs):
                return None
            before, now = remaining.pop(0).to(inputs[1].device), inputs[1]
            changed = float((now.unsqueeze(-1) != before.unsqueeze(-2)).all(-1).float().mean())
            count = (
                len(module)
                if isinstance(module, UnstackedExperts)
                else module.get_parameter(_stacks(module)[0]).shape[0]
            )
            if changed > 0.5 * (1 - now.shape[-1] / count):  # routing at random changes all of the bracket
                raise VerificationError(
                    f"{changed:.0%} of the choices of experts in a {type(module).__name__} changed where none should: "
                    "the router no longer computes what it did"
                )
            return (inputs[0], before, *inputs[2:])

        with self._hooked(replay):
            yield

    @contextmanager
    def _hooked(self, hook: Callable[..., tuple[Tensor, ...] | None]) -> Iterator[None]:
        modules = [
            module for module in self._model.modules() if isinstance(module, UnstackedExperts) or _stacks(module)
        ]
        handles = [module.register_forward_pre_hook(hook) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _stacks(module: nn.Module) -> list[str]:
    """The 3-D parameters of a module that may hold stacked experts; a single one is a convolution's, or the like."""
    found = [key for key, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
    return found if len(found) > 1 else []


def _chooses(inputs: tuple[Any, ...]) -> bool:
    """Whether a module is called as experts are: hidden states, then the numbers of the chosen experts."""
    return len(inputs) > 1 and isinstance(inputs[1], Tensor) and not inputs[1].is_floating_point()


def _apply_gate(stacked: Any, gate_up: Tensor) -> Tensor:
    """The original's own way to join gate and up, which may clamp or scale."""
    if hasattr(stacked, "_apply_gate"):
        return stacked._apply_gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return stacked.act_fn(gate) * up


def _linear(stacked: nn.Parameter, number: int) -> nn.Linear:
    _, rows, columns = stacked.shape
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(stacked.data[number], requires_grad=stacked.requires_grad)
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


def _places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Module -> each parent that holds it, and under which name."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, key))
    return places


def _place(places: list[tuple[nn.Module, str]], module: nn.Module) -> None:
    for parent, key in places:
        parent._modules[key] = module


def _release(stacked: nn.Module) -> None:
    """Lets go of a stack's storage: its linears hold it, and when they get new ones, it goes."""
    for key in (FIRST, SECOND):
        parameter = stacked.get_parameter(key)
        parameter.data = parameter.data.new_empty(0)


def _problem(module: nn.Module) -> str:
    """Why a module with 3-D parameters is no stack that is understood; empty where it is one."""
    unusual = [meaning for flag, (plain, meaning) in PLAIN.items() if getattr(module, flag, plain) != plain]
    if unusual:
        return f"{', '.join(unusual)}, which is not supported"
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    if set(tensors) != {FIRST, SECOND}:
        return f"it holds {', '.join(sorted(tensors))}; understood are {FIRST} and {SECOND} alone"
    first, second = tensors[FIRST], tensors[SECOND]
    if first.shape[1] % 2 or tuple(second.shape) != (first.shape[0], first.shape[2], first.shape[1] // 2):
        return (
            f"{FIRST} {list(first.shape)} and {SECOND} {list(second.shape)} do not fit together as [experts, "
            f"2 x intermediate, hidden] and [experts, hidden, intermediate]"
        )
    if first.dtype not in TOLERANCE or second.dtype != first.dtype:
        return f"its weights are {first.dtype} and {second.dtype}"
    if not callable(getattr(module, "act_fn", None)):
        return "it has no act_fn"
    if list(inspect.signature(module.forward).parameters) != ARGUMENTS:
        return f"it is called in another way than with {', '.join(ARGUMENTS)}"
    return ""


@torch.no_grad()
def _mismatch(stacked: nn.Module, unstacked: UnstackedExperts) -> str:
    """Runs both on random tokens with random routing; empty where they agree, or where there are no values."""
    weight = stacked.get_parameter(FIRST)
    if weight.device.type == "meta":
        return ""
    experts, _, hidden = weight.shape
    generator = torch.Generator().manual_seed(0)
    sizes = torch.linspace(PROBE_LARGEST / PROBE_TOKENS, PROBE_LARGEST, PROBE_TOKENS).unsqueeze(1)
    tokens = (torch.randn(PROBE_TOKENS, hidden, generator=generator) * sizes).to(weight)
    scores = torch.rand(PROBE_TOKENS, experts, generator=generator)
    weights, index = (part.to(weight.device) for part in scores.topk(min(PROBE_TOP_K, experts)))
    try:
        expected = stacked(tokens, index, weights.to(weight.dtype)).double()
        found = unstacked(tokens, index, weights.to(weight.dtype)).double()
    except Exception as error:  # code of any model class runs here; whatever it raises, it is not what was expected
        return f"running it on its own failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    finite = expected.isfinite().all(1)
    scale = expected.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    difference = ((expected - found).abs().amax(1) / scale)[finite]
    if difference.numel() and bool((difference <= TOLERANCE[weight.dtype]).all()):
        return ""
    largest = f"{float(difference.max()):.1e}" if difference.numel() else "not finite"
    return f"its experts, run one by one, give other outputs than the module (relative difference {largest})"

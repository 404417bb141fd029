"""Mixture-of-experts as linears.

transformers keeps all experts of a layer in two parameters, ``gate_up_proj [E, 2I, H]`` (``up_proj [E, I, H]`` without
a gate) and ``down_proj [E, H, I]``, in some classes transposed, and their biases in two more; or in two modules that
hold one ``weight [E, out, in]`` each. `unstack_experts` replaces such a module by one that holds the same storage as
``nn.Linear``s, one or two per expert (see `permtriton.model.expert_linears`), so that tracing, hooks, masks and folding
treat experts like all other linears. `restack_experts` puts the original module back, with the present weights of the
linears. Stacked experts are recognised by their structure, and the replacement is checked by its outputs.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from permtriton.errors import ConfigError
from permtriton.model.checks import TOLERANCE
from permtriton.model.expert_linears import (
    FORMS,
    SECOND,
    RoutedExperts,
    SortedLinears,
    UnstackedExperts,
    arguments_of,
    bias_of,
    fits,
    is_transposed,
    projections,
    release,
    stacks,
)
from permtriton.model.modules import replace_module


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


def _unstacked(module: nn.Module) -> UnstackedExperts | str:
    """Returns a module of linears in place of stacked experts, or why none can be made."""
    if getattr(module, "has_post_expert_norm", False):
        return "it has a norm after each expert, which is not supported"
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = projections(module)
    if set(tensors) not in ({*names}, {*names, *map(bias_of, names)}):
        return f"it holds {', '.join(sorted(tensors))}; supported are {' and '.join(names)} with or without biases"
    if len(names) == 2:
        if not fits(module, is_transposed(module)):
            shapes = " and ".join(f"{name} {list(tensors[name].shape)}" for name in names)
            return (
                f"{shapes} do not fit together as [experts, 2 x intermediate, hidden] and [experts, hidden, "
                "intermediate]"
            )
        if not callable(getattr(module, "act_fn", None)) and not callable(getattr(module, "_apply_gate", None)):
            return "it has no act_fn"
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= TOLERANCE.keys():
        return f"its weights are {' and '.join(sorted(map(str, dtypes)))}"
    form = FORMS.get(arguments_of(module))
    if form is None or (form is SortedLinears) != (len(names) == 1):
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

"""Mixture-of-experts as linears.

transformers keeps all experts of a layer in two parameters, ``gate_up_proj [E, 2I, H]`` (``up_proj [E, I, H]`` without
a gate) and ``down_proj [E, H, I]``, in some classes transposed, and their biases in two more; or in two modules with a
``weight [E, out, in]`` each. `unstack_experts` replaces such a module by one that holds the same storage as
``nn.Linear``s, one or two per expert (see `permtriton.model.expert_linears`), so that tracing, hooks, masks and folding
treat experts as any other linears. `restack_experts` puts the original module back, with the present weights of the
linears. Stacked experts are recognised by their structure, and the replacement is checked by its outputs.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import nn
from transformers import PreTrainedModel

from permtriton.errors import ConfigError
from permtriton.model.checks import TOLERANCE
from permtriton.model.expert_linears import (
    FIRST,
    FORMS,
    SECOND,
    SINGLE,
    BatchedExperts,
    RoutedExperts,
    SortedLinears,
    UnstackedExperts,
    arguments_of,
    bias_of,
    fits,
    is_transposed,
    projections,
    stacks,
)
from permtriton.model.modules import replace_module

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")  # names of this number in configs


def unstack_experts(model: nn.Module) -> dict[str, str]:
    """Replaces every module of ``model`` that holds stacked experts by `UnstackedExperts`.

    Weights are shared, not copied. Each replacement is compared with the original on a small random input, except on
    the meta device, where the structure alone decides. A module whose replacement does not match stays as it is.

    Returns:
        Stacked parameter that stays stacked, and therefore dense -> why.
    """
    refused: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        stacked_names = stacks(module)
        if not stacked_names or module is model:  # the model itself has no parent in which it could be replaced
            continue
        problem = _unsupported(module)
        if not problem:
            unstacked = FORMS[arguments_of(module)](module)
            problem = _mismatch(module, unstacked)
        if problem:
            reason = f"stacked experts of a {type(module).__name__}: {problem}"
            refused |= {f"{name}.{key}": reason for key in stacked_names}
            continue
        replace_module(model, name, unstacked)
        for parameter in module.parameters(recurse=False):  # so that their storage is free once the linears' change
            parameter.data = parameter.data.new_empty(0)
    return refused


def restack_experts(model: nn.Module, kept: Collection[nn.Module] = ()) -> None:
    """Replaces every `UnstackedExperts` but those in ``kept`` by its original module, holding its linears' weights.

    The stacked parameters are the same objects as before. Weights are copied only if the linears of a module no longer
    share a storage, and then one module at a time; its linears are empty afterwards. After an error or an interrupt
    some modules may still be unstacked: no weight is lost, and another call continues.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, UnstackedExperts) and module not in kept:
            replace_module(model, name, module.restacked())
            module.release()


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
    """Sets whether unstacked experts run on every token during statistics; refuses True if a model has none."""
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    if all_measured and not experts:
        raise ConfigError(
            f"`calibrate_all_experts=true` has no effect on a {type(model).__name__}, which sends no token to experts "
            "that could see all of them: leave it out"
        )
    for module in experts:
        module.all_measured = all_measured


def stacked_name(model: nn.Module, linear: str) -> tuple[str, int] | None:
    """Returns the stacked parameter that a linear is part of, and the number of its expert; None for other linears.

    ``model.layers.0.mlp.experts.3.gate_up_proj`` is expert 3 of ``model.layers.0.mlp.experts.gate_up_proj``, whether
    ``model`` is unstacked at present or not.
    """
    path, _, projection = linear.rpartition(".")
    owner, _, number = path.rpartition(".")
    if projection not in (*FIRST, SECOND, SINGLE) or not number.isdecimal():
        return None
    try:
        experts = model.get_submodule(owner)
    except AttributeError:
        return None
    parameter = getattr(experts, projection, None)
    if isinstance(experts, UnstackedExperts) or (isinstance(parameter, nn.Parameter) and parameter.ndim == 3):
        return f"{owner}.{projection}", int(number)
    return None


def expert_of(model: nn.Module, linear: str) -> tuple[RoutedExperts, bool] | None:
    """Returns the routed experts that a linear belongs to, and whether it reads their input; None for other linears.

    Such a linear sees only the tokens that are sent to its expert, possibly none, while all tokens pass through the
    module of the experts. Other forms of experts run in every forward pass, as other linears do.
    """
    name = stacked_name(model, linear)
    if name is None:
        return None
    owner, _, projection = name[0].rpartition(".")
    experts = model.get_submodule(owner)
    return (experts, projection != SECOND) if isinstance(experts, RoutedExperts) else None


def share_sent(model: PreTrainedModel, experts: nn.Module) -> float:
    """Returns the mean share of all tokens that is sent to an expert, by the config; 1 if it does not say.

    If the config has one number of experts per token for each layer, their mean is taken.
    """
    text = model.config.get_text_config()
    sent = next((number for name in EXPERTS_PER_TOKEN if (number := getattr(text, name, None))), None)
    if not sent or not isinstance(experts, nn.ModuleList) or isinstance(experts, BatchedExperts):
        return 1.0
    return (fmean(sent) if isinstance(sent, list | tuple) else sent) / len(experts)


def _unsupported(module: nn.Module) -> str:
    """Returns why a module with 3-D parameters cannot be unstacked; empty if it can."""
    if getattr(module, "has_post_expert_norm", False):
        return "it has a norm after each expert, which is not supported"
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = projections(module)
    if set(tensors) not in ({*names}, {*names, *map(bias_of, names)}):
        return f"it holds {', '.join(sorted(tensors))}; supported are {' and '.join(names)} with or without biases"
    weights = [tensors[name] for name in names]
    if len(names) == 2:
        first, second = (weight.mT for weight in weights) if is_transposed(module) else weights
        if not fits(module, first, second):
            return (
                f"{names[0]} {list(weights[0].shape)} and {SECOND} {list(weights[1].shape)} do not fit together as "
                "[experts, 2 x intermediate, hidden] and [experts, hidden, intermediate]"
            )
        if not callable(getattr(module, "act_fn", None)) and not callable(getattr(module, "_apply_gate", None)):
            return "it has no act_fn"
    if weights[0].dtype not in TOLERANCE or {tensor.dtype for tensor in tensors.values()} != {weights[0].dtype}:
        return f"its weights are {' and '.join(str(weight.dtype) for weight in weights)}"
    form = FORMS.get(arguments_of(module))
    if form is None or (form is SortedLinears) != (len(names) == 1):
        return f"its arguments are not {', '.join(next(iter(FORMS)))}"
    return ""


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

"""Models that do not fit one GPU: while they run, FSDP2 spreads the weights of their layers over the ranks.

The model itself stays whole in host memory, where it is permuted, masked and saved. What runs is a twin, which has
modules of its own: each rank holds a share of the rows of every weight of a layer, and a layer is whole only while it
runs. All else, such as embeddings and head, is whole on every rank. Gradients of weights are added up over the ranks,
and each rank keeps those of its share. All ranks must run the twin equally often.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from permtriton.errors import ModelError
from permtriton.model.core import core_of
from permtriton.passes.plan import Plan, layer_modules
from permtriton.util import ranks


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of a model with its own modules and frozen parameters, which share the model's memory."""
    shared = {id(parameter): nn.Parameter(parameter.data, requires_grad=False) for parameter in model.parameters()}
    return copy.deepcopy(model, shared)


@contextmanager
def spread(twin: PreTrainedModel, plan: Plan, device: torch.device) -> Iterator[PreTrainedModel]:
    """Inside the context, the weights of a twin's layers are spread over the ranks; `twin_of` makes the twin.

    Yields the twin, which is unusable afterwards. Its modules may have parametrizations.
    """
    mesh = init_device_mesh(device.type, (ranks.count(),))
    layers = layer_modules(twin, plan)
    _check(twin, layers)
    element = next(twin.parameters()).element_size()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if element < 4 else None)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    whole = {parameter for parameter in twin.parameters() if not isinstance(parameter, DTensor)}
    fully_shard(_around(twin, layers), mesh=mesh, ignored_params=whole)
    for module in twin.modules():
        if isinstance(module, FSDPModule):  # without these calls, gradients are averaged
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    nn.Module.to(twin, device)
    try:
        with ranks.in_step():
            yield twin
    finally:
        for layer in layers:  # freed here: hooks and modules form reference cycles, which are collected only later
            layer.to_empty(device="meta")


def is_spread(weight: Tensor) -> bool:
    """Whether each rank holds only a part of a weight."""
    return isinstance(weight, DTensor)


def share(weight: Tensor) -> Tensor:
    """Returns what this rank holds of a weight, as stored: the part with its output rows, or all of it."""
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight


def rows_of_share(weight: Tensor) -> slice:
    """Returns which output rows this rank holds of a weight."""
    if not is_spread(weight):
        return slice(None)
    rows = weight.shape[0]
    rows_per_rank = -(-rows // ranks.count())  # as torch.chunk divides: the last ranks may hold fewer rows, or none
    return slice(min(ranks.number() * rows_per_rank, rows), min((ranks.number() + 1) * rows_per_rank, rows))


def _around(twin: PreTrainedModel, layers: list[nn.Module]) -> nn.Module:
    """Returns the innermost module that contains and calls all layers: FSDP2's root must run whenever a layer runs.

    The base model may not run: OPT's model with a head calls the decoder inside the base model directly.
    """
    around = [module for module in twin.modules() if module not in layers and set(layers) <= set(module.modules())]
    return [module for module in around if not isinstance(module, nn.ModuleList | nn.ModuleDict)][-1]


def _check(twin: PreTrainedModel, layers: list[nn.Module]) -> None:
    around = _around(twin, layers)
    if core_of(twin) in set(around.modules()) - {around}:
        raise ModelError(
            f"a run up to the last hidden state of this {type(twin).__name__} ends inside the module that calls its "
            "layers, which FSDP2 does not allow, so they cannot be spread over GPUs: use a GPU that holds the model, "
            "or `device=cpu`"
        )
    owners: dict[int, nn.Module] = {}
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if owners.setdefault(id(parameter), layer) is not layer:
                raise ModelError(
                    f"{name} is shared by several layers, so the layers of this {type(twin).__name__} cannot be spread "
                    "over GPUs: use a GPU that holds the model, or `device=cpu`"
                )

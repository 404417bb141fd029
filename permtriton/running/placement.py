"""Where a model runs: where it is, spread over the devices of all ranks, or layer by layer on one device."""

from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

from permtriton.passes.plan import Plan
from permtriton.running.onload import onloaded
from permtriton.running.sharding import spread_twin


def running(
    model: PreTrainedModel,
    plan: Plan,
    spread_on: torch.device | None = None,
    onload_on: torch.device | None = None,
) -> AbstractContextManager[PreTrainedModel]:
    """Returns a context that yields what runs in place of a model in host memory.

    Args:
        model: model as it is now.
        spread_on: device on which a twin runs, with its layers spread over the ranks; see `permtriton.running.sharding`.
        onload_on: device to which the model's layers come one by one; see `permtriton.running.onload`. Without either,
            the model runs where it is.
    """
    if spread_on is not None:
        return spread_twin(model, plan, spread_on)
    if onload_on is not None:
        return onloaded(model, plan, onload_on)
    return nullcontext(model)

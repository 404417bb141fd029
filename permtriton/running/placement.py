"""The placements of a model: whole on each device, spread over all devices, or moved to each device layer by layer.

`permtriton.driver.choose_placement` decides which one a compilation takes.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum

import torch
from transformers import PreTrainedModel

from permtriton.errors import ConfigError
from permtriton.passes.plan import Plan
from permtriton.running.onload import onloaded
from permtriton.running.sharding import spread, twin_of
from permtriton.util.store import Store


class DevicePlacement(IntEnum):
    WHOLE = 0  # the whole model on each device
    ONLOADED = 1  # in host memory, from which layers come to each device one by one (`permtriton.running.onload`)
    SPREAD = 2  # the layers of a twin are spread over all devices (`permtriton.running.sharding`)

    @property
    def weights(self) -> str:
        return (
            "whole on each device",
            "in host memory, from which each layer comes to the device when it runs",
            "spread over the devices layer by layer (FSDP2), and whole in host memory",
        )[self]


def allowed_placements(shard: bool | None, onload: bool | None) -> tuple[DevicePlacement, ...]:
    """Returns the placements that the options allow: True demands a placement, False excludes it, None does neither."""
    if shard and onload:
        raise ConfigError(
            "`shard=True` spreads layers over GPUs, and `onload=True` brings them to a GPU one by one: choose one"
        )
    choices = {DevicePlacement.SPREAD: shard, DevicePlacement.ONLOADED: onload}
    if demanded := [placement for placement, choice in choices.items() if choice]:
        return tuple(demanded)
    return tuple(placement for placement in DevicePlacement if choices.get(placement) is not False)


@dataclass(frozen=True)
class ModelPlacement:
    kind: DevicePlacement
    device: torch.device  # the device of this process

    @property
    def spread_on(self) -> torch.device | None:
        """The device if layers are spread over devices; else None."""
        return self.device if self.kind is DevicePlacement.SPREAD else None

    @property
    def store(self) -> Store:
        """The store of large tensors other than the weights."""
        return Store(onloads=self.kind is DevicePlacement.ONLOADED)

    def running(self, model: PreTrainedModel, plan: Plan) -> AbstractContextManager[PreTrainedModel]:
        if self.kind is DevicePlacement.SPREAD:
            return spread(twin_of(model), plan, self.device)
        return onloaded(model, plan, self.device) if self.kind is DevicePlacement.ONLOADED else nullcontext(model)

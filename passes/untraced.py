"""Untraced parameters: those that the trace did not use, and the channels that they may reach with other inputs.

A trace runs on token ids. What a model does with images, with an encoder's states or with an adapter is not in the
graph, but an image projector writes into the residual stream, and a cross-attention reads it. A channel space may
therefore move only if no untraced parameter can carry its channels. An untraced parameter is considered

* for channels that stay inside one layer (an MLP's intermediate channels, a head's values), if it belongs to the lowest
  module that contains all that writes or reads them;
* for all other channels (the residual stream), if it is anywhere in the model.

Such a parameter can carry the channels if one of its dimensions is a multiple of the space's width. Equality is not
required: a projection to twice the width may be split into a scale and a shift.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from permtriton.model.name import shared_parts
from permtriton.passes.plan import Site, layer_of


def untraced_reach(model: nn.Module, untraced: Iterable[str], names: Iterable[str], readers: Sequence[Site]) -> str:
    """Returns why a space is fixed; empty if none of the untraced parameters can carry its channels.

    Args:
        untraced: Names of the untraced parameters.
        names: Names of the parameters that write or read the channels.
        readers: Sites that read the channels.
    """
    scope = shared_parts([name.split(".")[:-1] for name in names])
    prefix = ".".join([*scope, ""]) if layer_of(model, ".".join(scope)) else ""
    widths = sorted({width for site in readers for width in (site.channels, site.space.units) if width > 1})
    for name in untraced:
        shape = model.get_parameter(name).shape
        for width in widths:
            if name.startswith(prefix) and any(size % width == 0 for size in shape):
                return (
                    f"{name} {list(shape)}, which token ids alone do not reach, may write or read its {width} channels"
                )
    return ""

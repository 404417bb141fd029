"""Parameters that the trace did not use, and the channels that they may reach when the model runs in another way.

A trace runs on token ids. What a model does with images, with an encoder's states or with an adapter is not in the
graph: such a projector writes into the residual stream, such a cross-attention reads it. A channel space may therefore
move only where no unseen parameter can carry its channels:

* channels that stay inside one layer (an MLP's intermediate channels, a head's values) are reached only by parameters
  of the lowest module that holds everything that writes or reads them;
* all others (the residual stream) are reached by parameters anywhere in the model.

An unseen parameter counts where one of its dimensions is a multiple of the space's width: a projection to twice the
width may be halved into a scale and a shift.
"""

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from permtriton.plan import Site


class Unseen:
    """The parameters of a model that a trace did not use.

    Args:
        model: the traced model.
        used: names of the parameters that the graph uses.

    Attributes:
        sizes: parameter -> its shape, of those with more than one element.
    """

    def __init__(self, model: nn.Module, used: Collection[str]) -> None:
        self._model = model
        self.sizes = {n: tuple(p.shape) for n, p in model.named_parameters() if n not in used and p.numel() > 1}

    def reach(self, names: Iterable[str], readers: Sequence[Site]) -> str:
        """Returns which unseen parameter may carry the channels of a space, as a reason; empty where none may.

        Args:
            names: the parameters and modules that write or read the channels.
            readers: the sites that read them.
        """
        scope = _common_module(names)
        if layer_of(self._model, scope) < 0:
            scope = ""
        widths = {width for site in readers for width in (site.channels, site.space.units) if width > 1}
        for name, shape in self.sizes.items():
            width = next((w for w in sorted(widths) for size in shape if size % w == 0), None)
            if width is not None and f"{name}.".startswith(f"{scope}." if scope else ""):
                return (
                    f"{name} {list(shape)}, which token ids alone do not reach, may write or read its {width} channels"
                )
        return ""


def layer_of(model: nn.Module, name: str) -> int:
    """Returns the number of the outermost module list's item that holds the module ``name``, or -1."""
    module = model
    for part in name.split(".") if name else ():
        if isinstance(module, nn.ModuleList):
            return int(part)
        module = module.get_submodule(part)
    return -1


def _common_module(names: Iterable[str]) -> str:
    """Returns the path that all names begin with; of a single name, the module that holds it."""
    paths = [name.split(".")[:-1] for name in names]
    shared = 0
    while all(len(path) > shared for path in paths) and len({path[shared] for path in paths}) == 1:
        shared += 1
    return ".".join(paths[0][:shared])

"""Changes the linears layer by layer, with the Hessians of their inputs measured in the model as changed so far."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from permtriton.kernels.packing import pack, unpack_reference
from permtriton.methods.measure.statistics import Curvature, hessians
from permtriton.methods.run import Run
from permtriton.passes.plan import Site, linear_module, weight_in_out
from permtriton.util import ranks

# Changes the linear with a name, given the curvature of its site, and returns its entry in the report.
Update = Callable[[Curvature, str], dict[str, Any] | None]


@torch.no_grad()
def update_layers(run: Run, step: str, update: Update) -> list[dict[str, Any]]:
    """Changes the linears layer by layer, and returns their entries in the report of the step with this name.

    Finished layers are stored, so that an interrupted run can continue.
    """
    finished, num_sequences = FinishedLayers(run, step), ranks.own_rows(len(run.samples)).numel()
    steps = (num_sequences + 1) * len(run.plan.layers())
    with run.placed_model_for_fit() as model, run.progress.stage(step, steps) as advance:
        for layer in run.walk(model).walk_and_change():
            if finished.restore(layer.sites):
                advance(num_sequences + 1)
            else:
                finished.store(layer.sites, update_linears(run, layer.sites, hessians(model, layer, advance), update))
                advance()
    return finished.parts


def update_linears(
    run: Run, sites: Iterable[Site], hessian_by_site: Mapping[str, Tensor], update: Update
) -> list[dict[str, Any]]:
    """Changes the linears of ``sites``, a share of them on each rank, and returns their entries in the report.

    Consecutive linears of a site share its curvature; only one site's curvature is in memory.
    """
    curvature_of = lru_cache(maxsize=1)(lambda site: Curvature(hessian_by_site[site], site))
    linears = [(site.name, name) for site in sites for name in site.linears]
    parts = ranks.deal(linears, lambda linear: update(curvature_of(linear[0]), linear[1]))
    ranks.send_dealt([linear_module(run.model, name).get_parameter("weight") for _, name in linears])
    return [part for part in parts if part is not None]


class FinishedLayers:
    """The layers that a step has changed: what it reports of them, and the files from which it continues."""

    def __init__(self, run: Run, step: str) -> None:
        self._run, self._files = run, map(run.state(step).of_layer, count())
        self.parts: list[dict[str, Any]] = []  # entries of the report

    def restore(self, sites: Sequence[Site]) -> bool:
        """Copies the next layer, which has these sites, from its file into the model; returns whether there is one."""
        self._file = next(self._files)
        if (saved_state := self._file.read()) is None:
            return False
        tensors, report = saved_state
        for name, weight in self._weights(sites).items():
            values, positions = tensors[f"{name}.values"], tensors[f"{name}.positions"]
            weight.copy_(unpack_reference(values, positions, len(weight), self._run.plan.patterns[name]).T)
        self.parts += report["parts"]
        return True

    def store(self, sites: Sequence[Site], parts: list[dict[str, Any]]) -> None:
        """Writes the file of the layer that `restore` did not find: its weights, packed, and entries of the report."""
        tensors: dict[str, Tensor] = {}
        if self._file.path is not None and not ranks.number():  # the first rank writes
            for name, weight in self._weights(sites).items():
                values, positions = pack(weight.T.contiguous(), self._run.plan.patterns[name])
                tensors |= {f"{name}.values": values, f"{name}.positions": positions}
        self._file.write(tensors, parts=parts)
        self.parts += parts

    def _weights(self, sites: Sequence[Site]) -> dict[str, Tensor]:
        """Returns linear -> its weight, ``[in_features, out_features]``, for all linears that read ``sites``."""
        names = [name for site in sites for name in site.linears]
        return {name: weight_in_out(linear_module(self._run.model, name)) for name in names}

"""Corners of pruned weights in the dense model's channel order, read row by row from the files."""

from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.packing import check_packed, unpack
from permtriton.permutation import inverse
from permtriton.reporting.compiled import Compiled, kind_of, layer_of

CORNER = 128  # rows and columns of a picture, as in the paper


def pictured_linears(folders: Sequence[Compiled]) -> list[str]:
    """Returns the first linear of one site per kind, from the first layer to the last, that all folders can show.

    Stacks of experts have none.
    """
    shown = [_drawable(folder) for folder in folders]
    common = [name for name in shown[0] if all(name in others for others in shown)]
    kinds = list(dict.fromkeys(kind_of(name) for name in common))
    chosen = []
    for number, kind in enumerate(kinds):
        names = sorted((name for name in common if kind_of(name) == kind), key=lambda name: layer_of(name) or 0)
        chosen.append(names[round(number * (len(names) - 1) / max(len(kinds) - 1, 1))])
    return chosen


def corner(folder: Compiled, linear: str, size: int = CORNER) -> Tensor:
    """Returns which weights of a linear's corner are kept.

    Args:
        folder: compiled folder, in any layout and format.
        linear: one of `pictured_linears`.
        size: most rows and columns.

    Returns:
        bool ``[rows, columns]``, the first output and input channels in the order of the dense model.

    Raises:
        ModelError: the tensor cannot be read, or does not fit the recorded permutations.
    """
    weight = f"{linear}.weight"
    if len(folder.shape(weight)) != 2:
        raise ModelError(f"{folder.path}: {weight} is no matrix: the checkpoint is damaged")
    dim = folder.pruned[weight]
    outputs, inputs = folder.shape(weight)[1 - dim], folder.shape(weight)[dim]
    site = next(site for site in folder.record["sites"] if linear in site["linears"])
    rows = next((entry["index"] for entry in folder.record["rows"] if linear in entry["linears"]), range(outputs))
    columns, from_row = inverse(torch.tensor(site["index"])), inverse(torch.tensor(rows))
    if (from_row.numel(), columns.numel()) != (outputs, inputs):
        raise ModelError(
            f"{folder.path}: {weight} is {outputs} x {inputs}, but permtriton.json orders {from_row.numel()} rows and "
            f"{columns.numel()} columns: one of them is damaged"
        )
    return _rows(folder, weight, from_row[:size].tolist())[:, columns[:size]] != 0


def _drawable(folder: Compiled) -> list[str]:
    """Returns the first linear of each site whose weight is stored by itself."""
    names = [site["linears"][0] for site in folder.record["sites"] if site["linears"]]
    return [name for name in names if f"{name}.weight" in folder.pruned]


def _rows(folder: Compiled, weight: str, rows: list[int]) -> Tensor:
    """Returns rows of a weight, ``[len(rows), inputs]``, with its columns in the folder's order."""
    dim = folder.pruned[weight]
    if weight not in folder.packed:
        return folder.rows(weight, rows, 1 - dim).movedim(dim, -1)
    values, positions = (folder.rows(f"{weight}_{part}", rows) for part in ("values", "positions"))
    inputs = folder.shape(weight)[dim]
    check_packed(values, positions, len(rows), inputs, folder.pattern)
    return unpack(values, positions, inputs, folder.pattern)

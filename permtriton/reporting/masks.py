"""Corners of pruned weights in the dense model's channel order, read row by row from the files."""

from collections.abc import Sequence

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.packing import check_packed, unpack
from permtriton.permutation import identity, inverse
from permtriton.reporting.folders import Compiled, kind_of, layer_of

CORNER = 128  # rows and columns of a picture, as in the paper


def pictured_linears(folders: Sequence[Compiled]) -> list[str]:
    """Returns the first linear of one site per kind, from the first layer to the last, that all folders can show.

    Stacks of experts and folders without sites in their record have none.
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
    outputs, inputs = _shape(folder, weight)
    site = next(site for site in folder.record["sites"] if linear in site["linears"])
    rows = next((entry["index"] for entry in folder.record.get("rows", []) if linear in entry["linears"]), None)
    columns = inverse(torch.tensor(site["index"]))
    from_row = identity(outputs) if rows is None else inverse(torch.tensor(rows))
    if (from_row.numel(), columns.numel()) != (outputs, inputs):
        raise ModelError(
            f"{folder.path}: {weight} is {outputs} x {inputs}, but permtriton.json orders {from_row.numel()} rows and "
            f"{columns.numel()} columns: one of them is damaged"
        )
    stored = _read_rows(folder, weight, from_row[:size].tolist(), inputs)
    return stored[:, columns[:size]] != 0


def _drawable(folder: Compiled) -> list[str]:
    """Returns the first linear of each site whose weight is stored by itself and whose row order is known."""
    if "rows" not in folder.record:
        return []
    names = [site["linears"][0] for site in folder.record.get("sites", []) if site["linears"]]
    return [name for name in names if f"{name}.weight" in folder.stored]


def _shape(folder: Compiled, weight: str) -> tuple[int, int]:
    """Returns output and input channels."""
    packed = folder.quantization.packed.get(weight) if folder.quantization else None
    shape = tuple(packed["shape"]) if packed else folder.stored[weight].shape[-2:]
    if len(shape) != 2:
        raise ModelError(f"{folder.path}: {weight} has {len(shape)} dimensions, expected 2: the checkpoint is damaged")
    return (shape[1], shape[0]) if _input_dim(folder, weight) == 0 else (shape[0], shape[1])


def _input_dim(folder: Compiled, weight: str) -> int:
    recorded = folder.record.get("pruned_weights")
    return 0 if isinstance(recorded, dict) and recorded.get(weight) == 0 else 1


def _read_rows(folder: Compiled, weight: str, rows: list[int], inputs: int) -> Tensor:
    """Returns rows of a weight, ``[len(rows), inputs]``, with its columns in the folder's order."""
    if folder.quantization is None or weight not in folder.quantization.packed:
        return _slices(folder, weight, rows, transposed=_input_dim(folder, weight) == 0)
    values, positions = (_slices(folder, f"{weight}_{part}", rows) for part in ("values", "positions"))
    check_packed(values, positions, len(rows), inputs, folder.pattern)
    return unpack(values, positions, inputs, folder.pattern)


def _slices(folder: Compiled, name: str, rows: list[int], *, transposed: bool = False) -> Tensor:
    tensor = folder.stored.get(name)
    if tensor is None:
        raise ModelError(f"{folder.path} does not hold {name}: the checkpoint is damaged")
    try:
        with safe_open(tensor.file, framework="pt") as opened:
            part = opened.get_slice(name)
            if transposed:
                return torch.cat([part[:, row : row + 1] for row in rows], 1).t()
            if len(tensor.shape) == 3:  # one more dimension of size 1: its module permutes at run time
                return torch.cat([part[0, row : row + 1] for row in rows])
            return torch.cat([part[row : row + 1] for row in rows])
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{tensor.file}: {name} cannot be read ({error}): the file is damaged") from error

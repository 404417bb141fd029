"""Importance of weights as factors: a few vectors per linear instead of a score matrix of the weight's size."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImportanceFactors:
    """The factors of one linear's scores, ``S = |W|^power * scale_C * (row_O + column_C)``."""

    power: int  # exponent of ``|W|``, 1 or 2
    scale: Tensor  # float32 ``[in_features]``
    row: Tensor | None = None  # float32 ``[out_features]``, or None: the factor ``row + column`` is left out
    column: Tensor | None = None  # float32 ``[in_features]``, given together with ``row``

    def scores(self, weight_CO: Tensor) -> Tensor:
        """Returns a weight's scores, both ``[in_features, out_features]``: float32, or float64 for a float64 weight."""
        scores = weight_CO.to(torch.promote_types(weight_CO.dtype, torch.float32), copy=True).abs_()
        if self.power == 2:
            scores.square_()
        if self.row is not None and self.column is not None:
            scores.mul_(self.row + self.column.unsqueeze(1))
        return scores.mul_(self.scale.unsqueeze(1))

    def of_channels(self, channels: slice | Tensor) -> "ImportanceFactors":
        column = None if self.column is None else self.column[channels]
        return ImportanceFactors(self.power, self.scale[channels], self.row, column)

    def of_rows(self, rows: slice, device: torch.device) -> "ImportanceFactors":
        row = None if self.row is None else self.row[rows].to(device)
        column = None if self.column is None else self.column.to(device)
        return ImportanceFactors(self.power, self.scale.to(device), row, column)

    def contiguous(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (scale, row, column), contiguous; ``scale`` thrice without a row, as kernels take three pointers."""
        scale = self.scale.contiguous()
        if self.row is None or self.column is None:
            return scale, scale, scale
        return scale, self.row.contiguous(), self.column.contiguous()

"""What a step finds and reports, as tests read it."""

from types import SimpleNamespace

import torch
from torch import Tensor

from permtriton.methods.step import Outcome


class Told:
    """What a step reports, with the values of each row of its history as attributes."""

    def __init__(self, outcome: Outcome) -> None:
        self.rows, self.kept = outcome.history, outcome.kept
        self.history = [SimpleNamespace(**row) for row in outcome.history]

    def same(self, other: "Told") -> bool:
        """Whether two runs are equal bit for bit, apart from their times."""
        histories = [[{**row, "seconds": 0.0} for row in each.rows] for each in (self, other)]
        return histories[0] == histories[1] and self.kept == other.kept


class Order(Told):
    """An order that a step has found, and what it reports."""

    def __init__(self, indices: dict[str, Tensor], outcome: Outcome) -> None:
        super().__init__(outcome)
        self.indices = indices

    def same_indices(self, other: "Order") -> bool:
        """Whether the orders are equal."""
        found = self.indices
        return found.keys() == other.indices.keys() and all(torch.equal(found[n], other.indices[n]) for n in found)

    def same(self, other: Told) -> bool:
        return super().same(other) and self.same_indices(other)

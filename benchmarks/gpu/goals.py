"""The goals of the rows of the table, in one place; benchmarks/NOTES.md lists them until a GPU has run."""

import math
from dataclasses import dataclass
from typing import Any

GOALS: dict[str, dict[str, tuple[float | None, float | None]]] = {  # row -> figure -> (least, most)
    "sparse_linear, 1 tokens": {"times faster than cuBLAS dense": (1.65, None)},
    "sparse_linear, 16 tokens": {"times faster than cuBLAS dense": (1.5, None)},
    "assignment": {"milliseconds": (None, 5.0), "times faster than serial scipy": (200.0, None)},
    "sinkhorn forward": {"of copy bandwidth": (0.8, None)},
    "sinkhorn forward + backward": {
        "times faster than eager": (20.0, None),
        "times faster than torch.compile": (5.0, None),
    },
    "nm_mask forward": {"of copy bandwidth": (0.8, None)},
    "nm_mask backward": {"of copy bandwidth": (0.5, None)},
    "swap_gains": {"1e12 pairs and rows a second": (3.0, None)},
    "permute 16384x11008": {"of copy bandwidth": (0.95, None)},
    "permute": {"times faster than the CUDA kernel": (0.95, 1.05)},
    "RMSNorm + permute": {"times the norm alone": (None, 1.03)},
    "learning step": {"times a dense forward + backward": (None, 1.05)},
    "2:4 prefill": {
        "of bare cuSPARSELt without permutation": (0.98, None),
        "times faster than cuBLAS dense": (1.0, None),
    },
}


@dataclass(frozen=True)
class Goal:
    """A figure and its goal.

    Attributes:
        name: of the figure, for people.
        value: measured.
        least, most: bounds, either or both; none for a figure that is only reported.
        row: of `GOALS`, from which the bounds are.
    """

    name: str
    value: float
    least: float | None = None
    most: float | None = None
    row: str | None = None

    def report(self, rehearse: bool) -> dict[str, Any]:
        """Returns the goal for the result file; a rehearsal, or a figure without a value, neither passes nor fails."""
        low, high, known = self.least, self.most, math.isfinite(self.value)
        inside = (low is None or self.value >= low) and (high is None or self.value <= high)
        passed = None if rehearse or not known or (low is None and high is None) else inside
        value = round(self.value, 4) if known else None
        return {"name": self.name, "value": value, "least": low, "most": high, "passed": passed, "of": self.row}


def goal(row: str, name: str, value: float) -> Goal:
    """Returns a figure with its bounds from `GOALS`.

    Raises:
        KeyError: it sets none for such a figure.
    """
    return Goal(name, value, *GOALS[row][name], row)

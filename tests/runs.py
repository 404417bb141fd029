"""What a step reports, as tests read it."""

from types import SimpleNamespace

from permtriton.driver.step import Outcome


class Told:
    """What a step reports, with the values of each row of its history as attributes."""

    def __init__(self, outcome: Outcome) -> None:
        self.rows, self.kept = outcome.history, outcome.kept
        self.history = [SimpleNamespace(**row) for row in outcome.history]

    def same(self, other: "Told") -> bool:
        """Whether two runs are equal bit for bit, apart from their times."""
        histories = [[{**row, "seconds": 0.0} for row in each.rows] for each in (self, other)]
        return histories[0] == histories[1] and self.kept == other.kept

"""N:M patterns, and the weights that have one."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from permtriton.errors import ConfigError, shown

if TYPE_CHECKING:  # the help of a command shows patterns, and must not wait for torch
    from torch import Tensor

MAX_GROUP = 32


@dataclass(frozen=True)
class NMPattern:
    """Keeps ``kept`` of every ``group`` consecutive input channels of each row of a weight (NVIDIA's N:M).

    Attributes:
        kept: weights kept per group, at least 1 and less than ``group``.
        group: consecutive input channels per group, at most 32.

    Raises:
        ConfigError: the numbers are out of range.
    """

    kept: int
    group: int

    def __post_init__(self) -> None:
        if not 0 < self.kept < self.group <= MAX_GROUP:
            raise ConfigError(
                f"sparsity pattern {self.kept}:{self.group} is not possible: N:M keeps N of every M weights, "
                f"with 0 < N < M <= {MAX_GROUP}; for example 2:4"
            )

    @classmethod
    def parse(cls, text: str) -> "NMPattern":
        """Reads ``"2:4"``.

        Raises:
            ConfigError: the text is not two integers joined by a colon, or the pattern is not possible.
        """
        match = re.fullmatch(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*", text)
        if match is None:
            raise ConfigError(f"sparsity pattern {shown(text)} is not understood: write N:M with integers, such as 2:4")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of_some(cls, text: str) -> "tuple[str, NMPattern]":
        """Reads ``"*.down_proj=4:8"``: which linears, and their pattern.

        Raises:
            ConfigError: the text has another form, or `parse` refuses the pattern.
        """
        linears, _, pattern = text.rpartition("=")
        if not linears:
            raise ConfigError(f"`pattern=` is {shown(text)}: expected LINEARS=N:M, such as *.down_proj=4:8")
        return linears, cls.parse(pattern)

    @property
    def sparsity(self) -> float:
        """The fraction of weights that become zero."""
        return 1 - self.kept / self.group

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}"


def in_words(sparsity: str, exceptions: Iterable[str], total: int) -> str:
    """Returns the patterns of pruned weights in words: ``2:4``, or ``2:4, but 4:8 in 30 of 210 weights``.

    Args:
        sparsity: the pattern of all weights but the exceptions.
        exceptions: the pattern of each exception.
    """
    others = " and ".join(f"{pattern} in {count}" for pattern, count in Counter(exceptions).items())
    return f"{sparsity}, but {others} of {total} weights" if others else sparsity


@dataclass(frozen=True)
class PrunedWeight:
    """The N:M pattern of a parameter, and where it applies."""

    dim: int  # its input dimension, along which groups are counted
    pattern: NMPattern

    def rows(self, weight: "Tensor") -> "Tensor":
        """Returns the parameter as ``[rows, in_features]``."""
        return weight.movedim(self.dim, -1).flatten(0, -2)

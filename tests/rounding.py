"""What rounding may change: sums that another kernel adds in another order, or in another layout."""

import torch
from torch import Tensor


def assert_equal_but_for_rounding(
    found: Tensor, expected: Tensor, roundings: float = 2, dtype: torch.dtype | None = None
) -> None:
    """Asserts that no value is off by more than some roundings of the largest one.

    Args:
        roundings: one where only the result is rounded; of sums of as many terms, about as many.
        dtype: what was rounded to; that of the results by default.
    """
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    allowed = roundings * torch.finfo(dtype or found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=allowed, atol=allowed * float(expected.detach().abs().max()))

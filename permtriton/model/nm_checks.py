"""Checks that a weight is N:M as it is stored, and that pruning kept as many weights as it should."""

import torch
from torch import Tensor

from permtriton.errors import VerificationError
from permtriton.model.checks import check_finite_tensor
from permtriton.util.sparsity import NMPattern


def check_weight(name: str, weight_OC: Tensor, pattern: NMPattern) -> None:
    """Checks that a weight ``[out_features, in_features]`` is N:M as it is stored, finite and free of ``-0.0``."""
    check_finite_tensor(name, weight_OC)
    if bool((weight_OC.signbit() & (weight_OC == 0)).any()):
        raise VerificationError(f"{name}: some zeros are -0.0, whose bits differ from those of 0.0")
    counts = (weight_OC != 0).unflatten(1, (-1, pattern.group)).sum(-1)
    if int(counts.max()) > pattern.kept:
        row, group = divmod(int(counts.argmax()), counts.shape[1])
        raise VerificationError(
            f"{name}: row {row}, group {group} holds {int(counts.max())} nonzero weights, "
            f"but {pattern} allows {pattern.kept}"
        )


def zeros_in_groups(weight_CO: Tensor, pattern: NMPattern) -> Tensor:
    """Returns the number of zeros per group of a weight ``[in_features, out_features]``, int16 ``[groups, out]``."""
    return (weight_CO == 0).unflatten(0, (-1, pattern.group)).sum(1, dtype=torch.int16)


def check_kept(name: str, weight_CO: Tensor, zeros_before: Tensor, pattern: NMPattern, allowed: float = 0.0) -> None:
    """Checks that every group of a weight keeps as many values as the pattern says, or fewer if it held zeros before.

    Args:
        weight_CO: pruned weight, ``[in_features, out_features]``.
        zeros_before: what `zeros_in_groups` returned before pruning.
        allowed: share of the groups that may keep fewer; above 0 where an update may cancel a weight exactly.
    """
    kept = pattern.group - zeros_in_groups(weight_CO, pattern)
    short = int((kept + zeros_before < pattern.kept).sum())
    if int(kept.max()) > pattern.kept or short > allowed * kept.numel():
        raise VerificationError(
            f"{name}: {short} of {kept.numel()} groups keep fewer weights than {pattern} says, and the fullest one "
            f"keeps {int(kept.max())}: expected {pattern.kept} in every group that held no zeros before. Nothing was "
            "saved; this is a bug of permtriton, please report it"
        )

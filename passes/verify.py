"""The checks that every compilation must pass. A failed one names what failed, and nothing is saved."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.errors import VerificationError
from permtriton.experts import TOLERANCE
from permtriton.forward import without_cache
from permtriton.plan import Plan, linear_module, weight_in_out
from permtriton.sparsity import NMPattern


def model_outputs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Returns the model's first output on ``ids``, float32 on the CPU (logits, or the last hidden state)."""
    return first_output(model, {"input_ids": ids.to(model.device)})


@torch.no_grad()
def first_output(model: PreTrainedModel, arguments: Mapping[str, Tensor]) -> Tensor:
    """Returns the model's first output on keyword arguments, float32 on the CPU."""
    with without_cache(model):
        return model(**arguments)[0].float().cpu()


def relative_difference(expected: Tensor, got: Tensor) -> float:
    """Returns the largest absolute difference relative to the largest expected value."""
    expected, got = expected.double(), got.double()
    scale = float(expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    return float((expected - got).abs().max()) / scale


def check_same_outputs(before: Tensor, after: Tensor, dtype: torch.dtype, stage: str) -> float:
    """Checks that an exact step left the outputs as they were.

    Returns:
        The largest difference relative to the largest output.

    Raises:
        VerificationError: it is larger than ``dtype`` explains.
    """
    difference = relative_difference(before, after)
    if not difference <= TOLERANCE[dtype]:
        raise VerificationError(
            f"{stage}: outputs differ by {difference:.1e} of their size, more than {TOLERANCE[dtype]:.0e} allowed in "
            f"{dtype}. Nothing was saved; please report this with the output of `permtriton inspect`"
        )
    return difference


def check_weight(name: str, weight_OC: Tensor, pattern: NMPattern) -> None:
    """Checks that a weight ``[out_features, in_features]`` is physically N:M, finite and free of ``-0.0``.

    Raises:
        VerificationError: it is not.
    """
    check_finite_tensor(name, weight_OC)
    if bool((weight_OC.signbit() & (weight_OC == 0)).any()):
        raise VerificationError(f"{name}: some zeros are -0.0, which packs and compares unlike 0.0")
    counts = (weight_OC != 0).unflatten(1, (-1, pattern.group)).sum(-1)
    if int(counts.max()) > pattern.kept:
        row, group = divmod(int(counts.argmax()), counts.shape[1])
        raise VerificationError(
            f"{name}: row {row}, group {group} holds {int(counts.max())} nonzero weights, "
            f"{pattern} allows {pattern.kept}"
        )


def check_finite_tensor(name: str, tensor: Tensor) -> None:
    """Checks that a tensor holds no NaN and no infinity.

    Raises:
        VerificationError: it does.
    """
    if not bool(tensor.isfinite().all()):
        raise VerificationError(f"{name}: {int((~tensor.isfinite()).sum())} of {tensor.numel()} values are not finite")


def check_pruned(model: nn.Module, plan: Plan, pattern: NMPattern) -> None:
    """Checks every pruned weight in memory.

    Raises:
        VerificationError: naming the first layer that is not as it must be.
    """
    for _, name in plan.linears():
        check_weight(name, weight_in_out(linear_module(model, name)).t(), pattern)

"""Tells torch.export which branches a model's code takes, and which rows it selects, by the values of tensors.

The model first runs on a few samples, and every Python value that its code takes from a tensor is recorded (`Answers`).
If all samples give the same values, such as that nothing is padded, they are returned at the same lines in the export.
"""

import os
import traceback
from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import product, takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Methods that turn a tensor into a Python value.
ASKED = {
    Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__format__,
}  # fmt: skip
ROW_NUMBERS = {torch.int64, torch.int32}
TORCH = f"{Path(torch.__file__).parent}{os.sep}"
CALLER = str(Path(__file__).with_name("trace.py"))

SAMPLES = 3
TOKEN_IDS = (8, 40)  # small enough for any vocabulary, but above the ids of padding, beginning and end

Place = tuple[str, ...]  # lines of code, the innermost first


class Answers(TorchFunctionMode):
    """Inside the context, records the Python values that a model's code takes from tensors, or returns recorded ones.

    A query for the positions at which a mask is true, such as the tokens of an expert, returns all positions instead,
    so that no expert is left out and no shape depends on values. The graph then computes other values than the model,
    but how operators combine channels does not depend on how many rows are taken.

    Args:
        earlier: recorded `answers` to return; None to record the first ones.

    Attributes:
        answers: the values that were taken, by the lines of code that took them.
        takes_all: whether the code queried the positions at which a mask is true.
    """

    def __init__(self, earlier: Mapping[Place, deque[Any]] | None = None) -> None:
        super().__init__()
        self.takes_all = False
        self._earlier = earlier or {}
        self.answers: defaultdict[Place, deque[Any]] = defaultdict(deque)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in ASKED:
            return self._answer(function, *args, **kwargs)
        if function in (torch.nonzero, Tensor.nonzero) or (function is torch.where and len(args) == 1):
            self.takes_all, mask = True, args[0]
            rows = torch.tensor(list(product(*map(range, mask.shape))), device=mask.device).view(-1, mask.ndim)
            rows = rows + 0 * torch.nonzero_static(mask, size=len(rows))  # so that the graph shows which mask decides
            return rows.unbind(1) if function is torch.where or kwargs.get("as_tuple", False) else rows
        if function is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype in ROW_NUMBERS:
            args = args[0], args[1] if args[1].ndim else self._answer(Tensor.item, args[1])
        return function(*args, **kwargs)

    def _answer(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        place = _place()
        remaining = self._earlier.get(place)
        answer = remaining.popleft() if remaining else function(*args, **kwargs)
        self.answers[place].append(answer)
        return answer


def samples_like(arguments: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Returns `SAMPLES` samples with the shapes of ``arguments``: random ids of ordinary tokens, or noise."""
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        if like.is_floating_point():
            return torch.randn(like.shape, generator=generator).to(like)
        return torch.randint(*TOKEN_IDS, like.shape, generator=generator).to(like)

    return [{name: drawn(tensor) for name, tensor in arguments.items()} for _ in range(SAMPLES)]


def _place() -> Place:
    """Returns the running lines of code up to the model's call in trace.py, the innermost first, except torch's."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    inside = takewhile(lambda place: place[0] != CALLER, frames)
    return tuple(f"{file}:{line}" for file, line in inside if not file.startswith(TORCH) and file != __file__)


def converted() -> Any:
    """Inside the context, ``module.to`` does nothing if the dtype is the same: torch.export cannot convert modules."""
    original = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        dtypes = {parameter.dtype for parameter in module.parameters()}
        return module if not kwargs and {*args} == dtypes else original(module, *args, **kwargs)

    return mock.patch.object(nn.Module, "to", to)

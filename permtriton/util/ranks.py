"""Ranks: the processes that ``torchrun`` starts. Each runs the model on its share of the sequences.

Sums over sequences (losses, gradients, Hessians) are added up over the ranks, so that all hold the same sums. Decisions
that follow from these sums are taken on one rank and sent to the others, and only the first rank writes files. The
library uses the default group of ``torch.distributed`` and starts none; without a group there is a single rank.

All ranks must reach the same collective operations in the same order. Work that one rank may repeat when its memory
runs out (`permtriton.util.micro_batch`) therefore contains no such operation, except at the end of the work.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from permtriton.errors import ConfigError, PermTritonError

Item = TypeVar("Item")
Result = TypeVar("Result")
_IN_STEP = ContextVar("_IN_STEP", default=False)


def count() -> int:
    return dist.get_world_size() if _started() else 1


def count_here() -> int:
    """Returns how many ranks share this machine's memory: as torchrun says, else the number of all ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", count())) if _started() else 1


def number() -> int:
    """This rank's number, from 0."""
    return dist.get_rank() if _started() else 0


# -- sequences: each rank runs its share, and sums are added up --------------------------------------------------------


def own(rows: Tensor) -> Tensor:
    """Returns this rank's share of the rows of a tensor, ``[share, ...]``: consecutive rows, possibly none."""
    return rows.tensor_split(count())[number()]


def own_rows(rows: int) -> Tensor:
    """Returns this rank's share of the numbers from 0 to ``rows - 1``, int64 ``[share]``."""
    return own(torch.arange(rows))


def check_shares(rows: int, ranks: int) -> None:
    """Raises a `ConfigError` if there are fewer sequences than ranks."""
    if rows < ranks:
        raise ConfigError(
            f"{ranks} processes cannot share {rows} calibration sequences: start at most {rows} (torchrun "
            "--nproc-per-node), or raise `samples=`"
        )


def parts(rows: Tensor, size: int) -> Sequence[Tensor]:
    """Returns this rank's share of sequence numbers in parts of at most ``size``; no part if the share is empty.

    If possible, all ranks have the same number of parts; inside `in_step`, a `ConfigError` is raised if they cannot.
    """
    if are_in_step():
        check_in_step(rows.numel(), size, count())
    share, most = own(rows), -(-rows.numel() // count())
    number = -(-most // size)
    if share.numel() < number or -(-share.numel() // size) == number:
        return share.split(size) if share.numel() else ()
    return share.tensor_split(number)


def check_in_step(rows: int, size: int, ranks: int) -> None:
    """Refuses sequences, of which at most ``size`` run together, if a rank would run less often than another."""
    least, most = rows // ranks, -(-rows // ranks)
    if least < -(-most // size):
        raise ConfigError(
            f"{ranks} processes that hold parts of the model must run equally often, but {rows} sequences are {most} "
            f"for some and {least} for others: choose a multiple of {ranks} for `samples=` and `batch_size=`, or "
            "another number of processes"
        )


@contextmanager
def in_step() -> Iterator[None]:
    """Inside the context, every rank must run the model equally often: runs are collective operations."""
    token = _IN_STEP.set(True)
    try:
        yield
    finally:
        _IN_STEP.reset(token)


def are_in_step() -> bool:
    return _IN_STEP.get()


def add_up(tensors: Iterable[Tensor]) -> None:
    """Adds each tensor up over all ranks, in place. The tensors of all ranks must have the same shapes and dtypes."""
    _each(tensors, lambda tensor, _: dist.all_reduce(tensor, async_op=True))


def total(value: float) -> float:
    sums = torch.tensor(value, dtype=torch.float64)
    add_up([sums])
    return float(sums)


def join(part: Tensor, rows: int) -> Tensor:
    """Returns one tensor ``[rows, ...]`` of the parts of all ranks, which are on the CPU and divided as by `own`.

    The part of a rank without a share may be any empty tensor.
    """
    if not _started():
        return part
    shape, dtype = on_first(lambda: (part.shape[1:], part.dtype))
    joined = torch.empty((rows, *shape), dtype=dtype)
    for source, place in enumerate(joined.tensor_split(count())):
        if place.shape[0]:
            if source == number():
                place.copy_(part)
            dist.broadcast(place, src=source)
    return joined


# -- decisions: taken on one rank, and sent to the others --------------------------------------------------------------


def on_first(decide: Callable[[], Result]) -> Result:
    """Runs ``decide`` on the first rank, and returns its result, whose tensors must be on the CPU, on every rank.

    A `PermTritonError` that ``decide`` raises is raised on every rank.
    """
    if not _started():
        return decide()
    results: list[Any] = [_attempt(decide) if number() == 0 else None]
    dist.broadcast_object_list(results, src=0)
    return _result(results[0])


def gather(value: Result) -> list[Result]:
    """Returns the ``value`` of each rank; tensors in a value must be on the CPU."""
    if not _started():
        return [value]
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


def dealt(items: Sequence[Item]) -> Sequence[Item]:
    """Returns the items that this rank works on: one of every ``count()`` consecutive items."""
    return items[number() :: count()]


def deal(items: Sequence[Item], work: Callable[[Item], Result]) -> list[Result]:
    """Returns on every rank ``work(item)`` for all items; each rank does its `dealt` share of the work.

    A `PermTritonError` of any rank is raised on every rank. Tensors in results must be on the CPU.
    """
    if not _started():
        return [work(item) for item in items]
    shares = list(map(_result, gather(_attempt(lambda: [work(item) for item in dealt(items)]))))
    return [shares[place % count()][place // count()] for place in range(len(items))]


def send_dealt(tensors: Sequence[Tensor]) -> None:
    """Sends each tensor, in place, from the rank that it is `dealt` to."""
    _each(tensors, lambda tensor, place: dist.broadcast(tensor, src=place % count(), async_op=True))


def send_from_first(tensors: Iterable[Tensor]) -> None:
    _each(tensors, lambda tensor, _: dist.broadcast(tensor, src=0, async_op=True))


def named_from_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns on every rank the ``tensors`` of the first rank, which must be on the CPU."""
    described = on_first(lambda: {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    if number():
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in described.items()}
    send_from_first(tensors.values())
    return dict(tensors)


@torch.no_grad()
def _each(tensors: Iterable[Tensor], start: Callable[[Tensor, int], Any]) -> None:
    """Runs a collective operation on each tensor, in place, if there are several ranks.

    NCCL refuses tensors that are not contiguous, and gloo treats the memory of any tensor as contiguous.

    Args:
        start: starts the operation, called with a tensor and its position among the tensors.
    """
    pairs = [(tensor, tensor.detach().contiguous()) for tensor in tensors] if _started() else []
    for work in [start(dense, place) for place, (_, dense) in enumerate(pairs)]:
        work.wait()
    for tensor, dense in pairs:
        torch.autograd.graph.increment_version(tensor)  # which collective operations do not do
        if not tensor.is_contiguous():
            tensor.copy_(dense)


def _attempt(work: Callable[[], Result]) -> Result | PermTritonError:
    try:
        return work()
    except PermTritonError as error:
        return error


def _result(attempt: Result | PermTritonError) -> Result:
    if isinstance(attempt, PermTritonError):
        raise attempt
    return attempt


def _started() -> bool:
    return dist.is_available() and dist.is_initialized()

"""Micro-batches: how many sequences run through the model at once, halved when memory runs out."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from permtriton.errors import MemoryTooSmallError, first_line
from permtriton.util import ranks

Result = TypeVar("Result")

# What torch's CPU allocator says: DefaultCPUAllocator on Linux, and the message of other systems.
NO_MEMORY = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


class MicroBatch:
    """The number of sequences per forward and backward pass of one stage, halved whenever memory runs out."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, work: Callable[[int], Result]) -> Result:
        """Returns ``work(size)``; where memory runs out, starts it again with half the size.

        The work must not use anything that a failed attempt has left, such as gradients.

        Raises:
            MemoryTooSmallError: memory runs out with one sequence, or where ranks run in step
                (`permtriton.util.ranks.in_step`): the other ranks would wait while this rank starts again.
        """
        while True:
            try:
                return work(self.size)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self.size == 1 or ranks.are_in_step():
                    how = "even with one sequence" if self.size == 1 else f"with {self.size} sequences"
                    raise MemoryTooSmallError(out_of_memory(error, f" {how} at a time")) from error
            # Only after the handler has ended: the error's traceback keeps the tensors of the failed attempt alive.
            self.size = self.size // 2
            gc.collect()
            torch.cuda.empty_cache()


def out_of_memory(error: BaseException, when: str = "") -> str:
    return (
        f"out of memory{when}: choose shorter or fewer sequences, or dtype bfloat16, or use a larger machine "
        f"({first_line(error)})"
    )

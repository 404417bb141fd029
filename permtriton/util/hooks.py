"""Hooks that are there for a while."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Inside the context, hooks are in place; they are removed at its end."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield

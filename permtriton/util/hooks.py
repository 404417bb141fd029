"""Hooks that are removed at the end of a context."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Removes hooks at the end of the context. If ``handles`` is a generator, it runs when the context begins."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield

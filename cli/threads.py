"""On how many threads a command runs: a small model is fastest on one, and is not kept waiting by other processes."""

import os
from contextlib import suppress

import torch

from permtriton.errors import PermTritonError
from permtriton.model.load import config_of
from permtriton.model.source import Source, resolve_device
from permtriton.util.progress import Progress

SMALL = 512  # hidden size up to which operators are too short to be shared among threads
SAID = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # how a user says it, to torch itself


def spare_threads(source: Source, progress: Progress) -> None:
    """Runs a small model on one thread from now on, unless the user named a number or there is a GPU.

    Where another process takes a core, all threads of an operator wait for the one that lost it.
    """
    if torch.get_num_threads() == 1 or any(map(os.environ.get, SAID)):
        return
    with suppress(PermTritonError):  # loading the model says it, and in its place
        if resolve_device(source.device).type == "cpu" and _hidden_size(source) <= SMALL:
            progress.say(f"one thread, because the model is small; {SAID[0]}={torch.get_num_threads()} takes more")
            torch.set_num_threads(1)


def _hidden_size(source: Source) -> int:
    if source.gguf is not None:
        return min(source.gguf.stored["token_embd.weight"].shape)
    size = getattr(config_of(source).get_text_config(), "hidden_size", None)
    return size if isinstance(size, int) else SMALL + 1

"""Under ``torchrun``: connects the ranks at the start of a command; if one fails, ``torchrun`` ends the others."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from permtriton.cli.console import AGAIN
from permtriton.errors import ConfigError, PermTritonError, first_line

PATIENCE = timedelta(days=1)  # of a collective operation, because rank 0 may compute for hours while others wait


def launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Whether this process prints and writes: it is the first rank, or the only one."""
    return not launched() or os.environ["RANK"] == "0"


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Inside the ``with`` block, the processes of ``torchrun`` are the ranks of torch's default group.

    The block ends when all ranks have reached its end. Without ``torchrun`` nothing happens.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``; on GPUs each rank takes the GPU whose number is its local rank.
    """
    if not launched():
        yield
        return
    import torch.distributed as dist

    rank = os.environ["RANK"]
    # A rank that waits for others is in C++ code, during which a handler of SIGTERM in Python would never run.
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        dist.init_process_group(_backend(device), timeout=PATIENCE)
        yield
        dist.barrier()
    except PermTritonError as error:
        error.args = (f"rank {rank}: {error}" if rank != "0" else str(error),)
        raise
    except RuntimeError as error:
        words = str(error).lower()
        if not isinstance(error, dist.DistError) and not any(name in words for name in ("gloo", "nccl", "connection")):
            raise
        raise PermTritonError(f"rank {rank} stops: another rank has ended ({first_line(error)}); {AGAIN}") from error
    signal.signal(signal.SIGTERM, handler)
    dist.destroy_process_group()


def _backend(device: str) -> str:
    import torch

    from permtriton.model.source import resolve_device

    if resolve_device(device).type == "cpu":
        return "gloo"
    local = int(os.environ["LOCAL_RANK"])
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"torchrun starts {os.environ['LOCAL_WORLD_SIZE']} processes on this machine, which has "
            f"{torch.cuda.device_count()} usable GPUs: use --nproc-per-node {torch.cuda.device_count()}"
        )
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"

"""Under ``torchrun``: joins the ranks at the start of a command, and ends all of them when one ends.

A rank that waits for another in a collective operation is in C++ and would wait for hours. So a thread of every rank
gives signs of life through the key-value store that ``torchrun`` starts, and watches the next rank's. It also takes the
signal by which ``torchrun`` ends the ranks that are left.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from permtriton.cli.console import AGAIN, end_process
from permtriton.errors import ConfigError, PermTritonError, first_line

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT, SILENCE = 1.0, 30.0  # seconds between two signs of life; seconds without one after which a rank counts as dead
START = 600.0  # the same before its first one: torchrun itself sees one that ends while it starts
AGREEMENT = 5.0  # seconds in which the first rank may report the same error
PATIENCE = timedelta(
    days=30
)  # of a collective operation: rank 0 may decide something for hours, and deaths are watched
ENDED = "ended"


class SaidElsewhere(SystemExit):
    """Ends a rank whose error the first rank prints."""


def launched() -> bool:
    """Whether ``torchrun`` started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Whether this process prints and writes: it is the first rank, or the only one."""
    return not launched() or os.environ["RANK"] == "0"


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Inside the ``with`` block, the processes of ``torchrun`` are the ranks of torch's default group.

    The block ends when all ranks have reached its end; what comes after it may take one rank longer. Without
    ``torchrun`` nothing happens.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``; on GPUs each rank takes the one with its number on this machine.

    Raises:
        ConfigError: this machine has fewer GPUs than ranks.
    """
    if not launched():
        yield
        return
    if hasattr(signal, "pthread_sigmask"):  # before torch starts threads: they inherit it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    watch = _Watch(_store(hosts), rank, ranks)
    try:
        store = dist.PrefixStore("group", _store())
        dist.init_process_group(_backend(device), store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
        yield
        dist.barrier()
    except BaseException as error:
        watch.failed(error)
        raise
    watch.stop()
    dist.destroy_process_group()
    if hasattr(signal, "pthread_sigmask"):  # the thread that took it has ended
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _store(hosts: bool = False) -> "Store":
    """Returns a connection of its own to ``torchrun``'s store, which the first rank may have to host.

    With ``--max-restarts`` the store outlives the ranks, so that each start has keys of its own in it. On several
    machines, which may count their starts differently, ranks then do not find each other, and end.
    """
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=hosts, wait_for_workers=False)
    return PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


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


class _Watch:
    """A thread that gives signs of life, and ends this process when another rank has ended."""

    def __init__(self, store: "Store", rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._stopped, self._failing = threading.Event(), False
        store.set(f"process {rank}", f"{os.getpid()} {socket.gethostname()}")
        self._thread = threading.Thread(target=self._run, name="watch over the ranks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, where all ranks have come to their end."""
        self._stopped.set()
        self._thread.join()

    def failed(self, error: BaseException) -> None:
        """Tells the other ranks that this one ends with an error.

        Does not return where the error only follows from the end of another rank.

        Raises:
            SaidElsewhere: the first rank has the same error, and prints it.
        """
        if not isinstance(error, PermTritonError | KeyboardInterrupt) and _of_collective(error):
            self._thread.join(2 * SILENCE)  # the thread finds out who ended, and ends this process
        self._failing = True
        message = first_line(error)
        own, first = f"error {self._rank}", "error 0"
        try:
            self._store.set(own, message)
            if self._rank and isinstance(error, PermTritonError | KeyboardInterrupt):
                until = time.monotonic() + AGREEMENT
                while time.monotonic() < until:  # waiting in the store would keep the thread from it
                    if self._store.check([first]) and self._store.get(first).decode() == message:
                        raise SaidElsewhere(2)
                    time.sleep(BEAT / 10)
        except RuntimeError:  # the store is gone
            pass
        self._announce(f"rank {self._rank} ended with an error: {message}")
        if self._rank and isinstance(error, PermTritonError):
            error.args = (f"rank {self._rank}: {error}",)

    def _announce(self, line: str) -> None:
        with suppress(RuntimeError):
            self._store.set(ENDED, line)

    def _run(self) -> None:
        neighbour = (self._rank + 1) % self._ranks
        beats, last, heard = 0, b"", time.monotonic()
        while True:
            told_to_end = _wait(BEAT, self._stopped)
            if self._stopped.is_set():
                return
            try:
                beats += 1
                self._store.set(f"beat {self._rank}", str(beats))
                if self._failing:  # it ends by itself, with a line of its own
                    continue
                if self._store.check([ENDED]):
                    self._end(self._store.get(ENDED).decode())
                if told_to_end:
                    self._end(self._who_is_gone())
                beat = self._store.get(f"beat {neighbour}") if self._store.check([f"beat {neighbour}"]) else b""
            except RuntimeError:
                self._end("torchrun's store does not answer: its machine is gone, or torchrun was killed there")
            if beat != last:
                last, heard = beat, time.monotonic()
            elif time.monotonic() - heard > (limit := SILENCE if last else START):
                why = f"rank {neighbour} has given no sign of life for {limit:.0f} s"
                self._announce(why)
                self._end(why)

    def _who_is_gone(self) -> str:
        """Returns what ``torchrun``'s signal to end means: which ranks of this machine are gone or have not begun."""
        import psutil

        gone, missing = [], []
        for rank in range(self._ranks):
            if not self._store.check([f"process {rank}"]):
                missing.append(str(rank))
                continue
            number, host = self._store.get(f"process {rank}").decode().split()
            try:
                ended = psutil.Process(int(number)).status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                ended = True
            if ended and host == socket.gethostname():
                gone.append(str(rank))
        if gone:
            return f"rank {', '.join(gone)} has ended (killed, or out of memory: torchrun's report names its exit code)"
        if missing:
            who = f"rank {', '.join(missing)} had not begun"
            return f"{who}: it has ended (torchrun's report names its exit code), or torchrun was told to end"
        return "torchrun ends all ranks: it was told to, or a rank on another machine has ended"

    def _end(self, why: str) -> None:
        end_process(f"rank {self._rank} stops: {why}; no half-written output is left; {AGAIN}", 2)


def _wait(seconds: float, stopped: threading.Event) -> bool:
    """Waits, and returns whether ``torchrun`` has told this process to end meanwhile."""
    if not hasattr(signal, "sigtimedwait"):  # macOS: the signal ends the process without a word
        stopped.wait(seconds)
        return False
    return signal.sigtimedwait({signal.SIGTERM}, seconds) is not None


def _of_collective(error: BaseException) -> bool:
    """Whether an error is one that a collective operation raises where another rank has ended."""
    from torch.distributed import DistError

    words = str(error).lower()
    return isinstance(error, DistError) or any(name in words for name in ("gloo", "nccl", "connection"))

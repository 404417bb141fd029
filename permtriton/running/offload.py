"""Tensors in files: how a model larger than memory is compiled.

Large parameters, and large tensors beside them, are shared mappings of files in one folder. The kernel reads their
pages when they are used and writes changed ones back when memory is short, so everything works on them in place as on
any tensor, and gives the same bits. The files have no name: the system removes them with the process, however that
ends.
"""

import errno
import mmap
import os
import resource
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from permtriton.errors import ConfigError, OutputError
from permtriton.running.store import Store
from permtriton.util.hooks import hooked
from permtriton.util.machine import format_bytes
from permtriton.util.output_files import problem_of, real_path

SMALLEST = 1 << 20  # bytes of a tensor that goes into a file; norms and biases stay in memory
IN_MEMORY = ("tmpfs", "ramfs")
ASYNC_LOAD = "HF_DEACTIVATE_ASYNC_LOAD"  # else transformers reads tensors ahead that are not in files yet

NO_GPU = (
    "offload keeps weights in files, which only a CPU can work on in place, but the device is {device}: choose "
    "`device=cpu`, or leave `offload=` out"
)


class OffloadFolder(Store):
    """A folder whose disk takes the place of memory.

    Raises:
        ConfigError: there is no such folder, it cannot be written, or it lies in memory.
    """

    one_layer = True

    def __init__(self, folder: Path) -> None:
        self.folder = real_path(folder)
        if not self.folder.is_dir():
            raise ConfigError(f"offload folder {folder} is not there: make it on a disk first")
        if problem := problem_of(self.folder):
            raise ConfigError(f"offload folder {folder} cannot be written: {problem}")
        if _file_system(self.folder) in IN_MEMORY:
            raise ConfigError(f"offload folder {folder} lies in memory ({_file_system(self.folder)}): choose a disk")
        self._maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(ValueError, OSError):  # macOS allows fewer than it names
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each mapping keeps a file open

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Returns a tensor of zeros in a file, or in memory if it is small; the space is on the disk already.

        Raises:
            OutputError: the disk is full or fails.
        """
        size = dtype.itemsize
        for length in shape:
            size *= length
        if size < SMALLEST:
            return torch.zeros(shape, dtype=dtype)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)  # on a full disk, a write to a mapping kills the process
                else:
                    file.truncate(size)
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            problem, many = error.strerror or error, error.errno in (errno.EMFILE, errno.ENFILE)
            advice = "raise the limit of open files" if many else "free some space, or choose a folder on another disk"
            raise OutputError(
                f"offload folder {self.folder} cannot hold {format_bytes(size)} more: {problem}; {advice}"
            ) from error
        tensor = torch.frombuffer(mapped, dtype=dtype)
        self._maps[tensor.data_ptr()] = mapped
        return tensor.view(tuple(shape))

    def moved(self, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy of a tensor in a file; one that is in a file or small is returned as it is."""
        if self.holds(tensor) or tensor.numel() * tensor.element_size() < SMALLEST:
            return tensor
        return self.copied(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is at the start of one of the files."""
        return tensor.data_ptr() in self._maps

    def copied(self, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy of a tensor, in a file unless it is small.

        Raises:
            OutputError: as `empty`.
        """
        copy = self.empty(tensor.shape, dtype=tensor.dtype)
        copy.copy_(tensor.detach())
        self.release()
        return copy

    def move(self, model: nn.Module) -> None:
        """Moves the large parameters of a model, which keep their identity, into files.

        Raises:
            ConfigError: they are on a GPU.
            OutputError: as `empty`.
        """
        for parameter in model.parameters():
            self._move(parameter)

    def _move(self, parameter: nn.Parameter) -> None:
        if parameter.device.type == "meta":
            return
        if parameter.device.type != "cpu":
            raise ConfigError(NO_GPU.format(device=parameter.device))
        parameter.data = self.moved(parameter.data)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside the ``with`` block, every large parameter that a module on the CPU is given moves into a file."""

        def moved(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None:
                self._move(parameter)

        before = os.environ.get(ASYNC_LOAD)
        os.environ[ASYNC_LOAD] = "1"
        try:
            with register_module_parameter_registration_hook(moved):
                yield
        finally:
            del os.environ[ASYNC_LOAD]
            if before is not None:
                os.environ[ASYNC_LOAD] = before

    def free(self) -> int:
        """Returns the free bytes of the disk."""
        return shutil.disk_usage(self.folder).free

    def release(self) -> None:
        """Takes the pages of all files out of this process; the kernel may then give them up, and brings them back."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in list(self._maps.values()):
                mapped.madvise(mmap.MADV_DONTNEED)

    @contextmanager
    def working(self, model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
        """Moves a model's parameters; inside the ``with`` block, pages are released whenever one of its layers has run.

        Raises:
            ConfigError: it is, or shall run, on a GPU.
            OutputError: as `empty`.
        """
        if device is not None and device.type != "cpu":
            raise ConfigError(NO_GPU.format(device=device))
        self.move(model)
        layers = {layer for each in model.modules() if isinstance(each, nn.ModuleList) for layer in each}
        with hooked(layer.register_forward_hook(lambda *_: self.release()) for layer in layers):
            yield


def _file_system(folder: Path) -> str:
    """Returns the type of the file system that a folder is on; empty if it is not known."""
    mounts = [each for each in psutil.disk_partitions(all=True) if folder.is_relative_to(each.mountpoint)]
    return max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else ""

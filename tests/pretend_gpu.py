"""A GPU that is not there: its tensors are on the CPU, and an operator that mixes them with others fails, as on a GPU.

Inside `PretendGpu`, tensors that are made on, or moved to, ``cuda:0`` say that they are there, and so does what follows
from them. It also counts the bytes that are there.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable
from torch.export import ExportedProgram
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
# What may read tensors of both: copies, and what takes an index from the CPU.
MIXING = ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "set_", "set_data")


class PretendGpu:
    """See the module.

    Attributes:
        bytes: its size, of which it says what is free; more fits.
        most: the most bytes of tensors that were there at once.
    """

    def __init__(self, bytes: int = 1 << 36) -> None:
        self.bytes = bytes
        self._there: dict[int, StorageWeakRef] = {}
        self._bound = 0  # at least the bytes that are there
        self.most, self.tracing, self.asked = 0, False, False

    @contextmanager
    def here(self) -> Iterator["PretendGpu"]:
        """Inside the ``with`` block, there is such a GPU."""
        with ExitStack() as stack:
            for owner, name in ((torch.export, "export"), (ExportedProgram, "run_decompositions")):
                stack.enter_context(mock.patch.object(owner, name, self._tracing(getattr(owner, name))))
            # Beneath Python, tensors are on the CPU.
            checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
            stack.enter_context(mock.patch.dict(checks, {"default": checks["none"]}))
            for name, answer in self._answers().items():
                stack.enter_context(mock.patch(f"torch.cuda.{name}", answer))
            stack.enter_context(_Functions(self))
            stack.enter_context(_Operators(self))
            yield self

    def _answers(self) -> dict[str, Callable[..., Any]]:
        """Returns what ``torch.cuda`` says of the GPU, by the name of the function."""
        return {
            "mem_get_info": lambda *_: (self.bytes - self._alive(), self.bytes),
            "synchronize": lambda *_: None,
            "get_device_name": lambda *_: "a GPU",
        }

    def _tracing(self, trace: Callable[..., ExportedProgram]) -> Callable[..., ExportedProgram]:
        """Returns ``trace``, a function of torch.export, which then traces as on a CPU.

        Of a model that is on the GPU, the graph says afterwards that its inputs, and what it makes, are there.
        """

        @functools.wraps(trace)
        def traced(first: nn.Module | ExportedProgram, *positional: Any, **named: Any) -> ExportedProgram:
            module = first if isinstance(first, nn.Module) else first.state_dict
            values = module.parameters() if isinstance(module, nn.Module) else module.values()
            there = any(map(self.holds, values))
            self.tracing = True
            try:
                if isinstance(first, ExportedProgram):
                    _place(first, CPU)
                with _disable_current_modes():
                    found = trace(first, *positional, **named)
                if there:
                    _place(found, GPU)
            finally:
                self.tracing = False
            return found

        return traced

    def holds(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            found = self._there.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()

    def take(self, values: Any) -> Any:
        """Notes that tensors are there."""
        with torch._C.DisableTorchFunction():
            for each in pytree.tree_leaves(values):
                if isinstance(each, Tensor):
                    self._add(each.untyped_storage())
        return values

    def _add(self, storage: torch.UntypedStorage) -> None:
        before = self._there.get(storage._cdata)
        if before is None or before.expired():
            self._there[storage._cdata] = StorageWeakRef(storage)
            self._bound += storage.nbytes()
            if self._bound > self.most:
                self.most = max(self.most, self._alive())

    def _alive(self) -> int:
        """Returns the bytes of what is there."""
        self._there = {key: each for key, each in self._there.items() if not each.expired()}
        self._bound = sum(each.nbytes() for each in map(torch.UntypedStorage._new_with_weak_ptr, self._there))
        return self._bound


class _Functions(TorchFunctionMode):
    """Answers what is said of devices in Python."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, function, types, args=(), kwargs=None):
        before, self._gpu.asked = self._gpu.asked, True
        try:
            return self._answer(function, args, dict(kwargs or {}))
        finally:
            self._gpu.asked = before

    def _answer(self, function, args, kwargs):
        gpu = self._gpu
        if gpu.tracing:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if function == Tensor.backward:  # by the engine itself, so that this sees what Python does in it
            gpu.asked = False
            tensor, gradient = args[0], kwargs.get("gradient", args[1] if len(args) > 1 else None)
            gradient = torch.ones_like(tensor) if gradient is None else gradient
            with _Functions(gpu):
                return Variable._execution_engine.run_backward(
                    (tensor,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        if function == Tensor.device.__get__:
            return GPU if gpu.holds(args[0]) else function(*args)
        if function == Tensor.is_cuda.__get__:
            return gpu.holds(args[0])
        if name in ("cpu", "to", "cuda") and isinstance(args[0], Tensor):
            return self._moved(function, args, kwargs)
        if name.startswith("new_") and "device" not in kwargs:
            found = function(*args, **kwargs)
            return gpu.take(found) if gpu.holds(args[0]) else found
        if "device" in kwargs:
            wanted = _device(kwargs["device"])
            if wanted is not None and wanted.type == "cuda":
                return gpu.take(function(*args, **{**kwargs, "device": CPU}))
        return function(*args, **kwargs)

    def _moved(self, function, args, kwargs):
        tensor, gpu = args[0], self._gpu
        others = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, Tensor)]
        devices = [found for each in (*args[1:], kwargs.get("device")) if (found := _device(each)) is not None]
        if others:
            devices = [GPU if gpu.holds(others[0]) else CPU]
        if function.__name__ in ("cpu", "cuda"):
            devices = [CPU if function.__name__ == "cpu" else GPU]
        args = tuple(CPU if _device(each) is not None else each for each in args)
        if "device" in kwargs:
            kwargs["device"] = CPU
        here = gpu.holds(tensor)
        if not devices or (devices[0].type == "cuda") == here:
            found = function(*args, **kwargs)
            return gpu.take(found) if here else found
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            found = function(*args, **kwargs)
            found = found.clone() if found.untyped_storage()._cdata == tensor.untyped_storage()._cdata else found
        return gpu.take(found) if devices[0].type == "cuda" else found


def _place(program: ExportedProgram, device: torch.device) -> None:
    """Says that a graph's inputs, and what it makes, are on a device."""
    for node in program.graph.nodes:
        if node.op == "call_function" and node.kwargs.get("device") is not None:
            node.update_kwarg("device", device)
        if node.op == "placeholder" and isinstance(node.meta.get("val"), FakeTensor):
            with node.meta["val"].fake_mode:
                node.meta["val"] = node.meta["val"].to(device)


def _device(value: Any) -> torch.device | None:
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"):
        return torch.device(value)
    return None


class _Operators(TorchDispatchMode):
    """Refuses operators on tensors of both devices, and notes where their results are."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._gpu.tracing:
            return operator(*args, **kwargs)
        if (wanted := _device(kwargs.get("device"))) is not None and wanted.type == "cuda":
            return self._gpu.take(operator(*args, **{**kwargs, "device": CPU}))
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        there = [self._gpu.holds(each) for each in tensors]
        name = operator.overloadpacket.__name__ if hasattr(operator, "overloadpacket") else str(operator)
        if any(there):
            here = [each for each, is_there in zip(tensors, there, strict=True) if not is_there and each.ndim]
            if here and name not in MIXING:
                raise RuntimeError(f"{operator}: tensors on the GPU and on the CPU, of {[*here[0].shape]}")
        found = operator(*args, **kwargs)
        elsewhere = self._gpu.asked and _device(kwargs.get("device")) == CPU
        if any(there) and (name != "copy_" or there[0]) and not elsewhere:
            self._gpu.take(found)
        return found

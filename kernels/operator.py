"""Custom operators of torch: each registers a reference in plain torch, a GPU launcher and a gradient under one name.

A parameter that is a dataclass is passed to torch as one parameter per field, in the order of the fields, so that no
list of names is written twice: ``importance: ImportanceFactors`` becomes ``importance_power`` and so on.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn

from permtriton.errors import ModelError
from permtriton.kernels.launch import has_kernels, triton

P = ParamSpec("P")
R = TypeVar("R")
Gradient = Callable[..., Mapping[str, Tensor | Callable[[], Tensor] | None]]
_has_kernels = functools.cache(has_kernels)


def _accept(*_: Any) -> bool:
    return True


def operator(
    fake: Callable[..., Any],
    *,
    check: Callable[..., object] = _accept,
    launcher: Callable[..., Any] | None = None,
    supports: Callable[..., bool] = _accept,
    gradient: Gradient | None = None,
    keeps: Sequence[str | int] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that registers a function as ``torch.ops.permtriton.<name>`` and makes it call the operator.

    Its name is that of the function, without ``_reference``. The function itself is the reference: it runs on a CPU,
    and on a GPU where the launcher does not support a call, or where the first tensor is empty. ``fake``, ``check``,
    ``launcher`` and ``supports`` take the function's arguments.

    Args:
        fake: Returns empty results of the right shapes and dtypes.
        check: Raises an error about arguments that do not fit, before the function, the launcher or ``fake`` runs.
        launcher: Computes the same results on the GPU of the first argument, which is made the current GPU: Triton
            launches there, whichever device the tensors are on. Not used without Triton, or if the GPU is too old.
        supports: Whether the launcher can compute a call; by default, it can compute every call.
        gradient: Takes the gradient of the first result, then the values of ``keeps``; returns, by parameter name, a
            gradient, or a function that computes it and is called only if that gradient is needed.
        keeps: What the forward pass saves for ``gradient``: names of parameters, and indices of results.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters, name = _Parameters(function), function.__name__.removesuffix("_reference")

        def on_gpu(first: Any, arguments: Iterable[Any]) -> Any:
            check(*arguments)
            with torch.cuda.device(first.device):
                launches = _has_kernels(first.device) and first.numel() and supports(*arguments)
                run: Any = launcher if launches else function
                return run(*arguments)

        reference = parameters.flattened(function, check)
        made: Any = torch.library.custom_op(f"permtriton::{name}", reference, mutates_args=())
        made.register_fake(parameters.flattened(fake, check))
        has_launcher = launcher is not None and triton is not None
        if has_launcher:
            made.register_kernel("cuda")(
                lambda *flat: on_gpu(_on_one_device(name, flat), parameters.structured(flat).values())
            )
        if gradient is not None:
            _register_gradient(made, parameters, gradient, keeps)
        direct, defaults = has_launcher and not parameters.hold_tensors, tuple(parameters.defaults.values())
        required = len(parameters.types) - len(defaults)

        @functools.wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            if direct and not named and _is_plain(arguments):
                return on_gpu(arguments[0], (*arguments, *defaults[len(arguments) - required :]))
            if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
                return function(*arguments, **named)  # ONNX export supports torch's own operators only
            return getattr(torch.ops.permtriton, name)(*parameters.flat(arguments, named))

        return call

    return decorate


def _on_one_device(name: str, flat: Sequence[Any]) -> Any:
    """Returns the first tensor. All must be on its GPU: a kernel would take other pointers for some of that GPU."""
    device = flat[0].device
    for one in flat:
        if isinstance(one, Tensor) and one.device != device:
            raise ModelError(f"{name}: tensors on {device} and {one.device}: move them to one device")
    return flat[0]


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _is_plain(arguments: Sequence[Any]) -> bool:
    """Whether a call can bypass torch's dispatcher, whose Python code takes longer than the kernel.

    A call can do so on one GPU, outside of torch.compile, without gradients, tensor subclasses, transforms and modes.
    """
    if torch.compiler.is_compiling() or not _on_gpu(arguments[0]):
        return False
    learns, device = torch.is_grad_enabled(), arguments[0].device
    for one in arguments:
        if isinstance(one, Tensor):
            known = type(one) in (Tensor, nn.Parameter) and one.device == device
            if not known or (learns and one.requires_grad):
                return False
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return not modes and torch._C._functorch.peek_interpreter_stack() is None


class _Parameters:
    """A function's parameters, and its operator's: there each dataclass becomes one parameter per field."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.types = get_type_hints(function)
        self.result = self.types.pop("return")
        parameters = inspect.signature(function).parameters.values()
        self.defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        self.parts: dict[str, tuple[str, ...]] = {}  # names of fields; empty for a parameter that is no dataclass
        self.flat_types: dict[str, Any] = {}
        for name, kind in self.types.items():
            inner = get_type_hints(kind) if is_dataclass(kind) else {}
            self.parts[name] = tuple(inner)
            self.flat_types |= {f"{name}_{part}": inner[part] for part in inner} or {name: kind}
        of_fields = [kind for name, kind in self.flat_types.items() if name not in self.types]
        self.hold_tensors = any(Tensor in (kind, *get_args(kind)) for kind in of_fields)  # whether a dataclass does

    def flattened(self, run: Callable[..., Any], check: Callable[..., object]) -> Callable[..., Any]:
        """Returns a function with the operator's signature that joins dataclasses and calls ``check``, then ``run``."""

        def of_flat(*flat: Any) -> Any:
            arguments = self.structured(flat).values()
            check(*arguments)
            return run(*arguments)

        made = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind,
                              default=self.defaults.get(name, inspect.Parameter.empty))
            for name, kind in self.flat_types.items()
        ]  # fmt: skip
        of_flat.__signature__ = inspect.Signature(made, return_annotation=self.result)  # type: ignore[attr-defined]
        return of_flat

    def flat(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Returns the operator's arguments from the function's, where dataclasses are split into their fields."""
        values = {**self.defaults, **named, **dict(zip(self.types, arguments, strict=False))}
        return [part for name in self.types for part in self.split(name, values[name])]

    def structured(self, flat: Sequence[Any]) -> dict[str, Any]:
        """Returns the function's arguments, by name, from the operator's, of which torch omits trailing defaults."""
        left_out = len(self.flat_types) - len(flat)
        values = iter([*flat, *list(self.defaults.values())[len(self.defaults) - left_out :]])
        return {name: self.joined(name, values) for name in self.types}

    def split(self, name: str, value: Any) -> list[Any]:
        """Returns the operator's arguments for the function's argument ``name``."""
        return [getattr(value, part) for part in self.parts[name]] or [value]

    def joined(self, name: str, flat: Iterator[Any]) -> Any:
        """Returns the function's argument ``name``, taking the operator's arguments for it from ``flat``."""
        return self.types[name](*(next(flat) for _ in self.parts[name])) if self.parts[name] else next(flat)


def _register_gradient(made: Any, parameters: _Parameters, gradient: Gradient, keeps: Sequence[str | int]) -> None:
    def keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        arguments, kept = parameters.structured(inputs), []
        for one in keeps:
            kept += [output[one]] if isinstance(one, int) else parameters.split(one, arguments[one])
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in kept))
        ctx.others = [None if isinstance(value, Tensor) else value for value in kept]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        values = iter([other if kept is None else kept for kept, other in zip(tensors, ctx.others, strict=True)])
        kept = [next(values) if isinstance(one, int) else parameters.joined(one, values) for one in keeps]
        input_grads = gradient(grads[0], *kept)
        needed = zip(parameters.flat_types, ctx.needs_input_grad, strict=False)  # torch omits trailing defaults
        chosen = [input_grads.get(name) if is_needed else None for name, is_needed in needed]
        return tuple(one() if callable(one) and not isinstance(one, Tensor) else one for one in chosen)

    made.register_autograd(backward, setup_context=keep)

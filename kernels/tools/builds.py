"""What is compiled ahead of time: real launches, recorded on the meta device instead of run (`builds_of`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from permtriton.kernels.autotune import forced
from permtriton.kernels.launch import Config, Launch, recorded


@dataclass(frozen=True)
class Build:
    """One kernel to compile ahead of time.

    Attributes:
        name: Kernel, input and configuration, for people; unique.
        launch: What is compiled.
        default: Whether it runs without autotuning.
        aligned: Whether it is launched only where sizes and strides are multiples of 16.
    """

    name: str
    launch: Launch
    default: bool
    aligned: bool = False


def builds_of(
    about: str,
    call: Callable[[], object],
    table: str = "",
    configs: Sequence[Config] = (),
    default: bool = True,
    aligned: bool = False,
) -> Iterator[Build]:
    """Yields a build for each kernel that ``call()`` launches, in every configuration of a table.

    Args:
        about: The input: dtype and shape, for the name.
        call: Makes its tensors and calls a launcher; runs with the meta device as the default one. Numbers that the
            kernels should not take as constants must differ from 1.
        table: Name that the launcher gives to `config_for`; none where it has no table.
        configs: The table; the first configuration is the default one.
        default: Whether the first configuration counts as a default.
        aligned: Whether the launcher chooses these kernels only where sizes and strides are multiples of 16.
    """
    for number, config in enumerate(configs or (None,)):
        with forced(table, config) if config else nullcontext(), torch.device("meta"), recorded() as launches:
            call()
        constants = "".join(f" {name}={value}" for name, value in config.constants.items()) if config else ""
        for launch in launches:
            options = " ".join(f"{value} {name.removeprefix('num_')}" for name, value in launch.options.items())
            name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
            yield Build(f"{name} {about}{constants} {options}", launch, default and number == 0, aligned)


def distinct(builds: Iterable[Build]) -> list[Build]:
    """Returns each launch once, as the strictest of its builds: some configurations differ in their grid alone."""
    strictest: dict[Any, Build] = {}
    for build in builds:
        before = strictest.setdefault(build.launch.key, build)
        if (build.default, not build.aligned) > (before.default, not before.aligned):
            strictest[build.launch.key] = build
    return list(strictest.values())


def name_of(dtype: torch.dtype) -> str:
    """Returns Triton's name of a floating-point dtype: ``bf16``."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]

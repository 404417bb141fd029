"""`permtriton doctor`: what this machine is, and the GPU kernels compiled without a GPU."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from permtriton.cli.main import app
from permtriton.errors import ConfigError
from permtriton.kernels import compile_check, nm_mask_backward_triton, nm_mask_triton
from permtriton.kernels.compile_check import TARGETS, compile_one
from permtriton.kernels.launch import triton

needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")
SM_80, SM_90, SM_100, GFX942 = TARGETS


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_it_says_what_the_machine_is():
    told = json.loads(run("--json").stdout)
    assert set(told) >= {"system", "versions", "GPU", "triton", "CUDA compiler", "kernels run"}
    assert "torch" in told["versions"]
    shown = run()
    assert shown.exit_code == 0
    assert "kernels run" in shown.stdout


@needs_triton
class TestCompiling:
    @pytest.fixture(autouse=True)
    def _builds(self):
        from . import kernel_builds

        self.builds = kernel_builds

    @pytest.mark.parametrize("target", TARGETS[:3], ids=lambda target: target.name)
    def test_a_kernel_that_fits(self, target):
        found = compile_one(self.builds.copy_build(), target)
        assert (found.error, found.problem, found.spills, found.stack_bytes) == (None, None, 0, 0)
        assert 0 < found.registers <= 255

    def test_multiples_of_16_make_wide_loads(self):
        wide, narrow = (compile_one(self.builds.copy_build(), SM_90, multiples) for multiples in (True, False))
        assert wide.registers < narrow.registers

    def test_spills_are_a_problem_in_a_default(self):
        found = compile_one(self.builds.hold_build(16384), SM_90)
        assert found.spills > 0
        assert found.stack_bytes > 0
        assert "spills" in found.problem
        assert compile_one(self.builds.hold_build(16384, default=False), SM_90).problem is None

    def test_what_does_not_compile_is_a_problem_and_says_why(self):
        found = compile_one(self.builds.hold_build(33), SM_90)
        assert "power of 2" in found.error
        assert found.problem == "does not compile"
        elsewhere = compile_one(self.builds.hold_build(33), GFX942)
        assert elsewhere.error
        assert elsewhere.problem is None

    def test_too_much_shared_memory_is_a_problem(self):
        small = dataclasses.replace(SM_90, shared_limit=-1)
        assert "shared memory" in compile_one(self.builds.copy_build(), small).problem

    def test_too_much_tensor_memory_is_a_problem(self, monkeypatch):
        found = compile_one(self.builds.multiply_build(), SM_100)
        assert (found.tensor_columns, found.problem) == (128, None)
        monkeypatch.setattr(compile_check, "TENSOR_COLUMNS", 127)
        assert "tensor memory" in compile_one(self.builds.multiply_build(), SM_100).problem

    def test_the_command(self, monkeypatch):
        monkeypatch.setattr(compile_check, "all_builds", lambda: [self.builds.copy_build()])
        shown = run("--compile-kernels")
        assert shown.exit_code == 0, shown.output
        told = json.loads(run("--compile-kernels", "--json").stdout)["kernels"]
        assert [row["target"] for row in told] == ["sm_80", "sm_90", "sm_90", "sm_100", "gfx942"]

    def test_the_command_fails_on_a_spill(self, monkeypatch):
        builds = [self.builds.copy_build(), self.builds.hold_build(16384)]
        monkeypatch.setattr(compile_check, "all_builds", lambda: builds)
        monkeypatch.setattr(compile_check, "TARGETS", (SM_90,))
        monkeypatch.setattr(compile_check.compile_all, "__defaults__", ((SM_90,), None))
        shown = run("--compile-kernels")
        assert shown.exit_code == 2
        assert "hold 16384 for sm_90" in shown.output

    def test_interpreting_is_refused(self, monkeypatch):
        monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
        with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
            compile_check.all_builds()
        assert run("--compile-kernels").exit_code == 2


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(compile_check, "triton", None)
    shown = run("--compile-kernels")
    assert shown.exit_code == 2
    assert "triton is not installed" in shown.output


@needs_triton
def test_every_kernel_compiles_without_spills():
    """The defaults for sm_90; for the other targets the first of each kernel, and all that are short of registers."""
    builds = [build for build in compile_check.all_builds() if build.default]
    first = {build.kernel: build for build in reversed(builds)}
    assert len(first) >= 10, "forward and backward kernels of every op"
    found = [compile_one(build, SM_90) for build in builds]
    for build, one in zip(builds, tuple(found), strict=True):
        available = min(255, 65536 // (32 * build.config.num_warps))
        if one.registers > 0.75 * available or build in first.values():
            found += [compile_one(build, target) for target in (SM_80, SM_100)]
    assert [(one.name, one.target, one.problem, one.error) for one in found if one.problem] == []


@needs_triton
def test_every_module_with_kernels_says_how_they_are_built():
    by_module = {build.kernel.fn.__module__.rpartition(".")[2].removesuffix("_triton")
                 for build in compile_check.all_builds()}  # fmt: skip
    assert by_module >= {"permute", "norm_permute", "sinkhorn", "assignment", "nm_mask", "nm_mask_backward",
                         "sparse_linear"}  # fmt: skip


FREE = {"KEPT", "GROUP", "PADDED", "POWER", "STATISTICS", "GROUP_SCALE", "FLOOR", "INTERPRETED"}  # not of the tile


class Launches:
    """Stands for a kernel, and notes in what tile, warps and stages it is launched."""

    def __init__(self) -> None:
        self.found: list[dict] = []

    def __getitem__(self, grid):
        return lambda *tensors, **options: self.found.append({k: v for k, v in options.items() if k not in FREE})


def default_builds(module, kernel, dtype: torch.dtype) -> list[dict]:
    """What the builds of a kernel that count as defaults are launched in."""
    pointer = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    return [
        {name: value for name, value in build.constants.items() if name.isupper() and name not in FREE}
        | {"num_warps": build.config.num_warps, "num_stages": build.config.num_stages}
        for build in module.builds()
        if build.default and build.kernel is kernel and build.signature["weight"] == pointer
    ]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [2, 3, 4, 6, 8, 12, 16, 32])
class TestDefaultLaunchesOfNmMask:
    """What runs without autotuning is a default build, which the doctor holds to be free of spills."""

    @pytest.fixture(autouse=True)
    def _untuned(self, monkeypatch):
        for module in (nm_mask_triton, nm_mask_backward_triton):
            monkeypatch.setattr(module, "config_for", lambda op, configs, shape, dtype: configs[0])

    @pytest.mark.parametrize("row_major", [False, True])
    def test_forward(self, group, dtype, row_major, monkeypatch):
        name = "_nm_mask_fwd_kernel" if group <= 4 else "_nm_mask_fwd_wide_kernel"
        kernel = Launches()
        monkeypatch.setattr(nm_mask_triton, name, kernel)
        weight, channels = torch.zeros(32, 4 * group, dtype=dtype), torch.arange(4 * group)
        weight = weight if row_major else weight.t().contiguous().t()
        nm_mask_triton.nm_mask_triton(weight, torch.ones(4 * group), None, None, 1, channels, [4 * group], 1, group)
        assert kernel.found[0] in default_builds(nm_mask_triton, kernel, dtype)

    @pytest.mark.parametrize("size", [16, 32, 48, 64, 96, 128, 256])
    @pytest.mark.parametrize("rows", [32, 33])
    def test_backward(self, group, dtype, size, rows, monkeypatch):
        kernel = Launches()
        monkeypatch.setattr(nm_mask_backward_triton, "_nm_mask_bwd_kernel", kernel)
        size = -(-size // group) * group
        weight = torch.zeros(size, rows, dtype=dtype).t()
        nm_mask_backward_triton.nm_mask_backward_triton(
            weight, weight, torch.ones(size), None, None, 1, torch.arange(size), [size], group, True, 0.1
        )
        assert (kernel.found[0]["ALIGN"] > 1) == (rows % 16 == 0 and size % 16 == 0)
        assert kernel.found[0] in default_builds(nm_mask_backward_triton, kernel, dtype)

"""`permtriton doctor`: what this machine is, and the GPU kernels compiled without a GPU."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from permtriton.cli.main import app
from permtriton.errors import ConfigError
from permtriton.kernels import compile_check
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
    assert by_module >= {"permute", "norm_permute", "sinkhorn", "assignment", "nm_mask", "sparse_linear"}

"""The kernels compiled ahead of time, without a GPU, and what they use; the launches recorded for it."""

import dataclasses
import re
import tarfile
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import beforehand, builds, compile_check
from benchmarks.gpu.compile_check import TARGETS, compile_one
from benchmarks.gpu.recording import CudaLaunch, recorded
from permtriton import kernels
from permtriton.errors import ConfigError
from permtriton.kernels.cuda.runtime import CudaKernel
from permtriton.kernels.launch import triton
from permtriton.kernels.tools.cases import cases_by_kernel

needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")
SM_80, SM_89, SM_90, SM_100 = TARGETS


@needs_triton
class TestCompiling:
    @pytest.fixture(autouse=True)
    def _builds(self):
        from . import kernel_builds

        self.builds = kernel_builds

    def test_a_kernel_that_fits(self):
        found = compile_one(self.builds.copy_build(), SM_90)
        assert (found.error, found.problem, found.spills, found.stack_bytes) == (None, None, 0, 0)
        assert 0 < found.registers <= 255

    @pytest.mark.slow
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
        elsewhere = compile_one(self.builds.hold_build(33), SM_89)
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

    def test_interpreting_is_refused(self, monkeypatch):
        monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
        with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
            compile_check.all_builds()


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(compile_check, "triton", None)
    with pytest.raises(ConfigError, match="triton is not installed"):
        compile_check.all_builds()


@needs_triton
@pytest.mark.soak
def test_every_kernel_compiles_without_spills(soak):
    """The first default of some kernels; with --soak, all of them."""
    defaults = [build for build in compile_check.all_builds() if build.default]
    first = {build.launch.kernel: build for build in reversed(defaults)}
    assert len(first) >= 10, "forward and backward kernels of every op"
    targets = TARGETS if soak else (SM_90,)
    found = list(compile_check.compile_all(defaults if soak else list(first.values())[::3], targets))
    assert [(one.name, one.target, one.problem, one.error) for one in found if one.problem] == []


@needs_triton
def test_scores_of_nm_mask_are_rounded_before_they_are_compared():
    """A product fused with the difference of two scores would break ties otherwise than the reference."""
    of = next(build.launch for build in builds._nm_mask())
    compiled = compile_check.binary_of(of, SM_90)
    fused = re.findall(r"fma\.rn\S*f32\s.*", compiled.asm["ptx"])
    assert fused
    assert all(line.rstrip(";").endswith(" 0f00000000") for line in fused)


@needs_triton
def test_every_module_with_kernels_has_builds_and_cases():
    """A file of Triton kernels that no entry of the tuples compiles or runs would be checked by nothing."""
    launched = {build.launch.kernel.fn.__module__.rpartition(".")[2] for build in compile_check.all_builds()}
    files = {path.stem: path.read_text() for path in Path(kernels.__path__[0]).glob("*.py")}
    assert launched == {name for name, text in files.items() if re.search(r"^def \w+_kernel\(", text, re.M)}
    assert all(cases_by_kernel([(64, 64)], [1], torch.float32).values())


@needs_triton
class TestRecording:
    def test_it_notes_what_triton_would_specialise(self):
        from .kernel_builds import _copy

        source = torch.zeros(8, dtype=torch.bfloat16)
        with recorded() as launches:
            _copy[(1,)](source, source.float(), 1, 1 << 40, SIZE=4, num_warps=2)
        (found,) = launches
        assert list(found.signature.items()) == [
            ("source_ptr", "*bf16"), ("target_ptr", "*fp32"), ("rows", "constexpr"), ("row_stride", "i64"),
            ("SIZE", "constexpr"),
        ]  # fmt: skip
        assert found.constants == {"rows": 1, "SIZE": 4}
        assert found.options == {"num_warps": 2}

    def test_launches_of_cuda(self):
        kernel = CudaKernel("sparse_linear_mma.cu", "scale", 256, constants=(("BF16", 1), ("ROWS", 64)))
        with recorded() as launches:
            kernel((2, 3, 1), torch.ones(2), count=7)
        assert launches == [CudaLaunch(kernel, (2, 3, 1), {"BF16": 1, "ROWS": 64, "count": 7})]

    def test_a_launch_that_was_compiled_beforehand_is_found_again(self, tmp_path, monkeypatch):
        """Recorded without data, then launched with it: one entry, under a name that holds all that it depends on."""
        from triton.runtime import driver

        from .kernel_builds import _copy

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(driver, "_active", beforehand.Pretended())
        with recorded() as launches, torch.device("meta"):
            _copy[(1,)](torch.empty(64), torch.empty(64), 3, 64, SIZE=4, num_warps=2)
        launches[0].compile()
        (code,) = tmp_path.glob("*/*.cubin")
        _copy.device_caches.clear()  # as in another process
        _copy.run(torch.ones(32), torch.ones(32), 5, 32, SIZE=4, num_warps=2, grid=(1,), warmup=True)
        assert [*tmp_path.glob("*/*.cubin")] == [code]

    def test_what_rows_launch_is_compiled_beforehand_and_packed(self, tmp_path, monkeypatch):
        from triton.runtime import driver

        from .kernel_builds import copy_build

        monkeypatch.setattr(beforehand.caches, "work", lambda: tmp_path / "caches")
        monkeypatch.setattr(beforehand, "all_builds", lambda: [copy_build()])
        monkeypatch.setattr(beforehand, "machine_code", lambda kernel, arch: compiled.append((kernel.name, arch)))
        monkeypatch.setattr(beforehand, "built", lambda arch: compiled.append(("permute.cu", arch)))
        for name, folder in beforehand.caches.environment("first_look").items():
            monkeypatch.setenv(name, folder)  # so that they are taken back
        monkeypatch.setattr(driver, "_active", beforehand.Pretended())
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        compiled: list[tuple[str, str]] = []
        assert beforehand.compile_all(tmp_path / "results").startswith("1 Triton kernels, ")
        with tarfile.open(tmp_path / "results" / beforehand.caches.ARCHIVE) as archive:
            assert any(name.endswith(".cubin") for name in archive.getnames())
        assert {arch for name, arch in compiled if name != "permute.cu"} == {"sm_90a"}
        assert len({kernel.constants for kernel in beforehand.products() if dict(kernel.constants)["FP8"]}) > 3

    def test_every_build_has_a_name_and_a_launch_of_its_own(self):
        found = compile_check.all_builds()
        assert len({build.name for build in found}) == len({build.launch.key for build in found}) == len(found)

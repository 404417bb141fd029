"""The issue floor: loops found in machine code, what is counted of a launch, and that no default's floor rises."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import floors, sass, shapes
from benchmarks.gpu.compile_check import TARGETS
from benchmarks.gpu.recording import CudaLaunch, recorded
from permtriton.errors import ConfigError
from permtriton.kernels.launch import triton

from .kernel_builds import copy_floor

COMMITTED = Path(__file__).parent.parent / "benchmarks" / "results" / "issue-floor.json"
SM_80, SM_89, SM_90, SM_100 = TARGETS
needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")


def code_of(*lines: str) -> sass.Code:
    """The code of a function; a line that ends in a colon is a label."""
    text, address = [".text.kernel:"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        text.append(f"        /*{address:04x}*/                   {line} ;")
        address += 16
    ((name, function),) = sass.parse("\n".join(text)).items()
    assert name == "kernel"
    return sass.loops_of(function)


class TestMachineCode:
    def test_loops_inside_loops(self):
        code = code_of(
            "MOV R1, R2", ".L_x_0:", "LDG.E.128 R4, [R2.64]", ".L_x_1:", "FADD R1, R1, R2", "BAR.SYNC 0x0",
            "@!P0 BRA `(.L_x_1)", "SHFL.BFLY PT, R1, R1, 0x1, 0x1f", "@P1 BRA `(.L_x_0)", ".L_x_2:", "FMUL R1, R1, R1",
            "BRA.U !UP0, `(.L_x_2)", "STG.E desc[UR4][R2.64], R1", "EXIT", ".L_x_3:", "BRA `(.L_x_3)", "NOP",
        )  # fmt: skip
        assert [(loop.head, loop.instructions, len(loop.inner)) for loop in code.loops()] == [
            (0x10, 3, 1), (0x20, 3, 0), (0x70, 2, 0),
        ]  # fmt: skip
        assert [loop.global_bytes for loop in code.loops()] == [512, 0, 0]
        assert (code.instructions, code.global_bytes) == (3, 128)  # what follows EXIT is padding

    def test_code_that_was_moved_behind_the_end_counts_in_its_loop(self):
        code = code_of(
            ".L_x_0:", "FADD R1, R1, R2", "@P0 BRA `(.L_x_1)", ".L_x_2:", "FADD R1, R1, R3", "@P1 BRA `(.L_x_0)",
            "EXIT", ".L_x_1:", "FMUL R1, R1, R1", "BRA `(.L_x_2)",
        )  # fmt: skip
        assert [(loop.head, loop.instructions) for loop in code.loops()] == [(0, 6)]
        assert code.instructions == 1

    def test_a_computed_jump_is_refused(self):
        with pytest.raises(ConfigError, match="computed jump"):
            code_of("BRX R2 -0x20", "EXIT")


@needs_triton
@pytest.mark.parametrize("gpu", floors.GPUS, ids=lambda gpu: gpu.name)
def test_a_recorded_launch_fits_the_named_gpu(gpu):
    """The same product asks an RTX 4090 for less shared memory than an H200, and an A100 for no cluster."""
    floor = shapes.floor_of(64, shapes.ROWS, shapes.CHANNELS, gpu)
    with recorded() as launches, torch.device("meta"):
        floor.launch(*floor.case.make(torch.device("meta")))
    (launch,) = (launch for launch in launches if isinstance(launch, CudaLaunch))
    assert launch.kernel.shared_bytes <= gpu.target.shared_limit
    assert launch.grid[1] == 1 or gpu.target.arch >= 90


@needs_triton
class TestCounting:
    @pytest.mark.slow
    def test_a_launch(self):
        row = floors.row(copy_floor(), floors.H200)
        (launch,) = row.launches
        assert (launch.kernel, launch.programs, launch.warps, launch.loops) == ("_copy", 64, 4, ())
        assert launch.instructions == 64 * 4 * launch.straight
        assert row.per_unit == pytest.approx(32 * launch.instructions / (64 * 1024))
        assert row.issue_us == pytest.approx(1e6 * launch.instructions / (132 * 4 * 1.98e9))
        assert row.memory_us == pytest.approx(1e6 * 64 * 4096 / 4.3e12)
        assert launch.asked_bytes == 64 * 4096

    def test_loops_that_do_not_fit_the_machine_code_are_refused(self):
        floor = copy_floor()
        more = dataclasses.replace(floor, loops=lambda launch: (7,))
        with pytest.raises(ConfigError, match=r"_copy for sm_90 has 0 loops.*how often 1 run"):
            floors.row(more, floors.H200)
        heavier = dataclasses.replace(floor, case=dataclasses.replace(floor.case, bytes=2 * floor.case.bytes))
        with pytest.raises(ConfigError, match=r"fewer than the 524,288 that must move"):
            floors.row(heavier, floors.H200)
        with pytest.raises(ConfigError, match="launches nothing"):
            floors.row(dataclasses.replace(floor, launch=lambda: None), floors.H200)


@needs_triton
@pytest.mark.parametrize("floor", shapes.floors(floors.H200), ids=lambda floor: floor.case.name)
@pytest.mark.slow
def test_no_default_needs_more_instructions_than_committed(floor):
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))["now"]
    if committed["triton"] != triton.__version__:
        pytest.skip(f"counted with triton {committed['triton']}; {triton.__version__} is installed")
    expected = next((row for row in committed["rows"] if (row["name"], row["gpu"]) == (floor.case.name, "H200")), None)
    assert expected, f"{floor.case.name} is not in {COMMITTED.name}: run python benchmarks/issue_floor.py"
    with recorded() as launches, torch.device("meta"):
        floor.launch(*floor.case.make(torch.device("meta")))
    if any(isinstance(launch, CudaLaunch) for launch in launches) and shutil.which("nvcc") is None:
        pytest.skip("nvcc, which compiles this kernel, is not installed")
    found = floors.row(floor, floors.H200).figures()
    assert found["spills"] == 0
    assert found["resident"] >= expected["resident"], "programs per multiprocessor"
    if expected["ratio"] is not None:
        assert found["ratio"] <= 1.1 * expected["ratio"], "issue floor over memory time"

"""The ceilings of this GPU: how fast it copies, multiplies and reads.

Reading is the ceiling of decoding, which writes next to nothing: memory that turns from reading to writing loses time.
"""

import torch
from torch import Tensor

from benchmarks.gpu.timing import measure
from permtriton.kernels.launch import jit, multiprocessors, tl

TILE, PER_SM = 4096, 4  # 32-bit words at once, programs per multiprocessor


@jit
def _read_kernel(x_ptr, sums_ptr, words, TILE: tl.constexpr, STAGES: tl.constexpr):
    program, place = tl.program_id(0), tl.arange(0, TILE)
    sums = tl.zeros([TILE], tl.int32)
    for start in tl.range(program.to(tl.int64) * TILE, words, tl.num_programs(0) * TILE, num_stages=STAGES):
        sums ^= tl.load(x_ptr + start + place, mask=start + place < words, other=0)
    tl.store(sums_ptr + program, tl.xor_sum(sums, 0))


def checksum(x: Tensor) -> Tensor:
    """Returns numbers whose exclusive or is that of all of ``x``, int32, contiguous; by torch on a CPU."""
    if (processors := multiprocessors(x.device)) is None:
        return x.sum(0, keepdim=True)
    programs = PER_SM * processors
    sums = torch.empty(programs, dtype=torch.int32, device=x.device)
    _read_kernel[(programs,)](x, sums, x.numel(), TILE=TILE, STAGES=3, num_warps=8)
    return sums


def bandwidth(device: torch.device, rehearse: bool = False) -> float:
    """Returns bytes per second of reading 4 GiB once; of next to nothing with ``rehearse``.

    Raises:
        AssertionError: the kernel did not read everything.
    """
    x = torch.randint(0, 1 << 30, (1 << 16 if rehearse else 1 << 30,), dtype=torch.int32, device=device)
    if device.type == "cuda":
        expected = x.clone()
        while expected.numel() > 1:  # a power of two
            expected = expected[: expected.numel() // 2] ^ expected[expected.numel() // 2 :]
        found = 0
        for part in checksum(x).tolist():
            found ^= part
        assert found == int(expected), "the kernel that measures reading does not read everything"
    return x.nbytes / measure({"read": [lambda: checksum(x)]}, device)["read"].quantile(0.5)


def copying(device: torch.device, rehearse: bool = False) -> float:
    """Returns bytes per second, read plus written, of a large copy: in a graph or on the stream, the faster."""
    count, dtype = (1 << 16, torch.float32) if rehearse else (1 << 30, torch.bfloat16)
    source, target = torch.randn(count, device=device, dtype=dtype), torch.empty(count, dtype=dtype, device=device)
    runs = {how: [lambda: target.copy_(source)] for how in ("graph", "stream")}
    return 2 * source.nbytes / min(t.quantile(0.5) for t in measure(runs, device, streamed=["stream"]).values())


def multiplying(device: torch.device, rehearse: bool = False) -> float:
    """Returns operations per second of a large bfloat16 product of random numbers."""
    side, dtype = (64, torch.float32) if rehearse else (8192, torch.bfloat16)
    a, b = (torch.randn((side, side), device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / measure({"matmul": [lambda: a @ b]}, device, streamed=["matmul"])["matmul"].quantile(0.5)

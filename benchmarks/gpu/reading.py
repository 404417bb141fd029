"""How fast this GPU reads: the ceiling of decoding, which reads weights and writes next to nothing.

A copy is the wrong ceiling there: memory that turns from reading to writing loses time.
"""

import torch
from torch import Tensor

from permtriton.kernels.launch import jit, multiprocessors, tl
from permtriton.kernels.tools.timing import measure

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

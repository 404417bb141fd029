"""Runs each kernel once on a small case, for compute-sanitizer to watch; results are not looked at.

python -m benchmarks.gpu.small_cases cuda
"""

import sys
from collections.abc import Sequence

import torch

from permtriton.kernels.tools import tuning

SHAPE, TOKENS = (256, 512), (1, 16)  # as in tests/gpu: what was compiled there is not compiled again
BEGINS, ENDS = "begins: ", "done: "


def main(arguments: Sequence[str]) -> int:
    """Runs the cases on the device that the argument names."""
    device = torch.device(arguments[0])
    torch.zeros(1, device=device)  # where the device cannot be used at all, no case begins
    for case in tuning.cases_for([SHAPE], TOKENS, torch.bfloat16, device):
        print(f"{BEGINS}{case.name}", flush=True)
        with torch.no_grad():
            case.run(*case.make(0))
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"{ENDS}{case.name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

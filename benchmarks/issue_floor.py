"""Counts the issue floor of every kernel's named shape for each GPU.

python benchmarks/issue_floor.py        needs triton; nvcc too, if a kernel in CUDA has a named shape; no GPU

The figures go to results/issue-floor.json.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # python benchmarks/issue_floor.py has only its own folder there

from benchmarks.gpu import floors, shapes  # noqa: E402
from permtriton.errors import PermTritonError  # noqa: E402
from permtriton.kernels.launch import triton  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "issue-floor.json"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows, refused = [], []
    calls = [(floor, gpu) for gpu in floors.GPUS for floor in shapes.floors(gpu)]
    for floor, gpu in calls:
        try:
            row = floors.row(floor, gpu)
        except PermTritonError as error:
            refused.append(str(error))
            continue
        rows.append(row.figures())
        print(f"{row.name}, {row.gpu}: ratio {row.ratio:.2f}", flush=True)
    if refused:
        sys.exit("\n".join(["nothing was written:", *refused]))
    report = json.loads(RESULT.read_text(encoding="utf-8"))
    report["now"] = {"triton": triton.__version__, "rows": rows}
    RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

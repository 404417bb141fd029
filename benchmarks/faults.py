"""Plants every seeded fault of tests/faults.py, and writes which checks refuse it to results/seeded-faults.json.

    python -m benchmarks.faults             all of them: minutes
    python -m benchmarks.faults NAME ...    some of them

A fault is planted again with the check deaf that refused it, until none refuses it any more: so all checks are found
that refuse it, and if there is only one, the fault needs it.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

from tests.faults import FAULTS
from tests.refusals import CHECKS, refusals

RESULT = Path(__file__).resolve().parent / "results" / "seeded-faults.json"


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    named = sys.argv[1:] or list(FAULTS)
    known = json.loads(RESULT.read_text(encoding="utf-8"))["refused"] if RESULT.exists() else {}
    refused = {}
    for name, fault in FAULTS.items():
        if fault.refused:
            refused[name] = refusals(fault) if name in named else known[name]
            print(name, refused[name], sep=": ", flush=True)
    report = {
        "command": "python -m benchmarks.faults",
        "checks": [check.holds for check in CHECKS],
        "refused": refused,
        "tests": [name for name, fault in FAULTS.items() if fault.caught_by],
    }
    RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

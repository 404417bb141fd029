"""Plants every seeded fault of tests/faults.py, and writes which checks refuse it to results/seeded-faults.json.

    python -m benchmarks.faults             those that the file lacks; delete it to run all of them, for minutes
    python -m benchmarks.faults NAME ...    these again, too

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
    known = json.loads(RESULT.read_text(encoding="utf-8"))["refused"] if RESULT.exists() else {}
    known = {name: checks for name, checks in known.items() if name not in sys.argv[1:]}
    for name, fault in FAULTS.items():
        if fault.refused and name not in known:
            known[name] = refusals(fault)
            print(name, known[name], sep=": ", flush=True)
            _write(known)
    _write(known)


def _write(known: dict[str, list[str]]) -> None:
    report = {
        "command": "python -m benchmarks.faults",
        "checks": [check.holds for check in CHECKS],
        "refused": {name: known[name] for name in FAULTS if name in known},
        "tests": [name for name, fault in FAULTS.items() if fault.caught_by],
    }
    RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

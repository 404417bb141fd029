"""Runs a command and prints, as its last line, what the system counted: seconds, CPU seconds, peak bytes.

    python -S benchmarks/real/cost.py COMMAND ...

It imports little, because a process starts with the peak memory of the one that started it.
"""

import json
import os
import sys
import time


def main() -> int:
    started = time.perf_counter()
    try:
        process = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
    except OSError as error:
        print(f"{sys.argv[1]} cannot be started: {error.strerror}\n{{}}")
        return 125
    _, status, usage = os.wait4(process, 0)
    cost = {
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_bytes": usage.ru_maxrss * 1024,
    }
    print(json.dumps(cost))
    return min(abs(os.waitstatus_to_exitcode(status)), 125)


if __name__ == "__main__":
    sys.exit(main())

"""What is measured in which call, how long it should take and when it is cut off. Imports no torch: NOTES.md uses it.

A call is one command. Each fits a limit of ten minutes, and all three fit half an hour on one GPU.
"""

from dataclasses import dataclass, replace

OUT = "benchmarks/results"
LIMIT = 10  # minutes that a call may take
START = 15  # seconds until a call's processes run
MODULE = "python -m benchmarks.gpu"


@dataclass(frozen=True)
class Row:
    """One group of results, which is measured, cut off and repeated as a whole.

    Attributes:
        name: as ``--only`` takes it.
        seconds: predicted.
        limit: most seconds that it may need; it begins only if that is left.
        mostly: what most of the time goes into.
        tuning: most seconds for tuning its cases before they are measured, with ``--tune``.
    """

    name: str
    seconds: float
    limit: float
    mostly: str
    tuning: float = 0.0


@dataclass(frozen=True)
class Call:
    """One command.

    Attributes:
        name: as ``--call`` takes it.
        minutes: after which it ends by itself.
        title: what it is for.
        rows: the most important first.
    """

    name: str
    minutes: float
    title: str
    rows: tuple[Row, ...]

    @property
    def seconds(self) -> float:
        """Returns the seconds predicted, tuning included."""
        return START + sum(row.seconds + row.tuning for row in self.rows)

    def command(self, out: str = OUT) -> str:
        """Returns the command, for a shell in the repository's root."""
        tune = " --tune" * any(row.tuning for row in self.rows)
        return f"{MODULE} --out {out} --call {self.name}{tune}"


CEILINGS = Row("ceilings", 3, 30, "a copy and a product, measured anew in each call")

CALLS = (
    Call("checks", 8, "are the results right", (
        Row("tests", 100, 200, "tests/gpu in 8 processes: compiling"),
        Row("memcheck", 50, 110, "a small case of each kernel under compute-sanitizer"),
        Row("racecheck", 50, 110, "the same cases"),
        Row("cusparselt", 10, 30, "one product in a CUDA graph, the order of the kept values"),
    )),
    Call("kernels", 9.5, "single kernels", (
        CEILINGS,
        Row("sparse_linear", 40, 60, "12 cases of 1.5 s, each with up to 11 packed weights", tuning=130),
        Row("nm_mask", 10, 15, "", tuning=25),
        Row("permute", 30, 60, "nvcc", tuning=30),
        Row("norm", 10, 15, "", tuning=10),
        Row("sinkhorn", 45, 60, "torch.compile twice", tuning=15),
        Row("assignment", 12, 25, "three runs of each form of scipy", tuning=15),
        Row("swap_gains", 8, 15, "its reference in float64", tuning=10),
    )),
    Call("models", 7, "a learning step, many tokens, whole models", (
        CEILINGS,
        Row("learning_step", 100, 180, "tracing 32 layers, two micro-batch sizes, five steps of each kind", tuning=40),
        Row("prefill", 25, 30, "", tuning=50),
        Row("inference", 50, 60, "packing 224 linears"),
    )),
)  # fmt: skip

ROWS = {row.name: row for call in CALLS for row in call.rows if row is not CEILINGS}


def selected(call: str | None, only: list[str] | None, minutes: float | None) -> Call:
    """Returns the call of this name, or one of these rows alone, or one of all rows.

    Args:
        call: name, or None.
        only: names of rows, or None.
        minutes: after which it ends; None for those of the plan.
    """
    if call is not None:
        found = next(known for known in CALLS if known.name == call)
    elif only:
        rows = tuple(row for name, row in ROWS.items() if name in only)
        found = Call("only", LIMIT - 0.5, "single rows", rows)
    else:
        found = Call("all", sum(known.minutes for known in CALLS), "all rows", tuple(ROWS.values()))
    return replace(found, minutes=minutes or found.minutes)


def printed(out: str = OUT) -> str:
    """Returns the plan for a terminal: commands to copy, each with its expected duration."""
    lines = [
        f"{len(CALLS)} calls of less than {LIMIT} minutes each, {sum(call.seconds for call in CALLS) / 60:.0f} minutes "
        f"expected in all, {sum(call.minutes for call in CALLS):g} at most. Predicted for an H200 and 16 cores.",
        "The machine with the GPU needs this checkout, installed: pip install -e '.[dev]' (--help says what is enough",
        "where packages cannot be fetched). It uses nvcc and compute-sanitizer if they are there.",
        "Run them in the repository's root, in this order, on one GPU. A call that is cut off keeps what it has;",
        "repeat what is missing with --only ROW. If each call gets a machine of its own, carry the folder of results",
        "along: the tuned configurations are in it. Without --call, one command makes all calls.",
    ]
    for number, call in enumerate(CALLS, 1):
        lines += ["", f"{number}. {call.title}: {_minutes(call.seconds)} expected, ends by itself after "
                  f"{call.minutes:g}", f"   {call.command(out)}"]  # fmt: skip
        for row in call.rows:
            tuning = f" + {row.tuning:.0f} s tuning" if row.tuning else ""
            lines.append(f"     {row.name:<14} {row.seconds:>4.0f} s{tuning:<15} {row.mostly}".rstrip())
    lines += ["", f"{len(CALLS) + 1}. one file of all results, then the tables: seconds, no GPU needed",
              f"   {MODULE} --out {out} --merge", "   python benchmarks/readme_tables.py"]  # fmt: skip
    return "\n".join(lines)


def commands(out: str = OUT) -> str:
    """Returns the commands for a Markdown page."""
    made = [(call.command(out), f"{call.title}: {_minutes(call.seconds)}, at most {call.minutes:g}") for call in CALLS]
    made += [(f"{MODULE} --out {out} --merge", "one file of all results"), ("python benchmarks/readme_tables.py", "")]
    width = max(len(command) for command, _ in made)
    return "\n".join(["```", *(f"{c:<{width}}  # {why}" if why else c for c, why in made), "```"])


def markdown() -> str:
    """Returns where the minutes go, for NOTES.md."""
    lines = ["| call | part | seconds predicted | tuning | may take | mostly |", "|---|---|---|---|---|---|"]
    for call in CALLS:
        lines.append(f"| {call.name} | start | {START} | | - | imports |")
        for row in call.rows:
            tuning = f"{row.tuning:.0f}" if row.tuning else ""
            most = row.limit + row.tuning
            lines.append(f"| | {row.name} | {row.seconds:.0f} | {tuning} | {most:.0f} | {row.mostly} |")
        most = sum(row.limit + row.tuning for row in call.rows)
        lines.append(f"| | sum | {call.seconds:.0f} | included | {most:.0f} of {60 * call.minutes:.0f} | |")
    return "\n".join(lines)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes"

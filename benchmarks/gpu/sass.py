"""Reads machine code of NVIDIA GPUs (SASS) as ``nvdisasm`` prints it: instructions, and loops.

Control flow is followed instead of guessed from addresses: a loop is a jump back to a block that every way to the jump
goes through. So code that the assembler moved behind the end of a kernel counts where it runs, and code that no way
leads to is left out: padding, functions that are called (the slow case of a division), and the branches for warps whose
threads have gone apart (``BRA.DIV``). A short loop that waits for an asynchronous copy or product counts once.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from permtriton.errors import ConfigError

_FUNCTION = re.compile(r"^\.text\.(\S+):")
_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_TARGET = re.compile(r"`\((\.L\w+)\)\s*$")
_ENDS = ("EXIT", "RET", "BRA", "KILL")
_MEMORY = ("LDG", "STG", "LDGSTS", "LD", "ST")  # of global memory
_WAITS = {"SYNCS", "UTCATOMSWS", "NANOSLEEP"}  # short loops of these run until a copy or a product has arrived
_WAIT_LENGTH = 8


@dataclass(frozen=True)
class Instruction:
    """One instruction, as printed.

    Attributes:
        address: Its place in the function, in bytes.
        conditional: Whether it has a predicate.
        opcode: Name with modifiers: ``LDG.E.128``.
        operands: The rest.
        target: Label that a branch jumps to; None of other instructions.
    """

    address: int
    conditional: bool
    opcode: str
    operands: str
    target: str | None

    @property
    def name(self) -> str:
        """Returns the opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def global_bytes(self) -> int:
        """Returns how many bytes of global memory a warp asks for if all of its threads take part."""
        if self.name not in _MEMORY:
            return 0
        width = re.search(r"\.(?:[US])?(8|16|32|64|128|256)\b", self.opcode)
        return 32 * (int(width[1]) // 8 if width else 4)


@dataclass
class Code:
    """Instructions of a loop without those of the loops inside it, or of a kernel without its loops.

    Attributes:
        head: Address of the loop's first instruction; that of a kernel is 0.
        counts: How many instructions of each name it has.
        global_bytes: Bytes of global memory that a warp asks for when it runs once.
        inner: The loops inside it, by address.
    """

    head: int
    counts: Counter[str] = field(default_factory=Counter)
    global_bytes: int = 0
    inner: list["Code"] = field(default_factory=list)

    def add(self, instruction: Instruction) -> None:
        """Counts an instruction."""
        self.counts[instruction.name] += 1
        self.global_bytes += instruction.global_bytes

    @property
    def instructions(self) -> int:
        """Returns how many instructions run once, without those of inner loops."""
        return self.counts.total()

    def loops(self) -> Iterator["Code"]:
        """Yields the loops inside, each before its own inner loops."""
        for loop in self.inner:
            yield loop
            yield from loop.loops()


@dataclass
class Function:
    """A function's instructions, and the addresses of its labels."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> dict[str, Function]:
    """Returns the functions of a disassembly, by name."""
    functions: dict[str, Function] = {}
    function, waiting = Function(), list[str]()
    for line in text.splitlines():
        if found := _FUNCTION.match(line):
            function, waiting = functions.setdefault(found[1], Function()), []
        elif found := _LABEL.match(line):
            waiting.append(found[1])
        elif found := _INSTRUCTION.search(line):
            address, operands = int(found[1], 16), found[4].strip()
            target = _TARGET.search(operands) if found[3].startswith("BRA") else None
            function.instructions.append(Instruction(address, bool(found[2]), found[3], operands, target and target[1]))
            function.labels.update((label, address) for label in waiting)
            waiting = []
    return functions


def loops_of(function: Function) -> Code:
    """Returns the code of a function outside of loops, with its loops.

    Raises:
        ConfigError: a jump to an address that only the running program knows.
    """
    blocks = _blocks(function)
    successors = _successors(function, blocks)
    dominators = _dominators(successors, next(iter(blocks)))
    bodies: dict[int, set[int]] = {}
    for block in dominators:
        for head in successors[block]:
            if head in dominators[block]:
                bodies.setdefault(head, {head}).update(_body(successors, dominators, block, head))
    for head, body in tuple(bodies.items()):
        names = [instruction.name for block in body for instruction in blocks[block]]
        if len(names) <= _WAIT_LENGTH and _WAITS.intersection(names):
            del bodies[head]
    code = Code(0)
    found: dict[int, Code] = {}
    for head in sorted(bodies, key=lambda head: (-len(bodies[head]), head)):  # the outer ones first
        around = _innermost(bodies, found, head)
        found[head] = Code(head)
        (code if around is None else found[around]).inner.append(found[head])
    for block in sorted(dominators):
        around = _innermost(bodies, found, block)
        for instruction in blocks[block]:
            (code if around is None else found[around]).add(instruction)
    for one in (code, *found.values()):
        one.inner.sort(key=lambda loop: loop.head)
    return code


def _innermost(bodies: dict[int, set[int]], found: dict[int, Code], block: int) -> int | None:
    around = [head for head in found if block in bodies[head]]
    return min(around, key=lambda head: len(bodies[head]), default=None)


def _blocks(function: Function) -> dict[int, list[Instruction]]:
    """Returns runs of instructions that are entered only at their first and left only at their last, by address."""
    blocks: dict[int, list[Instruction]] = {}
    targets = {function.labels.get(one.target) for one in function.instructions if one.target is not None}
    current: list[Instruction] = []
    for instruction in function.instructions:
        if instruction.name in ("BRX", "JMX", "JMP"):
            raise ConfigError(f"machine code with a computed jump, {instruction.opcode}: its loops cannot be counted")
        if not current or instruction.address in targets or current[-1].name in _ENDS:
            blocks[instruction.address] = current = []
        current.append(instruction)
    return blocks


def _successors(function: Function, blocks: dict[int, list[Instruction]]) -> dict[int, list[int]]:
    """Returns the blocks that may run after each block."""
    successors: dict[int, list[int]] = {}
    for (block, instructions), following in zip(blocks.items(), (*list(blocks)[1:], None), strict=True):
        last = instructions[-1]
        jumps = [function.labels[last.target]] if last.target in function.labels and last.opcode != "BRA.DIV" else []
        goes_on = last.name not in _ENDS or last.conditional or last.opcode == "BRA.DIV" or "," in last.operands
        successors[block] = jumps + ([following] if goes_on and following is not None else [])
    return successors


def _dominators(successors: dict[int, list[int]], entry: int) -> dict[int, set[int]]:
    """Returns the blocks that every way from the entry to a block goes through, of each block that can be reached."""
    reached = _reached(successors, {entry}, set())
    before = {block: [one for one in reached if block in successors[one]] for block in reached}
    dominators = {block: set(reached) for block in sorted(reached)} | {entry: {entry}}
    changed = True
    while changed:
        changed = False
        for block in reached - {entry}:
            found = {block}.union(set.intersection(*(dominators[one] for one in before[block])))
            changed |= found != dominators[block]
            dominators[block] = found
    return dominators


def _body(successors: dict[int, list[int]], dominators: dict[int, set[int]], tail: int, head: int) -> set[int]:
    """Returns the blocks from which the jump back is reached without passing the head."""
    before = {block: [one for one in dominators if block in successors[one]] for block in dominators}
    return _reached(before, {tail}, {head})


def _reached(successors: dict[int, list[int]], start: set[int], known: set[int]) -> set[int]:
    """Returns the blocks known before, and those that a way from the start leads to without passing them."""
    found, todo = known | start, list(start - known)
    while todo:
        after = set(successors[todo.pop()]) - found
        found |= after
        todo += after
    return found

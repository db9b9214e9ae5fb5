"""Reads the text of an optimised HLO module: its instructions, trips of loops, copies, collectives.

Only what `traffic` and the compile gates need is read. XLA prints one instruction a line, and the
computations that fusions and loops call as blocks before the entry.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "bf16": 16, "s4": 4, "u4": 4} | {
    f"{kind}{8 * n}": 8 * n for kind in "suf" for n in (1, 2, 4, 8)
}
_SHAPE = re.compile(r"\b(pred|bf16|[suf]\d+|f8\w+)\[([\d,]*)\](\{[^}]*\})?")
_ON_CHIP = re.compile(r"S\([1-9]")  # memory space of a layout; 0 is the device's own memory
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_TRIPS = re.compile(r'known_trip_count"?:?\s*\{"?n"?:"?(\d+)')
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_AXIS = re.compile(r"'([^']*)'(?:=(\d+))?")
_GROUPS = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\})")

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      shape: of the result, as XLA prints it; of a tuple, all its parts.
      opcode: HLO's name of the operation.
      operands: names of instructions.
      rest: everything after the opening bracket: operands, attributes, metadata.
      root: whether it is the computation's result.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the result, without padding."""
        return sum(self.parts)

    @property
    def in_memory(self) -> int:
        """Bytes of the parts of the result that are in the device's memory, not on the chip."""
        return sum(self.parts_in_memory)

    @property
    def parts_in_memory(self) -> list[int]:
        """`parts`, with 0 for those on the chip."""
        layouts = [layout for *_, layout in _SHAPE.findall(self.shape)]
        parts = zip(self.parts, layouts, strict=True)
        return [0 if _ON_CHIP.search(layout) else size for size, layout in parts]

    @property
    def parts(self) -> list[int]:
        """Bytes of the result, or of each part of a tuple."""
        return [
            math.prod(map(int, filter(None, dims.split(",")))) * _BITS.get(kind, 8) // 8
            for kind, dims, _ in _SHAPE.findall(self.shape)
        ]

    @property
    def dims(self) -> tuple[int, ...]:
        """Dimensions of the result, or of its first part."""
        match = _SHAPE.search(self.shape)
        return () if match is None else tuple(map(int, filter(None, match[2].split(","))))

    @property
    def group(self) -> int | None:
        """Number of devices that a collective joins; None where the text does not say."""
        if match := _AXES.search(self.rest):
            sizes = {name: int(size) for name, size in _AXIS.findall(match[1])}
            return math.prod(sizes[name] for name, _ in _AXIS.findall(match[2]))
        match = _GROUPS.search(self.rest)
        if match is None:
            return None
        return int(match[1]) if match[1] else match[2].count(",") + 1

    def called(self, attribute: str) -> str:
        """The computation that an attribute names, such as `body`."""
        match = re.search(rf"{attribute}=%?([\w.\-]+)", self.rest)
        return "" if match is None else match[1]


@dataclasses.dataclass(frozen=True)
class Module:
    """The computations of a program, by name, and the name of its entry."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    def instructions(self, *opcodes: str) -> Iterator[Instruction]:
        """All instructions, or those with one of these opcodes."""
        for computation in self.computations.values():
            for op in computation:
                if not opcodes or op.opcode in opcodes:
                    yield op

    def copies(self, at_least: int) -> list[Instruction]:
        """Copies of at least so many bytes, alone or at the root of a fusion.

        Those that only change the layout or bring parts to the chip are included.
        """
        copies = self.instructions("copy", "copy-start", "slice-start")
        return [op for op in copies if op.nbytes >= at_least]

    def collectives(self) -> list[Instruction]:
        """The collectives, each once, where it starts."""
        return [*self.instructions(*COLLECTIVES, *(f"{name}-start" for name in COLLECTIVES))]

    def trips(self, loop: Instruction) -> int | None:
        """Number of iterations of a while loop; None where only the device finds out.

        Then, on a GPU, the host waits for the device in every iteration. A loop that counts up to a
        constant says so in its configuration or its condition.
        """
        trip_count = _TRIPS.search(loop.rest)
        if trip_count is not None:
            return int(trip_count[1])
        condition = {op.name: op for op in self.computations[loop.called("condition")]}
        root = next(op for op in condition.values() if op.root)
        if root.opcode != "compare" or "direction=LT" not in root.rest:
            return None
        bounds = [condition[name] for name in root.operands if name in condition]
        constants = [op for op in bounds if op.opcode == "constant"]
        if len(constants) != 1:
            return None
        counters = [match[1] for op in bounds if (match := _INDEX.search(op.rest))]
        step = self._step(loop, int(counters[0])) if counters else 1
        return -(-_number(constants[0]) // step)

    def _step(self, loop: Instruction, place: int) -> int:
        """What the body of a loop adds to its counter; 1 where that is not seen."""
        body = {op.name: op for op in self.computations[loop.called("body")]}
        root = next(op for op in body.values() if op.root)
        counted = body.get(root.operands[place]) if root.opcode == "tuple" else None
        if counted is None or counted.opcode != "add":
            return 1
        added = [body[name] for name in counted.operands if name in body]
        constants = [_number(op) for op in added if op.opcode == "constant"]
        return max([1, *constants])


def _number(constant: Instruction) -> int:
    return int(constant.rest.split(")")[0])


def read(text: str) -> Module:
    """Reads `compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    entry = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, shape, opcode, rest = match.groups()
            operands = tuple(_OPERAND.findall(rest.split("), ")[0]))
            current.append(Instruction(name, shape, opcode, operands, rest, root is not None))
    return Module({name: tuple(body) for name, body in computations.items()}, entry)

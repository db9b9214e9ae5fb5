"""What a program moves and computes, counted from its optimised HLO.

XLA's own `cost_analysis` counts the body of a loop once, and so only one of all scanned layers.
Here bodies count as often as they run, and only bytes to or from the device's memory count as
moved, not those that XLA keeps on the chip. Of an array that a fusion only slices, the slices
count; of one that is updated in place, the update.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from ssd_jax.tools.aot.hlo import COLLECTIVES, Instruction, Module

_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier"),
)
_LAYOUTS = ("bitcast", "copy", "convert")
_CALLS = ("call", "call-start", "async-start")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Index of the operand that is written into the first one."""

_MOVES = {"copy-start": 0, "slice-start": 1}
"""Index of the destination in the result; other parts are the source, an operand, and a flag."""

_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_CUBLAS = 'custom_call_target="__cublas'
_COST = re.compile(r'"cost_estimate":\{([^}]*)\}')
_NUMBER = re.compile(r'"(\w+)":"?(\d+)')
_SCOPE = re.compile(r'op_name="[^"]*/(bytes_accessed)\.(\d+)')


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective at one place of a program.

    Attributes:
      nbytes: of the whole array that the devices share in the end.
      devices: number that take part.
      runs: number of runs.
      kind: HLO's name of the operation.
    """

    nbytes: int
    devices: int
    runs: int
    kind: str


@dataclasses.dataclass(frozen=True)
class ProgramWork:
    """The work of one run of a program on one device.

    Attributes:
      flops: of products, two for each multiply-add.
      of_int8: those of them that are products of integers.
      moved: bytes to and from the device's memory.
      collectives: those that it takes part in.
    """

    flops: int
    of_int8: int
    moved: int
    collectives: tuple[Collective, ...]


def count(module: Module, devices: int) -> ProgramWork:
    """The work of a program on a mesh of so many devices.

    A loop whose trips are unknown counts once, and all sides of a conditional count.
    """
    flops = of_int8 = moved = 0
    collectives = []
    for op, shapes, runs in _executed(module, module.entry, 1):
        if op.opcode.removesuffix("-start") in COLLECTIVES:
            collectives.append(_collective(op, devices, runs))
        moved += runs * _bytes_moved(module, op, shapes)
        for number, integers in _products(module, op, shapes):
            flops += runs * number
            of_int8 += runs * number * integers
    return ProgramWork(flops, of_int8, moved, tuple(collectives))


Shapes = dict[str, Instruction]
"""The instructions of a computation, by name."""


def _executed(module: Module, name: str, runs: int) -> Iterator[tuple[Instruction, Shapes, int]]:
    """Instructions that run outside fusions, with their computation and number of runs."""
    shapes = {op.name: op for op in module.computations[name]}
    for op in shapes.values():
        if op.opcode == "while":
            yield from _executed(module, op.called("body"), runs * (module.trips(op) or 1))
        elif op.opcode in _CALLS:
            yield from _executed(module, op.called("to_apply") or op.called("calls"), runs)
        elif op.opcode == "conditional":
            for side in re.findall(r"%([\w.\-]+)", op.rest.split("branch_computations=")[-1]):
                if side in module.computations:
                    yield from _executed(module, side, runs)
        else:
            yield op, shapes, runs


def _collective(op: Instruction, devices: int, runs: int) -> Collective:
    kind = op.opcode.removesuffix("-start")
    group = op.group or devices
    nbytes = sum(_result_parts(op, op.parts)) * (group if kind == "reduce-scatter" else 1)
    return Collective(nbytes, group, runs, kind)


def _result_parts(op: Instruction, parts: list[int]) -> list[int]:
    """The parts of a collective's result that it makes.

    In the result of a start, operands may come before these parts, and flags after them.
    """
    count = len(op.operands)
    started = op.opcode.endswith("-start") and len(parts) >= 2 * count
    return parts[count : 2 * count] if started else parts


def _bytes_moved(module: Module, op: Instruction, shapes: Shapes) -> int:
    """Bytes that one instruction moves to and from memory."""
    if op.opcode in _FREE or op.opcode.endswith(("-done", "-update")):
        return 0
    if estimate := _estimates(op).get("bytes_accessed"):
        return estimate
    fused = module.computations.get(op.called("calls"))
    operands = [shapes[name] for name in op.operands if name in shapes]
    if fused is None:
        return _unfused_bytes(op, operands)
    parameters = _parameters(fused)
    read = sum(
        min(_bytes_read(module, fused, parameters[place]), operand.in_memory)
        for place, operand in enumerate(operands)
        if operand.in_memory and place in parameters
    )
    return read + min(_bytes_written(module, fused), op.in_memory)


def _unfused_bytes(op: Instruction, operands: list[Instruction]) -> int:
    """Bytes that an instruction outside of fusions moves."""
    read = [operand.in_memory for operand in operands]
    if op.opcode in _SLICES and read:
        return min(read[0], op.nbytes) + op.in_memory + sum(read[1:])
    if op.opcode in _UPDATES and len(operands) > _UPDATES[op.opcode]:
        written = operands[_UPDATES[op.opcode]].nbytes if op.in_memory else 0
        return sum(read[1:]) + written
    if op.opcode in _MOVES:
        return min(sum(read), op.parts[_MOVES[op.opcode]]) + (op.in_memory - sum(read))
    if op.opcode.removesuffix("-start") in COLLECTIVES:
        return sum(read) + sum(_result_parts(op, op.parts_in_memory))
    if _CUBLAS in op.rest:  # the other part is its room to work in
        return sum(read) + op.parts_in_memory[0]
    return sum(read) + op.in_memory


def _bytes_read(module: Module, fused: tuple[Instruction, ...], value: Instruction) -> int:
    """Bytes of a value that a fused computation reads: all, or the slices that it takes."""
    total = 0
    for op in fused:
        if value.name not in op.operands:
            continue
        place = op.operands.index(value.name)
        if op.opcode in _SLICES and place == 0:
            total += op.nbytes
        elif _only_relays(module, op) and not op.root:
            total += _bytes_read(module, fused, op)
        elif op.opcode == "fusion":
            called = module.computations[op.called("calls")]
            total += _bytes_read(module, called, _parameters(called)[place])
        elif op.opcode not in _UPDATES or place != 0:
            return value.nbytes
    return total


def _only_relays(module: Module, op: Instruction) -> bool:
    """Whether an instruction within a fusion only passes on its operand, in any layout or type."""
    if op.opcode != "fusion":
        return op.opcode in _LAYOUTS
    fused = module.computations[op.called("calls")]
    return all(inner.opcode in ("parameter", *_LAYOUTS) for inner in fused)


def _bytes_written(module: Module, fused: tuple[Instruction, ...]) -> int:
    """Bytes that a fused computation writes: its result, or the new part of it."""
    by_name = {op.name: op for op in fused}
    root = next(op for op in fused if op.root)
    parts = [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for part in parts:
        while part.opcode == "bitcast":
            part = by_name[part.operands[0]]
        if part.opcode in _UPDATES:
            total += by_name[part.operands[_UPDATES[part.opcode]]].nbytes
        elif part.opcode == "fusion":
            total += _bytes_written(module, module.computations[part.called("calls")])
        else:
            total += part.in_memory
    return total


def _products(module: Module, op: Instruction, shapes: Shapes) -> Iterator[tuple[int, bool]]:
    """Flops of an instruction, or of each that is fused into it, and whether of integers."""
    integers = op.shape.lstrip("(").startswith("s32")
    if op.opcode == "dot" or _CUBLAS in op.rest:
        yield _dot_flops(op, shapes), integers
    elif op.opcode == "convolution":
        yield _convolution_flops(op, shapes), integers
    elif estimate := _estimates(op).get("flops"):
        taken = [shapes[name].shape for name in op.operands if name in shapes]
        yield estimate, any(shape.startswith("s8[") for shape in taken)
    elif op.opcode == "reduce" and op.operands[0] in shapes:
        yield _sum_flops(shapes[op.operands[0]], shapes), integers
    else:
        fused = {inner.name: inner for inner in module.computations.get(op.called("calls"), ())}
        for inner in fused.values():
            yield from _products(module, inner, fused)


def _dot_flops(op: Instruction, shapes: Shapes) -> int:
    match = _CONTRACTED.search(op.rest)
    dims = [int(place) for place in re.findall(r"\d+", match[1])] if match else []
    left = shapes[op.operands[0]].dims
    return 2 * math.prod(op.dims) * math.prod(left[place] for place in dims)


def _sum_flops(summed: Instruction, shapes: Shapes) -> int:
    """Flops of a sum: compilers write products with one row as summed products of elements."""
    while summed.opcode in _LAYOUTS and summed.operands[0] in shapes:
        summed = shapes[summed.operands[0]]
    return 2 * math.prod(summed.dims) if summed.opcode == "multiply" else 0


def _convolution_flops(op: Instruction, shapes: Shapes) -> int:
    """Flops of a convolution, as which TPU compilers write products.

    Windows stand for dimensions of batches: only where one meets a value is anything multiplied.
    """
    labels = _LABELS.search(op.rest)
    assert labels is not None
    left, right = (shapes[name].dims for name in op.operands[:2])
    left_labels, right_labels, result_labels = labels.groups()
    match = _WINDOW.search(op.rest)
    window = dict(item.split("=") for item in match[1].split()) if match else {}
    meetings = 1
    for place in range(len(left_labels) - 2):
        size = left[left_labels.index(str(place))]
        meetings *= _num_meetings(window, place, size, op.dims[result_labels.index(str(place))])
    rows, outputs = (op.dims[result_labels.index(name)] for name in "bf")
    return 2 * rows * outputs * right[right_labels.index("i")] * meetings


def _num_meetings(window: dict[str, str], place: int, size: int, results: int) -> int:
    """Number of pairs of a result and a place of its window, in a dimension, that meet a value."""

    def numbers(name: str, default: str) -> list[int]:
        parts = window[name].split("x") if name in window else [default] * (place + 1)
        return [int(number) for number in parts[place].split("_")]

    (width,), (stride,) = numbers("size", "1"), numbers("stride", "1")
    (base_dilation,), (window_dilation,) = numbers("lhs_dilate", "1"), numbers("rhs_dilate", "1")
    padding = numbers("pad", "0_0")[0]
    window_offsets = np.arange(width) * window_dilation - padding
    meetings = 0
    for result in range(results):
        offsets = result * stride + window_offsets
        is_inside = (
            (offsets >= 0)
            & (offsets <= (size - 1) * base_dilation)
            & (offsets % base_dilation == 0)
        )
        meetings += int(np.count_nonzero(is_inside))
    return meetings


def _estimates(op: Instruction) -> dict[str, int]:
    """A kernel's own estimate of its cost, or what the scope of its call says."""
    if op.opcode != "custom-call":
        return {}
    match = _COST.search(op.rest)
    numbers = _NUMBER.findall(match[1]) if match else _SCOPE.findall(op.rest)
    return {name: int(value) for name, value in numbers}


def _parameters(fused: tuple[Instruction, ...]) -> dict[int, Instruction]:
    """Parameters of a computation, by their places."""
    return {int(op.rest.split(")")[0]): op for op in fused if op.opcode == "parameter"}

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
    for each, shapes, runs in _run(module, module.entry, 1):
        if each.opcode.removesuffix("-start") in COLLECTIVES:
            collectives.append(_collective(each, devices, runs))
        moved += runs * _moved(module, each, shapes)
        for number, integers in _products(module, each, shapes):
            flops += runs * number
            of_int8 += runs * number * integers
    return ProgramWork(flops, of_int8, moved, tuple(collectives))


Shapes = dict[str, Instruction]
"""The instructions of a computation, by name."""


def _run(module: Module, name: str, runs: int) -> Iterator[tuple[Instruction, Shapes, int]]:
    """Instructions that run outside fusions, with their computation and number of runs."""
    shapes = {each.name: each for each in module.computations[name]}
    for each in shapes.values():
        if each.opcode == "while":
            yield from _run(module, each.called("body"), runs * (module.trips(each) or 1))
        elif each.opcode in _CALLS:
            yield from _run(module, each.called("to_apply") or each.called("calls"), runs)
        elif each.opcode == "conditional":
            for side in re.findall(r"%([\w.\-]+)", each.rest.split("branch_computations=")[-1]):
                if side in module.computations:
                    yield from _run(module, side, runs)
        else:
            yield each, shapes, runs


def _collective(each: Instruction, devices: int, runs: int) -> Collective:
    kind = each.opcode.removesuffix("-start")
    group = each.group or devices
    whole = sum(_given(each, each.parts)) * (group if kind == "reduce-scatter" else 1)
    return Collective(whole, group, runs, kind)


def _given(each: Instruction, parts: list[int]) -> list[int]:
    """The parts of a collective's result that it makes.

    In the result of a start, operands may come before these parts, and flags after them.
    """
    count = len(each.operands)
    started = each.opcode.endswith("-start") and len(parts) >= 2 * count
    return parts[count : 2 * count] if started else parts


def _moved(module: Module, each: Instruction, shapes: Shapes) -> int:
    """Bytes that one instruction moves to and from memory."""
    if each.opcode in _FREE or each.opcode.endswith(("-done", "-update")):
        return 0
    if estimate := _estimated(each).get("bytes_accessed"):
        return estimate
    inside = module.computations.get(each.called("calls"))
    operands = [shapes[name] for name in each.operands if name in shapes]
    if inside is None:
        return _alone(each, operands)
    parameters = _parameters(inside)
    read = sum(
        min(_read(module, inside, parameters[place]), operand.in_memory)
        for place, operand in enumerate(operands)
        if operand.in_memory and place in parameters
    )
    return read + min(_written(module, inside), each.in_memory)


def _alone(each: Instruction, operands: list[Instruction]) -> int:
    """Bytes that an instruction outside of fusions moves."""
    read = [operand.in_memory for operand in operands]
    if each.opcode in _SLICES and read:
        return min(read[0], each.nbytes) + each.in_memory + sum(read[1:])
    if each.opcode in _UPDATES and len(operands) > _UPDATES[each.opcode]:
        written = operands[_UPDATES[each.opcode]].nbytes if each.in_memory else 0
        return sum(read[1:]) + written
    if each.opcode in _MOVES:
        return min(sum(read), each.parts[_MOVES[each.opcode]]) + (each.in_memory - sum(read))
    if each.opcode.removesuffix("-start") in COLLECTIVES:
        return sum(read) + sum(_given(each, each.parts_in_memory))
    if _CUBLAS in each.rest:  # the other part is its room to work in
        return sum(read) + each.parts_in_memory[0]
    return sum(read) + each.in_memory


def _read(module: Module, inside: tuple[Instruction, ...], value: Instruction) -> int:
    """Bytes of a value that a fused computation reads: all, or the slices that it takes."""
    total = 0
    for each in inside:
        if value.name not in each.operands:
            continue
        place = each.operands.index(value.name)
        if each.opcode in _SLICES and place == 0:
            total += each.nbytes
        elif _passed_on(module, each) and not each.root:
            total += _read(module, inside, each)
        elif each.opcode == "fusion":
            called = module.computations[each.called("calls")]
            total += _read(module, called, _parameters(called)[place])
        elif each.opcode not in _UPDATES or place != 0:
            return value.nbytes
    return total


def _passed_on(module: Module, each: Instruction) -> bool:
    """Whether an instruction within a fusion only passes on its operand, in any layout or type."""
    if each.opcode != "fusion":
        return each.opcode in _LAYOUTS
    inside = module.computations[each.called("calls")]
    return all(one.opcode in ("parameter", *_LAYOUTS) for one in inside)


def _written(module: Module, inside: tuple[Instruction, ...]) -> int:
    """Bytes that a fused computation writes: its result, or the new part of it."""
    own = {each.name: each for each in inside}
    root = next(each for each in inside if each.root)
    parts = [own[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for part in parts:
        while part.opcode == "bitcast":
            part = own[part.operands[0]]
        if part.opcode in _UPDATES:
            total += own[part.operands[_UPDATES[part.opcode]]].nbytes
        elif part.opcode == "fusion":
            total += _written(module, module.computations[part.called("calls")])
        else:
            total += part.in_memory
    return total


def _products(module: Module, each: Instruction, shapes: Shapes) -> Iterator[tuple[int, bool]]:
    """Flops of an instruction, or of each that is fused into it, and whether of integers."""
    integers = each.shape.lstrip("(").startswith("s32")
    if each.opcode == "dot" or _CUBLAS in each.rest:
        yield _of_dot(each, shapes), integers
    elif each.opcode == "convolution":
        yield _of_convolution(each, shapes), integers
    elif estimate := _estimated(each).get("flops"):
        yield estimate, False
    elif each.opcode == "reduce" and each.operands[0] in shapes:
        yield _of_sum(shapes[each.operands[0]], shapes), integers
    else:
        inside = {one.name: one for one in module.computations.get(each.called("calls"), ())}
        for one in inside.values():
            yield from _products(module, one, inside)


def _of_dot(each: Instruction, shapes: Shapes) -> int:
    found = _CONTRACTED.search(each.rest)
    dims = [int(place) for place in re.findall(r"\d+", found[1])] if found else []
    left = shapes[each.operands[0]].dims
    return 2 * math.prod(each.dims) * math.prod(left[place] for place in dims)


def _of_sum(summed: Instruction, shapes: Shapes) -> int:
    """Flops of a sum: compilers write products with one row as summed products of elements."""
    while summed.opcode in _LAYOUTS and summed.operands[0] in shapes:
        summed = shapes[summed.operands[0]]
    return 2 * math.prod(summed.dims) if summed.opcode == "multiply" else 0


def _of_convolution(each: Instruction, shapes: Shapes) -> int:
    """Flops of a convolution, as which TPU compilers write products.

    Windows stand for dimensions of batches: only where one meets a value is anything multiplied.
    """
    labels = _LABELS.search(each.rest)
    assert labels is not None
    left, right = (shapes[name].dims for name in each.operands[:2])
    of_left, of_right, of_result = labels.groups()
    found = _WINDOW.search(each.rest)
    window = dict(item.split("=") for item in found[1].split()) if found else {}
    met = 1
    for place in range(len(of_left) - 2):
        size = left[of_left.index(str(place))]
        met *= _met(window, place, size, each.dims[of_result.index(str(place))])
    rows, outputs = (each.dims[of_result.index(name)] for name in "bf")
    return 2 * rows * outputs * right[of_right.index("i")] * met


def _met(window: dict[str, str], place: int, size: int, results: int) -> int:
    """Number of pairs of a result and a place of its window, in a dimension, that meet a value."""

    def numbers(name: str, default: str) -> list[int]:
        parts = window[name].split("x") if name in window else [default] * (place + 1)
        return [int(number) for number in parts[place].split("_")]

    (width,), (stride,) = numbers("size", "1"), numbers("stride", "1")
    (spread,), (between,) = numbers("lhs_dilate", "1"), numbers("rhs_dilate", "1")
    before = numbers("pad", "0_0")[0]
    window_places = np.arange(width) * between - before
    met = 0
    for result in range(results):
        at = result * stride + window_places
        meets = (at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)
        met += int(np.count_nonzero(meets))
    return met


def _estimated(each: Instruction) -> dict[str, int]:
    """A kernel's own estimate of its cost, or what the scope of its call says."""
    if each.opcode != "custom-call":
        return {}
    found = _COST.search(each.rest)
    numbers = _NUMBER.findall(found[1]) if found else _SCOPE.findall(each.rest)
    return {name: int(value) for name, value in numbers}


def _parameters(inside: tuple[Instruction, ...]) -> dict[int, Instruction]:
    """Parameters of a computation, by their places."""
    return {int(each.rest.split(")")[0]): each for each in inside if each.opcode == "parameter"}

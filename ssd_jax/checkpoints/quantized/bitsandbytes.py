"""bitsandbytes: 4 bits by a table (nf4, fp4) with a scale a block, and int8 with a scale a row."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from jaxtyping import Float32
from typing_extensions import override

from ssd_jax.checkpoints.quantized.scheme import MatrixScheme, MatrixShape, StoredTensors

_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))


class FourBits(MatrixScheme):
    """`weight` uint8 [n / 2, 1], all values in the order of rows, the first of a byte in its high
    half; `weight.absmax` scales blocks of them and may itself be quantised, in blocks, by the table
    `weight.nested_quant_map`."""

    name = "bitsandbytes (4 bits)"
    main = "weight"
    needed = (("weight.absmax",), ("weight.quant_map",), _STATES)
    beside = ("weight.nested_absmax", "weight.nested_quant_map")

    @override
    def shape(self, stored: StoredTensors, module: str) -> MatrixShape:
        outputs, inputs = map(int, _state(stored, module)["shape"])
        if 2 * np.prod(stored.shapes[f"{module}.weight"]) != outputs * inputs:
            raise ValueError(f"the quantisation state says {[outputs, inputs]}")
        return outputs, inputs

    @override
    def read_rows(
        self, stored: StoredTensors, module: str, rows: slice
    ) -> Float32[np.ndarray, "rows inputs"]:
        state, (_, inputs) = _state(stored, module), self.shape(stored, module)
        size = int(state["blocksize"])
        first, last = rows.start * inputs // size, -(-rows.stop * inputs // size)
        count = int(np.prod(stored.shapes[f"{module}.weight"]))
        stop = min(last * size // 2, count)
        packed = stored.read_stored(f"{module}.weight", (slice(first * size // 2, stop),))
        places = np.stack([packed.reshape(-1) >> 4, packed.reshape(-1) & 0xF], axis=1).reshape(-1)
        table = stored.read_stored(f"{module}.weight.quant_map").astype(np.float32)
        scales = np.repeat(_scales(stored, module, state)[first:last], size)[: places.size]
        start = rows.start * inputs - first * size
        length = (rows.stop - rows.start) * inputs
        return (table[places] * scales)[start : start + length].reshape(-1, inputs)


class EightBits(MatrixScheme):
    """`weight` int8 [outputs, inputs] and `SCB`, each row's largest magnitude, which 127 is."""

    name = "bitsandbytes (8 bits)"
    main = "weight"
    needed = (("SCB",),)
    beside = ("weight_format",)

    @override
    def shape(self, stored: StoredTensors, module: str) -> MatrixShape:
        outputs, inputs = stored.shapes[f"{module}.weight"]
        if stored.shapes[f"{module}.SCB"] != (outputs,):
            raise ValueError(f"SCB {[*stored.shapes[f'{module}.SCB']]} beside {outputs} rows")
        return outputs, inputs

    @override
    def read_rows(
        self, stored: StoredTensors, module: str, rows: slice
    ) -> Float32[np.ndarray, "rows inputs"]:
        _, inputs = self.shape(stored, module)
        values = stored.read_stored(f"{module}.weight", (rows, slice(0, inputs)))
        scales = stored.read_stored(f"{module}.SCB", (rows,)).astype(np.float32) / np.float32(127)
        return values.astype(np.float32) * scales[:, None]


def _state(stored: StoredTensors, module: str) -> dict[str, Any]:
    """What bitsandbytes says of a matrix: its shape, sizes of blocks, and an offset."""
    names = (f"{module}.{suffix}" for suffix in _STATES)
    name = next(name for name in names if name in stored.shapes)
    return json.loads(bytes(stored.read_stored(name)))


def _scales(
    stored: StoredTensors, module: str, state: dict[str, Any]
) -> Float32[np.ndarray, "blocks"]:
    """The scale of each block."""
    scales, nested = stored.read_stored(f"{module}.weight.absmax"), f"{module}.weight.nested_absmax"
    if nested not in stored.shapes:
        return scales.astype(np.float32)
    table = stored.read_stored(f"{module}.weight.nested_quant_map").astype(np.float32)
    outer = np.repeat(stored.read_stored(nested).astype(np.float32), int(state["nested_blocksize"]))
    offset = np.float32(state["nested_offset"])
    return table[scales] * outer[: scales.size] + offset

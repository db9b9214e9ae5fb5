"""How a packed weight stores its values: in panels of 32 outputs, each one stream of bytes.

A weight of N outputs and K inputs is uint8 [ceil(N / 32), panel_bytes(K)]. A panel is one block of
inputs after the other. A word is 4 bytes; a lane is an output within its panel, 0 to 31; "32 x"
means one a lane, in order. Everything is little-endian. The lanes of outputs that do not exist are
zero bytes, so that their scales make their values 0. A block, by kind:

  bfloat16   of each pair of inputs, 32 x 2 bfloat16. K is padded with zeros.
  int8       of each four inputs, 32 x a word of u = value + 128. K is padded with u = 128. After
             all blocks, 32 x float32 scale.
  w8a8       as int8.
  F8_E4M3    of each four inputs, 32 x a word of 8-bit floats, of inputs 0, 2, 1, 3; 32 x float32
             scale. K is padded with zeros.
  Q4_0       4 steps of 32 x a word of nibbles; 32 x float16 scale.
  Q4_1       as Q4_0; 32 x float16 minimum.
  Q5_0       4 steps of 32 x a word of nibbles; 32 x a word of high bits; 32 x float16
             scale.
  Q5_1       as Q5_0; 32 x float16 minimum.
  Q8_0       8 steps of 32 x a word of u = value + 128; 32 x float16 scale.
  Q4_K       32 x float16 d; 32 x float16 dmin; 8 groups, each of Q4_0's nibbles, 32 x uint8 scale,
             32 x uint8 minimum. The group's scale is d * scale, its minimum -dmin * minimum.
  Q5_K       as Q4_K, with a word of high bits after the nibbles of each group.
  Q6_K       32 x float16 d; 16 groups, each of 2 steps of 32 x a word of nibbles, 32 x a word of
             high bits, 32 x int8 scale. The group's scale is d * scale.
  MXFP4      4 steps of 32 x a word of nibbles, each a float of E2M1; 32 x uint8 exponent. u is 12
             more than twice the float; the scale is 2^(exponent - 128).

Word s of bytes holds inputs 4s to 4s + 3. Byte j of a group's nibbles holds input j in its low half
and input j + 16 (Q6_K: 8) in its high half; word s holds bytes 4s to 4s + 3. Byte j of the
high bits holds bit 4 (Q6_K: 4 and 5) of inputs j, j + 4, j + 8 and so on, from its lowest bit
on. A value is (u - offset) * scale + minimum, u being the nibble with its high bits, or the
byte, with the terms that the kind has.
"""

from __future__ import annotations

import dataclasses
import math

LANES = 32
"""Outputs of a panel."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way of storing values, with sizes in inputs and bytes.

    Attributes:
      name: ggml's name of the type, or the dtype's.
      block: inputs of a block; a packed weight's inputs are a multiple of it.
      block_bytes: bytes of a panel's block.
      per_word: inputs in a word (of nibbles, if the kind has them).
      high_bits: bits of an input above its nibble.
      group: inputs that share a scale; 0 if none do, or all.
      offset: the excess of the stored integers over the values.
      minima: whether a group has a minimum.
      e2m1: whether nibbles are floats of E2M1, and scales exponents.
      stored_bytes: bytes of ggml's block (one output, `block` inputs); of F8_E4M3, which ggml does
        not have, of a float32 scale and the floats; else 0.
      tail_bytes: bytes after a panel's last block.
    """

    name: str
    block: int
    block_bytes: int
    per_word: int
    high_bits: int = 0
    group: int = 0
    offset: int = 0
    minima: bool = False
    e2m1: bool = False
    stored_bytes: int = 0
    tail_bytes: int = 0

    def padded_inputs(self, inputs: int) -> int:
        """Inputs of a packed weight; more than `inputs` only for kinds that ggml does not have."""
        return math.ceil(inputs / self.block) * self.block

    def panel_bytes(self, inputs: int) -> int:
        """Bytes of a panel."""
        return self.padded_inputs(inputs) // self.block * self.block_bytes + self.tail_bytes

    def packed_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Shape of a packed weight: panels, and bytes a panel."""
        return math.ceil(outputs / LANES), self.panel_bytes(inputs)


_WORDS = 4 * LANES
_HALVES = 2 * LANES

BFLOAT16 = Kind("bfloat16", block=32, block_bytes=16 * _WORDS, per_word=2)
INT8 = Kind("int8", block=64, block_bytes=16 * _WORDS, per_word=4, offset=128, tail_bytes=_WORDS)
W8A8 = dataclasses.replace(INT8, name="w8a8")
FLOAT8 = Kind(
    "F8_E4M3", block=128, block_bytes=33 * _WORDS, per_word=4, group=128, stored_bytes=132
)

_STORED = (
    Kind("Q4_0", 32, 4 * _WORDS + _HALVES, 8, group=32, offset=8, stored_bytes=18),
    Kind("Q4_1", 32, 4 * _WORDS + 2 * _HALVES, 8, group=32, minima=True, stored_bytes=20),
    Kind("Q5_0", 32, 5 * _WORDS + _HALVES, 8, high_bits=1, group=32, offset=16, stored_bytes=22),
    Kind(
        "Q5_1", 32, 5 * _WORDS + 2 * _HALVES, 8, high_bits=1, group=32, minima=True, stored_bytes=24
    ),
    Kind("Q8_0", 32, 8 * _WORDS + _HALVES, 4, group=32, offset=128, stored_bytes=34),
    Kind(
        "Q4_K", 256, 2 * _HALVES + 8 * (4 * _WORDS + 2 * LANES), 8, group=32, minima=True,
        stored_bytes=144,
    ),
    Kind(
        "Q5_K", 256, 2 * _HALVES + 8 * (5 * _WORDS + 2 * LANES), 8, high_bits=1, group=32,
        minima=True, stored_bytes=176,
    ),
    Kind(
        "Q6_K", 256, _HALVES + 16 * (3 * _WORDS + LANES), 8, high_bits=2, group=16, offset=32,
        stored_bytes=210,
    ),
    Kind("MXFP4", 32, 4 * _WORDS + LANES, 8, group=32, offset=12, e2m1=True, stored_bytes=17),
)  # fmt: skip

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The floats of four bits, by their bits."""

KINDS = {kind.name: kind for kind in (BFLOAT16, INT8, W8A8, FLOAT8, *_STORED)}

GGML_KINDS = tuple(kind.name for kind in _STORED)
"""The kinds that store weights of GGUF files unchanged."""

STORED_KINDS = (*GGML_KINDS, FLOAT8.name)
"""The kinds that store weights of files unchanged."""

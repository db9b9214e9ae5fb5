"""Mutations of the parts of a GGUF file."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import gguf_bytes

NUMBERS = [0, -1, 1, 2, 7, 255, 10**9, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, -(10**30)]


def mutate(path: Path, kind: str, rng: random.Random) -> str:
    """Changes one part of a clean file; returns what was done, in words."""
    parts = gguf_bytes.clean(kind.removeprefix("gguf-"))
    done = rng.choice(_GGUF)(parts, rng)
    path.write_bytes(parts.pack())
    return done


def _key(parts: gguf_bytes.Parts, rng: random.Random) -> str:
    place = rng.randrange(len(parts.metadata))
    key = parts.metadata[place][0]
    lists = [[], [1], ["a"], [0.5], ["a" * 5000], ["x"] * 1000, [1] * 300]
    others = [0.0, 1e38, float("inf"), float("nan"), "", "x", True, *lists]
    value = rng.choice([*(n for n in NUMBERS if 0 <= n < 2**32), *others])
    parts.metadata[place] = (key, *gguf_bytes.kind_of(value))
    return f"{key} = {str(value)[:60]}"


def _item(parts: gguf_bytes.Parts, rng: random.Random) -> str:
    lists = [place for place, (_, kind, _) in enumerate(parts.metadata) if kind == gguf_bytes.ARRAY]
    place = rng.choice(lists)
    key, kind, (of, items, _) = parts.metadata[place]
    items = list(items)
    what = rng.choice(("claim", "item", "delete", "twice"))
    claimed = None
    if what == "claim":
        claimed = rng.choice([0, 1, len(items) + 1, 2**22 + 1, 2**31, 2**40, 2**62, 2**64 - 1])
    elif what == "item":
        new = {
            gguf_bytes.STRING: ["", "x y", "x y z", "a" * 5000, "a" * 200_000, "\ud800", items[0]],
            6: [float("nan"), float("inf"), 0.0],
        }
        items[rng.randrange(len(items))] = rng.choice(new.get(of, [0, 1, 6, 77, 2**31 - 1]))
    elif what == "delete":
        del items[rng.randrange(len(items))]
    else:
        items += items[:1]
    parts.metadata[place] = (key, kind, (of, items, claimed))
    return f"{what} of {key}"


def _raw(parts: gguf_bytes.Parts, rng: random.Random) -> str:
    """Lists within lists, and types that there are not."""
    place = rng.randrange(len(parts.metadata))
    key = parts.metadata[place][0]
    deep = rng.choice([1, 2, 5, 500, 50_000])
    nested = struct.pack("<IQ", gguf_bytes.ARRAY, 1) * deep + struct.pack("<IQIQ", 9, 1, 4, 0)
    empty = struct.pack("<IQ", gguf_bytes.ARRAY, 5000) + struct.pack("<IQ", 4, 0) * 5000
    kind, value = rng.choice(
        [(9, nested), (9, empty), (13, b""), (2**31, b"1234"), (8, b"\xff" * 8)]
    )
    parts.metadata[place] = (key, kind, value)
    return f"{key} of type {kind}, {len(value)} bytes"


def _tensor(parts: gguf_bytes.Parts, rng: random.Random) -> str:
    place = rng.randrange(len(parts.tensors))
    name, shape, kind, offset = parts.tensors[place]
    sizes = [0, 1, 31, 33, 64, 2**31, 2**40, 2**63, 2**64 - 1]
    what = rng.choice(("size", "size", "shape", "type", "offset", "name", "delete", "dimensions"))
    if what == "size":
        axis = rng.randrange(len(shape))
        shape = (*shape[:axis], rng.choice(sizes), *shape[axis + 1 :])
    elif what == "shape":
        shape = rng.choice([(), (1,), shape[::-1], (*shape, 1), (2**32, 2**32, 2**32), (0, 2**62)])
    elif what == "type":
        kind = rng.choice([0, 1, 2, 3, 4, 8, 12, 14, 15, 24, 30, 99, 2**31])
    elif what == "offset":
        offset = rng.choice([1, 31, -32, 2**40, 2**63, len(parts.data), len(parts.data) - 4])
    elif what == "name":
        name = rng.choice(
            ["", parts.tensors[0][0], "blk.999999999.attn_q.weight", "x" * 100_000, "output.weight"]
        )
    elif what == "delete":
        del parts.tensors[place]
        return f"without {name}"
    else:
        parts.dimensions = rng.choice([0, 5, 1000, 2**31, 2**32 - 1])
    parts.tensors[place] = (name, shape, kind, offset)
    return f"{what} of {name[:60]}: {shape} {kind} {offset}"


def _header(parts: gguf_bytes.Parts, rng: random.Random) -> str:
    counts = [0, 1, 10**6, 2**31, 2**40, 2**63, 2**64 - 1]
    what = rng.choice(("tensors", "keys", "version", "twice", "delete", "layers", "alignment"))
    if what in ("tensors", "keys"):
        count = rng.choice(counts)
        parts.counts = (count, None) if what == "tensors" else (None, count)
    elif what == "version":
        parts.version = rng.choice([0, 1, 2, 4, 3 << 24])
    elif what == "twice":
        parts.metadata.append(rng.choice(parts.metadata))
    elif what == "delete":
        del parts.metadata[rng.randrange(len(parts.metadata))]
    elif what == "layers":
        named = [place for place, entry in enumerate(parts.metadata) if "block_count" in entry[0]]
        parts.metadata[named[0]] = (parts.metadata[named[0]][0], 4, rng.choice([0, 2, 10**9]))
    else:
        value = rng.choice([0, 1, 2**31, -1.0, float("inf"), "32", [32]])
        parts.metadata.append(("general.alignment", *gguf_bytes.kind_of(value)))
    return f"{what} of the header"


_GGUF: list[Callable[[gguf_bytes.Parts, random.Random], str]] = [
    _key, _key, _item, _item, _raw, _tensor, _tensor, _header,
]  # fmt: skip

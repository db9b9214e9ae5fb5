"""GGUF files from their parts, right or wrong, without anything that checks them."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

from tests.checkpoints import builders, tiny_gguf

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
HIDDEN, FFN, HEADS, KV_HEADS = 32, 32, 4, 2


@dataclasses.dataclass
class Parts:
    """What a file has; `counts` overrides the numbers that its header claims."""

    metadata: list[tuple[str, int, Any]]
    tensors: list[tuple[str, tuple[int, ...], int, int]]  # name, dimensions, type, offset
    data: bytes
    version: int = 3
    counts: tuple[int | None, int | None] = (None, None)  # tensors, keys
    dimensions: int | None = None  # that the first tensor claims

    def pack(self) -> bytes:
        """The file."""
        tensors, keys = self.counts
        out = [
            b"GGUF",
            struct.pack(
                "<IQQ",
                self.version,
                len(self.tensors) if tensors is None else tensors,
                len(self.metadata) if keys is None else keys,
            ),
        ]
        for key, kind, value in self.metadata:
            out += [string(key), struct.pack("<I", kind), packed(kind, value)]
        for place, (name, shape, kind, offset) in enumerate(self.tensors):
            claimed = len(shape) if self.dimensions is None or place else self.dimensions
            out += [string(name), struct.pack("<I", claimed)]
            out += [struct.pack("<Q", size & (2**64 - 1)) for size in shape]
            out.append(struct.pack("<IQ", kind, offset & (2**64 - 1)))
        header = b"".join(out)
        return header + b"\0" * (-len(header) % 32) + self.data


def string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def packed(kind: int, value: Any) -> bytes:
    """A value; of an array (type of items, items, number that it claims or None)."""
    if isinstance(value, bytes):
        return value
    if kind == STRING:
        return string(value)
    if kind == ARRAY:
        of, items, claimed = value
        head = struct.pack("<IQ", of, len(items) if claimed is None else claimed)
        return head + b"".join(packed(of, item) for item in items)
    return struct.pack("<" + SCALARS[kind], value)


def kind_of(value: Any) -> tuple[int, Any]:
    """The type of a Python value, and what `packed` takes of it."""
    if isinstance(value, bool):
        return 7, value
    if isinstance(value, int):
        return 4, value
    if isinstance(value, float):
        return 6, value
    if isinstance(value, str):
        return STRING, value
    return ARRAY, (kind_of(value[0])[0] if value else STRING, value, None)


def clean(family: str) -> Parts:
    """A model of one layer with a tokenizer: sentencepiece for llama, else byte-level."""
    if family == "llama":
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokens += ["\u2581", "h", "e", "he", "\u2581he"]
        tokenizer = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [-float(place) for place in range(len(tokens))],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_space_prefix": True,
        }
    else:
        tokenizer = builders.metadata(("<eos>", 3), eos_token_id=len(builders.TOKENS))
    vocabulary = len(tokenizer["tokenizer.ggml.tokens"])
    keys = tiny_gguf.metadata(
        family,
        block_count=1,
        embedding_length=HIDDEN,
        feed_forward_length=FFN,
        attention__head_count=HEADS,
        attention__head_count_kv=KV_HEADS,
    )
    template = {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    every = {"general.architecture": family, **keys, **tokenizer, **template}
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {  # innermost first
        "token_embd.weight": (HIDDEN, vocabulary),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN, kv),
        "blk.0.attn_v.weight": (HIDDEN, kv),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (HIDDEN, FFN),
        "blk.0.ffn_up.weight": (HIDDEN, FFN),
        "blk.0.ffn_down.weight": (FFN, HIDDEN),
    }
    if family == "qwen2":
        for part, size in (("q", HIDDEN), ("k", kv), ("v", kv)):
            shapes[f"blk.0.attn_{part}.bias"] = (size,)
    else:
        shapes["rope_freqs.weight"] = (HIDDEN // HEADS // 2,)
    tensors, data = [], b""
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        quantized = name == "blk.0.ffn_up.weight"
        tensors.append((name, shape, 8 if quantized else 0, len(data)))
        data += b"\1" * (count // 32 * 34) if quantized else struct.pack("<f", 1.0) * count
        data += b"\0" * (-len(data) % 32)
    return Parts([(key, *kind_of(value)) for key, value in every.items()], tensors, data)

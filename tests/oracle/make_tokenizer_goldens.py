"""Writes the ids that llama.cpp gives the texts of tests/goldens/tokenizer/texts.json.

    python tests/oracle/make_tokenizer_goldens.py SMOLLM2.gguf QWEN2.5.gguf

Needs the packages llama-cpp-python (built from source) and gguf; the versions used are written
into the files. Nothing of ssd_jax is imported: llama.cpp is the independent judge.

- smollm2.json: the SmolLM2 file, with its own pre-tokenizer and with the others in its place.
- qwen2.5.json: a Qwen2.5 file.
- sentencepiece.json: a small vocabulary in the form of Llama 2's, trained here on the same texts.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import llama_cpp

GOLDENS = Path(__file__).parent.parent / "goldens" / "tokenizer"
PACKAGES = ("llama-cpp-python", "gguf")


def main() -> None:
    smollm2, qwen = map(Path, sys.argv[1:])
    texts = json.loads((GOLDENS / "texts.json").read_text())
    by_pre = {
        pre: ids_of(smollm2, texts, {"tokenizer.ggml.pre": pre})
        for pre in ("smollm", "qwen2", "llama-bpe", "gpt-2", "default")
    }
    write("smollm2.json", {"file": smollm2.name, "ids": by_pre})
    write("qwen2.5.json", {"file": qwen.name, "ids": ids_of(qwen, texts, {})})
    write("sentencepiece.json", sentencepiece(texts))


def ids_of(file: Path, texts: list[str], overrides: dict[str, Any]) -> list[list[int]]:
    """The ids of each text, special tokens recognised, with a BOS where the file says so."""
    llama = llama_cpp.Llama(str(file), vocab_only=True, verbose=False, kv_overrides=overrides)
    return [llama.tokenize(text.encode(), add_bos=True, special=True) for text in texts]


def sentencepiece(texts: list[str]) -> dict[str, Any]:
    """A vocabulary of a few hundred pieces and its ids, with and without the space prefix."""
    metadata = small_vocabulary(texts)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "vocabulary.gguf"
        write_gguf(file, metadata)
        ids = {
            str(prefix).lower(): ids_of(file, texts, {"tokenizer.ggml.add_space_prefix": prefix})
            for prefix in (True, False)
        }
    return {"metadata": metadata, "ids": ids}


def small_vocabulary(texts: list[str]) -> dict[str, Any]:
    """Pieces with the scores that sentencepiece gives: the earlier merged, the better.

    Other scripts than Latin are left out, so that they fall back to bytes, and texts with ChatML
    tokens: llama.cpp would take such a piece for a control token.
    """
    named = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|user|>"]
    words = Counter(
        word
        for text in texts
        if "<|" not in text
        for word in re.findall("\u2581[^\u2581]*", "\u2581" + text.replace(" ", "\u2581"))
        if max(word.lstrip("\u2581"), default="") < "\u0400"
    )
    characters = sorted({char for word in words for char in word})
    ranked = [*train(words, merges=400), *characters]
    normal = len(ranked)
    tokens = [*named, *reversed(ranked)]  # ids need not follow the scores
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(named) + [float(i - normal) for i in range(normal)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [4] + [1] * normal,
    }


def train(words: Counter[str], *, merges: int) -> list[str]:
    """Byte-pair encoding: the most frequent pair first, of equals the one that sorts first."""
    split = {word: list(word) for word in words}
    merged: list[str] = []
    while len(merged) < merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in split.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if "".join(best) not in merged:
            merged.append("".join(best))
        split = {word: join(parts, best) for word, parts in split.items()}
    return merged


def join(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """Replaces each occurrence of the pair by its concatenation."""
    joined: list[str] = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def write_gguf(file: Path, metadata: dict[str, Any]) -> None:
    """A GGUF file with a vocabulary and no tensors."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_scores(metadata["tokenizer.ggml.scores"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write(name: str, golden: dict[str, Any]) -> None:
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    text = json.dumps({"made_with": versions, **golden}, separators=(",", ":"))
    (GOLDENS / name).write_text(text + "\n")


if __name__ == "__main__":
    main()

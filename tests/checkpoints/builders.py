"""Tiny tokenizers, as GGUF metadata and as Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
TOKENS = [*LETTERS, *(merge.replace(" ", "") for merge in MERGES)]


def metadata(*added: tuple[str, int], **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level vocabulary; `added` are (token, type), `changes` ggml keys."""
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS + [token for token, _ in added],
        "token_type": [1] * len(TOKENS) + [kind for _, kind in added],
        "merges": MERGES,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def backend(*added: AddedToken) -> Tokenizer:
    """A byte-level tokenizer with the same vocabulary."""
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    return tokenizer


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def directory(path: Path, tokenizer: Tokenizer | None = None, /, **files: Any) -> Path:
    """Writes a model directory; `files` are JSON values, or text for `chat_template` and, by name,
    `additional_chat_templates`."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or backend(special("<s>"), special("</s>"))
    tokenizer.save(str(path / "tokenizer.json"))
    for name, value in files.items():
        if name == "chat_template":
            (path / "chat_template.jinja").write_text(value, encoding="utf-8")
        elif name == "additional_chat_templates":
            (path / name).mkdir(exist_ok=True)
            for template, source in value.items():
                (path / name / f"{template}.jinja").write_text(source, encoding="utf-8")
        else:
            (path / f"{name}.json").write_text(json.dumps(value))
    return path

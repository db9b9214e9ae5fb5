from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ssd_jax.checkpoints.gguf.header import read_header
from ssd_jax.checkpoints.tokenizers.gguf import tokenizer_from_gguf
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[2] / "goldens" / "tokenizer"


def golden(name: str) -> Any:
    """A file of tests/goldens/tokenizer; tests/oracle/make_tokenizer_goldens.py made it."""
    return json.loads((GOLDENS / name).read_text())


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return golden("texts.json")


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    return dict(read_header(smollm2_path).metadata)


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(smollm2_metadata, where="SmolLM2")


@pytest.fixture(scope="session")
def small_sentencepiece() -> Tokenizer:
    return tokenizer_from_gguf(golden("sentencepiece.json")["metadata"], where="golden")

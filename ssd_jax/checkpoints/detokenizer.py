"""Incremental detokenization: the text of a stream of generated tokens."""

from __future__ import annotations

from collections.abc import Iterable

from ssd_jax.checkpoints.tokenizer import Tokenizer


class Detokenizer:
    """Text of one growing sequence; special tokens are skipped.

    All pushed text followed by `flush()` equals `tokenizer.decode` of all ids, however they were
    cut into pushes. The cost of a push does not grow with the length of the sequence.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special_ids = tokenizer.special_ids
        self._stream = tokenizer.open_stream()

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that these ids complete; never half a character."""
        return self._stream.push(i for i in ids if i not in self._special_ids)

    def flush(self) -> str:
        """Return what was held back at the end of the sequence; half a character is U+FFFD."""
        return self._stream.flush()

"""What a tokenizer puts around a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


def begin_with(backend: tokenizers.Tokenizer, bos_id: int) -> None:
    """Make the tokenizer put this token before every text that is encoded with special tokens."""
    from tokenizers import processors

    bos = {"id": "BOS", "ids": [bos_id], "tokens": [backend.id_to_token(bos_id)]}
    backend.post_processor = processors.TemplateProcessing(
        single=["BOS", "$A"], pair=["BOS", "$A", "$B"], special_tokens=[bos]
    )

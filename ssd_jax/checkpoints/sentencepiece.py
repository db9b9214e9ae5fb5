"""Sentencepiece tokenizers of Llama 2 and its kin, built as BPE with byte fallback.

Source: the conversion in `transformers.convert_slow_tokenizer` (LlamaConverter, legacy form), which
puts the space prefix before every stretch of text between special tokens, as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ssd_jax.checkpoints.token_decoding import SPACE_MARK

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def sentencepiece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    *,
    unknown_id: int,
    space_prefix: bool,
) -> Tokenizer:
    """Build the tokenizer; special tokens and the post-processor are the caller's.

    Args:
      tokens: by id; a space is written as SPACE_MARK, bytes as `<0x0A>`.
      scores: by id; of two possible merges the one that makes the better scored token comes first.
      unknown_id: the id of what is neither a token nor, for lack of byte tokens, bytes.
      space_prefix: a text begins with a space that `decode` takes away.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(
            vocab,
            merges_by_score(tokens, scores),
            unk_token=tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE_MARK)
    prefix = [normalizers.Prepend(SPACE_MARK)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a token, best scored result first, then lowest ids."""
    id_of = {token: token_id for token_id, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int]] = []
    for token, token_id in id_of.items():
        for cut in range(1, len(token)):
            left, right = id_of.get(token[:cut]), id_of.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, left, right in ranked]

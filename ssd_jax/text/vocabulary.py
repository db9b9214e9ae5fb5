"""Comparing vocabularies: speculation exchanges token ids, so both models must mean the same."""

from __future__ import annotations

from ssd_jax.errors import InputError
from ssd_jax.text.tokenizer import Tokenizer


def first_difference(a: Tokenizer, b: Tokenizer) -> str | None:
    """Return the lowest id whose tokens differ, in words, or None if the vocabularies are equal.

    Padding rows (ids that neither or only one model has room for, without a token) do not count.
    Which ids are special, or end a text, is no part of a vocabulary: the target alone decides that.
    """
    for token_id in range(max(a.size, b.size)):
        token_a, token_b = a.token(token_id), b.token(token_id)
        if token_a != token_b:
            first, second = _shown(token_a), _shown(token_b)
            return f"id {token_id} is {first} in the first and {second} in the second"
    return None


def require_same(target: Tokenizer, draft: Tokenizer, *, target_name: str, draft_name: str) -> None:
    """Raise InputError, naming the first difference, unless both vocabularies are equal."""
    difference = first_difference(target, draft)
    if difference is not None:
        raise InputError(
            f"the draft {draft_name} ({draft.size} tokens) does not have the vocabulary of the "
            f"target {target_name} ({target.size} tokens): {difference}; use a draft with the "
            "target's tokenizer"
        )


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)

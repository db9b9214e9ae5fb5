"""Comparing vocabularies: speculation exchanges token ids, so both models must mean the same."""

from __future__ import annotations

from ssd_jax.checkpoints.tokenizer import Tokenizer
from ssd_jax.errors import InputError


def first_difference(
    a: Tokenizer, b: Tokenizer, *, names: tuple[str, str] = ("the first", "the second")
) -> str | None:
    """Return the lowest id whose tokens differ, in words, or None if the vocabularies are equal.

    Padding rows, which hold no token, do not count. Neither does which tokens are special or end a
    text: ids are all that a draft sends, and the target decides when to stop.

    Args:
      a: a tokenizer.
      b: another one.
      names: what to call them in the answer.
    """
    for token_id in range(max(a.size, b.size)):
        first, second = a.token(token_id), b.token(token_id)
        if first != second:
            return (
                f"id {token_id} is {_shown(first)} in {names[0]} and {_shown(second)} in {names[1]}"
            )
    return None


def require_same(target: Tokenizer, draft: Tokenizer, *, target_name: str, draft_name: str) -> None:
    """Raise InputError, naming the first difference, unless both vocabularies are equal."""
    difference = first_difference(target, draft, names=("the target", "the draft"))
    if difference is not None:
        raise InputError(
            f"the draft {draft_name} ({draft.size} tokens) does not have the vocabulary of the "
            f"target {target_name} ({target.size} tokens): {difference}; use a draft with the "
            "target's tokenizer"
        )


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)

"""Bad words of a request as sequences of token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ssd_jax.errors import InputError
from ssd_jax.sampling.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from ssd_jax.system.files import shown


def encoded(
    words: Iterable[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Token ids of every word, at the beginning of a text and after a space, each once.

    Spaces before a word do not count. A form that ends with the ids of the other is not listed:
    it is impossible without it.

    Args:
      encode: the ids of a text, without any that a tokenizer puts around it.

    Raises:
      InputError: a word has no ids, or too many; or there are too many sequences.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare, spaced = (tuple(encode(space + word.lstrip())) for space in ("", " "))
        if not word.strip() or not bare:
            raise InputError(
                f"bad_words: {shown(word)} has no tokens without its spaces; ban token ids with "
                "logit_bias = {id: -1e6}"
            )
        forms = [bare] if spaced[-len(bare) :] == bare else [bare, spaced]
        longest = max(map(len, forms))
        if longest > MAX_BAD_WORD_TOKENS:
            raise InputError(
                f"bad_words: {shown(word)} has {longest} tokens; at most {MAX_BAD_WORD_TOKENS} are "
                "supported; ban a part of it"
            )
        sequences |= dict.fromkeys(forms)
    if len(sequences) > MAX_BAD_WORDS:
        raise InputError(
            f"bad_words have {len(sequences)} token sequences, with and without a space; at most "
            f"{MAX_BAD_WORDS} are supported"
        )
    return tuple(sequences)

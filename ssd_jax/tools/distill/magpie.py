"""Prompts that the target writes itself, as in Magpie (arXiv 2406.08464).

Given what its chat template puts before a user's words, a chat model continues with such words.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.errors import InputError
from ssd_jax.tools.distill.shards import Sample

SET = "magpie"
"""Set that these prompts are counted under."""

_LEAST_WORDS = 3
_GRAM = 4
_MOST_SHARED = 0.75
"""A turn is a repetition if a larger share of its n-grams of words were in earlier turns."""


class UserTurn(NamedTuple):
    """The tokens around a user's words.

    Attributes:
      prefix: token ids of the empty user prefix.
      end: the token that ends the turn.
    """

    prefix: list[int]
    end: int


class GeneratedTurn(NamedTuple):
    """A turn that the target wrote, and why it is left out (empty if it is kept)."""

    text: str
    exclusion: str


def user_turn(tokenizer: Tokenizer) -> UserTurn:
    """What a chat template puts around a user's words.

    Raises:
      InputError: there is no template, or its user turns end with a token that ends no generation.
    """
    if not tokenizer.has_chat_template:
        raise InputError(
            "[magpie] goes on from the user prefix of a chat template, and the target has none; "
            "leave the section out"
        )
    with_x, with_y = (
        tokenizer.apply_chat_template([{"role": "user", "content": c}], add_generation_prompt=True)
        for c in "xy"
    )
    prefix = _common_prefix(with_x, with_y)
    suffix = _common_prefix(with_x[::-1], with_y[::-1])[::-1]
    if not prefix:
        raise InputError(
            "[magpie] goes on from what the target's chat template puts before a user's words, and "
            "it puts nothing there; leave the section out"
        )
    if not suffix or suffix[0] not in tokenizer.eos_ids:
        token = repr(tokenizer.decode(suffix[:1], skip_special_tokens=False))
        raise InputError(
            f"[magpie] the target's chat template ends a user's turn with {token}, which ends no "
            "generation; leave the section out"
        )
    return UserTurn(prefix, suffix[0])


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> list[int]:
    equal_pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return [token for token, _ in equal_pairs]


def read_turns(samples: Iterable[Sample], tokenizer: Tokenizer) -> list[GeneratedTurn]:
    """Turns in the order of their samples; of much the same turns the first is kept."""
    end = user_turn(tokenizer).end
    earlier_grams: set[tuple[str, ...]] = set()
    turns = []
    for sample in samples:
        *ids, last_id = sample.tokens[sample.prompt_length :].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=True).strip()
        words = re.findall(r"\w+", text.casefold())
        grams = {tuple(words[i : i + _GRAM]) for i in range(max(1, len(words) - _GRAM + 1))}
        exclusion = ""
        if last_id != end or "\ufffd" in text or not tokenizer.special_ids.isdisjoint(ids):
            exclusion = "broken"
        elif len(words) < _LEAST_WORDS:
            exclusion = "too_short"
        elif len(grams & earlier_grams) > _MOST_SHARED * len(grams):
            exclusion = "repeated"
        else:
            earlier_grams |= grams
        turns.append(GeneratedTurn(text, exclusion))
    return turns

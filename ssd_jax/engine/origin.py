"""Where each token of a text comes from."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Origin(enum.StrEnum):
    """Where a committed token comes from; whatever it is, the target has verified it.

    Attributes:
      TARGET: the target drew it itself: the first token, or the bonus token of a round.
      DRAFT: an accepted proposal of mode sd, drafted before the round.
      BRANCH: an accepted proposal of a branch that mode ssd had prepared: a hit.
      BACKUP: an accepted proposal of mode ssd that no branch was prepared for: a miss.
    """

    TARGET = "target"
    DRAFT = "draft"
    BRANCH = "branch"
    BACKUP = "backup"


class TextSpan(NamedTuple):
    """The text of one token, which may be empty, and where the token comes from."""

    text: str
    origin: Origin


def origins(source: str | None, accepted: int, count: int) -> list[Origin]:
    """The origins of the first `count` tokens of a round.

    Args:
      source: "hit", or the cause of a fallback, where a speculation cache was looked up.
      accepted: k; the token behind the accepted ones is the target's own.
    """
    proposed = Origin.DRAFT
    if source is not None:
        proposed = Origin.BRANCH if source == "hit" else Origin.BACKUP
    return [proposed if place < accepted else Origin.TARGET for place in range(count)]


def spans(text: str, ends: Sequence[int], origins: Sequence[Origin]) -> list[TextSpan]:
    """A text by token; text behind the last end is its last token's.

    Args:
      ends: where the text of each token ends.
      origins: one for each end, and for a text without ends one more.
    """
    if not ends:
        return [TextSpan(text, origins[0])] if text and origins else []
    bounds = [0, *ends[:-1], len(text)]
    return [
        TextSpan(text[begin:end], origin)
        for (begin, end), origin in zip(pairwise(bounds), origins, strict=True)
    ]

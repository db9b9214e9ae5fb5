"""Texts that training looks at but does not learn from: a first estimate of acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd_jax.distill.training.packing import Text
from ssd_jax.errors import InputError

_BEGINNING = 8
"""Tokens by which a passage is known: fewer than one has, as its completions differ after it."""


def set_aside(
    texts: Sequence[Text], *, tokens: int, seed: int, where: str
) -> tuple[list[Text], list[Text]]:
    """Texts to learn from, and others of at least `tokens` tokens together.

    All completions of a prompt are on one side, and all of a passage of plain text, which is
    known by how it begins.

    Raises:
      InputError: nothing would be left to learn from.
    """
    groups: dict[bytes, list[Text]] = {}
    for text in texts:
        begin = text.tokens[: text.prompt_length or _BEGINNING]
        kind = b"prompt" if text.prompt_length else b"text"
        groups.setdefault(kind + np.ascontiguousarray(begin).tobytes(), []).append(text)
    order = np.random.default_rng([seed, 1]).permutation(len(groups))
    listed, aside, size = list(groups.values()), [], 0
    taken: set[int] = set()
    for index in order:
        if size >= tokens:
            break
        taken.add(int(index))
        aside.extend(listed[index])
        size += sum(len(text.tokens) for text in listed[index])
    learnt = [text for i, group in enumerate(listed) if i not in taken for text in group]
    if not learnt:
        raise InputError(
            f"{where}: {len(texts)} texts of {len(groups)} prompts leave nothing to learn from "
            f"beside {tokens} held-out tokens; lower held_out, or generate more"
        )
    return learnt, aside

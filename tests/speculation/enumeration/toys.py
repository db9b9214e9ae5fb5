"""Toy models: rational laws of the next token given the text, with zeros, ties and memory.

Nothing here imports JAX.
"""

from __future__ import annotations

from tests.speculation.enumeration.chance import Law, one_object
from tests.speculation.enumeration.filters import Model, Text, normalised, point

PROMPT: Text = (0,)


def iid(*weights: int) -> Model:
    """The same law whatever was said."""
    law = normalised(weights)
    return lambda _text: law


def table(rows: tuple[tuple[int, ...], ...], *, memory: int = 1) -> Model:
    """The law depends on the last token, shifted by how often token 1 was said before it."""
    laws = tuple(one_object(normalised(row)) for row in rows)

    def law(text: Text) -> Law:
        shift = text[:-1].count(1) * (memory - 1)
        return laws[(text[-1] + shift) % len(laws)]

    return law


# Zeros on both sides, where the other side has none; a tie in every row of TIES.
TARGET2 = table(((3, 2), (0, 1), (1, 4)), memory=2)
DRAFT2 = table(((1, 4), (2, 1), (1, 0)), memory=2)
TARGET3 = table(((5, 3, 2), (1, 0, 3), (2, 2, 1)), memory=2)
DRAFT3 = table(((1, 1, 4), (0, 3, 1), (4, 1, 0)), memory=2)
DENSE3 = table(((1, 1, 4), (3, 1, 2), (1, 2, 2)))
TIES3 = table(((2, 1, 1), (1, 1, 1), (1, 2, 2)), memory=2)


def repeats(vocab: int) -> Model:
    """Proposes what followed the last token the last time it was said, like an n-gram drafter."""

    def law(text: Text) -> Law:
        for index in range(len(text) - 2, -1, -1):
            if text[index] == text[-1]:
                return point(text[index + 1], vocab)
        return point((text[-1] + 1) % vocab, vocab)

    return law

"""Where a text is in its grammar, and what may follow. Pure host code.

A grammar is moved by committed tokens alone. For a verification it looks along the proposed tokens
and comes back. A proposed token that it forbids is not left out: the mask makes it impossible, and
the verification rejects it, so that the law is that of the target under the grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int32

from ssd_jax.sampling.masks import ANY_TOKEN, BITS

Mask = Int32[np.ndarray, "mask"]


class Matcher(Protocol):
    """A place in a grammar."""

    def mask(self) -> Mask:
        """The tokens that may follow, see `sampling.masks`; those that end a text only where it may
        end.

        Raises:
          InputError: the grammar has grown too complex.
        """
        ...

    def consume(self, token: int) -> None:
        """Moves behind a token that may follow and does not end the text.

        Raises:
          InputError: the grammar has grown too complex.
        """
        ...

    def rollback(self, count: int) -> None:
        """Moves back by some tokens."""
        ...


class Grammar(Protocol):
    """A compiled grammar."""

    def start(self) -> Matcher:
        """The place before a text."""
        ...


class TextGrammar:
    """A text's place in its grammar.

    Args:
      grammar: of the text.
      ends: ids that end it.
    """

    def __init__(self, grammar: Grammar, ends: frozenset[int]) -> None:
        self._matcher, self._ends = grammar.start(), ends
        self._followed = 0

    def masks(
        self,
        output: Sequence[int],
        tokens: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        depth: int = 0,
    ) -> Int32[np.ndarray, "W mask"]:
        """Masks of the rows of a verification: that behind the output, then behind each token.

        Rows behind a token that may not follow, or that ends the text, are never reached: they
        allow all, as do those deeper than `depth`.

        Args:
          output: all committed tokens.
          tokens, parents: proposed behind it; see `topology`. None is a chain.
          depth: L, most of them that the verification judges in a row.
        """
        for token in output[self._followed :]:
            self._matcher.consume(token)
            self._followed += 1
        children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
        for node in range(len(tokens)):
            children[node if parents is None else parents[node]].append(node)
        first = self._matcher.mask()
        masks = np.full((len(tokens) + 1, first.size), ANY_TOKEN, np.int32)
        masks[0] = first

        def visit(row: int, left: int) -> None:
            for node in children[row] if left else ():
                token = tokens[node]
                if token not in self._ends and allows(masks[row], token):
                    self._matcher.consume(token)
                    masks[node + 1] = self._matcher.mask()
                    visit(node + 1, left - 1)
                    self._matcher.rollback(1)

        visit(0, depth)
        return masks


def allows(mask: Mask, token: int) -> bool:
    """Whether a token may follow."""
    return bool(mask[token // BITS] >> token % BITS & 1)

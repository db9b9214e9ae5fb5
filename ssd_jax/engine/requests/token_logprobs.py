"""Log-probabilities of a request's tokens, as its output has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ssd_jax.engine.request import TokenLogprobs
from ssd_jax.roles.protocols import PendingLogprobs, Target
from ssd_jax.roles.records import TopLogprobs


def entry(log: TopLogprobs, row: int, place: int, token: int, count: int) -> TokenLogprobs:
    """The entry of a token at a place of a row, with the `count` likeliest."""
    pairs = zip(log.ids[row, place, :count], log.values[row, place, :count], strict=True)
    top = tuple((int(i), float(value)) for i, value in pairs if np.isfinite(value))
    return TokenLogprobs(token, float(log.chosen[row, place]), top)


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, which come with its chunks.

    Each is asked for once, also if the prompt is run again after a preemption.

    Args:
      prompt: its token ids.
      count: likeliest tokens beside each.
    """

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        self._prompt, self._count = list(prompt), count
        self._next = 1  # the first token that was not asked for; the one at 0 follows nothing
        self._pending: deque[PendingLogprobs] = deque()
        self._read: list[TopLogprobs] = []

    @property
    def complete(self) -> bool:
        """Whether all were asked for."""
        return self._next >= len(self._prompt)

    def ask(self, target: Target, slot: int, begin: int, end: int) -> None:
        """Asks for the tokens behind the prefill just before, of positions from `begin` to `end`:
        position i predicts token i + 1."""
        tokens = self._prompt[begin + 1 : end + 1]
        if begin + 1 == self._next and tokens:
            self._pending.append(target.score(slot, tokens))
            self._next += len(tokens)

    def read(self) -> None:
        """Waits for all that were asked for."""
        while self._pending:
            self._read.append(self._pending[0].read())
            self._pending.popleft()

    def entries(self) -> list[TokenLogprobs | None]:
        """One for each token whose log-probability was read, behind None for the first token; empty
        if none was read, unless there is no second token."""
        if not self._read and len(self._prompt) > 1:
            return []
        entries: list[TokenLogprobs | None] = [None]
        for log in self._read:
            for place in range(log.chosen.shape[1]):
                entries.append(entry(log, 0, place, self._prompt[len(entries)], self._count))
        return entries

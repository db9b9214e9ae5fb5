"""A branching draft that a program might give: it guesses by the text, and repeats tokens."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ssd_jax.roles.protocols import BranchingDraft, ExpansionAnswer, RecordAnswer
from ssd_jax.roles.records import IDLE, BranchTokens, no_branches
from ssd_jax.sampling.confidence import UNKNOWN


class RepeatBranches(BranchingDraft):
    """Expects the latest tokens of the text as bonus tokens, and repeats each of them."""

    made: ClassVar[list[RepeatBranches]] = []

    def __init__(self, setup) -> None:
        self.slots, self.k, self.branches = setup.slots, setup.k, setup.branches
        self._texts: list[list[int]] = [[] for _ in range(setup.slots)]
        self.closed = False
        self.made.append(self)

    def open(self, opening) -> None:
        self._texts[opening.slot] = []

    def prefill(self, slot, tokens, offset) -> None:
        self._texts[slot][offset:] = tokens

    def record(self, request):
        moves = request.promotion
        for slot in np.flatnonzero(moves.position != IDLE).tolist():
            committed = [token for token in moves.committed[slot].tolist() if token >= 0]
            text, end = self._texts[slot], int(moves.position[slot]) + 1
            text[end - len(committed) :] = committed
            assert len(text) == end
            assert text[-1] == moves.pending[slot]
        return Records(request)

    def expand(self, request):
        answer = no_branches(self.slots, self.branches, self.k, request.forwards)
        for slot, counts in enumerate(request.counts.tolist()):
            latest = list(dict.fromkeys(reversed(self._texts[slot])))
            branch = 0
            for count in counts:
                for rank, token in enumerate(latest[:count]):
                    answer.bonus[slot, branch + rank] = token
                    answer.tokens[slot, branch + rank] = token
                    answer.lengths[slot, branch + rank] = min(self.k, request.forwards)
                branch += count
        return Branches(answer)

    def close(self) -> None:
        self.closed = True


class Records(RecordAnswer):
    def __init__(self, request) -> None:
        self._request = request

    def lengths(self):
        return self._request.drafts

    def tokens(self):
        moves = self._request.promotion
        return np.repeat(moves.pending[:, None], moves.tokens.shape[1], axis=1)

    def confidence(self):
        return np.full(self._request.promotion.tokens.shape, UNKNOWN)

    def proposal(self):
        raise AssertionError("point masses have no q")


class Branches(ExpansionAnswer):
    def __init__(self, answer: BranchTokens) -> None:
        self._answer = answer

    def branches(self, forwards, until=None):
        return self._answer

"""The `ngram` drafter: proposes from the text so far, on the host, at no cost to the devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import Drafted, DraftRow, Traits
from ssd_jax.speculation.ngram import NgramIndex
from ssd_jax.speculation.proposal import Proposal


class NgramDrafter:
    """See `roles.Drafter`.

    Args:
      slots: rows of a batched forward.
      k: most tokens of a proposal.
      room: tokens that a proposal has room for, at least k.
    """

    traits = Traits(proposes="point_mass", on_device=False)

    def __init__(self, slots: int, k: int, room: int) -> None:
        self.k = k
        self._room = room
        self._texts = [NgramIndex() for _ in range(slots)]

    def open(
        self,
        slot: int,
        params: SamplingParams,
        index: int,
        banned: Sequence[int],
        ban_before: int,
    ) -> None:
        """See `roles.Drafter.open`."""
        self._texts[slot] = NgramIndex()

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """See `roles.Drafter.prefill`."""
        text = self._texts[slot]
        text.extend(tokens[len(text) - offset :])  # what an interrupted step has told comes again

    def speculate(self) -> None:
        """See `roles.Drafter.speculate`; there is nothing to do ahead."""

    def propose(self, rows: Sequence[DraftRow]) -> Drafted:
        """See `roles.Drafter.propose`; a row whose text never repeated gets nothing."""
        slots = len(self._texts)
        tokens, lengths = np.zeros((slots, self._room), np.int32), np.zeros(slots, np.int32)
        for row in rows:
            text = self._texts[row.slot]
            # What an interrupted step has told already comes again.
            text.extend(row.committed[len(row.committed) + len(text) - row.position - 1 :])
            found = text.propose(row.limit)
            tokens[row.slot, : len(found)] = found
            lengths[row.slot] = len(found)
        q = np.ones((slots, self._room, 1), np.float32)
        return Drafted(lengths, Proposal(tokens, lengths, tokens[:, :, None], q))

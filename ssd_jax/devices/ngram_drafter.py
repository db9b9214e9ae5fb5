"""The `ngram` drafter: proposes from the text so far, on the host, at no cost to the devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd_jax.roles.protocols import Drafter
from ssd_jax.roles.records import DraftBatch, Drafted, SlotOpening
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.speculation.ngram import NgramIndex


class NgramDrafter(Drafter):
    """See `protocols.Drafter`. Its tokens are point masses.

    Args:
      slots: rows of a batched forward.
      k: most tokens of a proposal.
      room: tokens that a proposal has room for, at least k.
    """

    on_device = False

    def __init__(self, slots: int, k: int, room: int) -> None:
        self.k = k
        self._room = room
        self._texts = [NgramIndex() for _ in range(slots)]
        self._proposal: Proposal | None = None

    def open(self, opening: SlotOpening) -> None:
        """See `protocols.Drafter.open`."""
        self._texts[opening.slot] = NgramIndex()

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """See `protocols.Drafter.set_pages`; this drafter has no pages."""

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """See `protocols.Drafter.prefill`."""
        text = self._texts[slot]
        text.extend(tokens[len(text) - offset :])  # tokens told by an interrupted step come again

    def propose(self, batch: DraftBatch) -> Drafted:
        """See `protocols.Drafter.propose`; a row whose text never repeated proposes nothing."""
        slots = len(self._texts)
        tokens, lengths = np.zeros((slots, self._room), np.int32), np.zeros(slots, np.int32)
        for slot in batch.slots:
            text = self._texts[slot]
            new = batch.position[slot] + 1 - len(text)  # 0 if the tokens come again
            text.extend(batch.tokens[slot, batch.counts[slot] - new : batch.counts[slot]].tolist())
            found = text.propose(int(batch.limit[slot]))
            tokens[slot, : len(found)] = found
            lengths[slot] = len(found)
        q = np.ones((*tokens.shape, 1), np.float32)
        self._proposal = Proposal(tokens, lengths, tokens[:, :, None], q)
        return Drafted(lengths, tokens)

    def proposal(self) -> Proposal:
        """See `protocols.Drafter.proposal`."""
        assert self._proposal is not None, "asked behind `propose`"
        return self._proposal

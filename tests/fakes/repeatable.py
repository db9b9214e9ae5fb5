"""Roles that take again what they have taken, as after a call that failed."""

from ssd_jax.testing.by_row import rows_of
from ssd_jax.testing.fakes import FakeDrafter, FakeTarget


class RepeatableTarget(FakeTarget):
    """Takes tokens of a prompt again."""

    def prefill(self, slot, tokens, offset):
        del self._prefilled[slot][offset:]
        super().prefill(slot, tokens, offset)


class RepeatableDrafter(FakeDrafter):
    """Takes tokens of a text again."""

    def prefill(self, slot, tokens, offset, *, last):
        del self._texts[slot][offset:]
        super().prefill(slot, tokens, offset, last=last)

    def propose(self, batch):
        for row in rows_of(batch):
            del self._texts[row.slot][row.position + 1 - len(row.committed) :]
        return super().propose(batch)

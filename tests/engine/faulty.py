"""Roles that fail at a call."""

from ssd_jax.testing.by_row import rows_of
from ssd_jax.testing.fakes import FakeDrafter, FakeTarget


class Target(FakeTarget):
    """Takes what it is told again."""

    def prefill(self, slot, tokens, offset):
        del self._given[slot][offset:]
        super().prefill(slot, tokens, offset)


class Drafter(FakeDrafter):
    """Takes what it is told again."""

    def prefill(self, slot, tokens, offset, *, last):
        del self._texts[slot][offset:]
        super().prefill(slot, tokens, offset, last=last)

    def propose(self, batch):
        for row in rows_of(batch):
            del self._texts[row.slot][row.position + 1 - len(row.committed) :]
        return super().propose(batch)


class Faulty:
    """A role; `fault` happens before or after what its `at`-th call of a name does."""

    def __init__(self, role, call, at, fault, *, after):
        self._role, self._call, self._left, self._fault = role, call, at, fault
        self._after = after
        self.happened = False

    def __getattr__(self, name):
        works = getattr(self._role, name)
        if name in ("prefill_last", "accept") and self._call == "read":
            return lambda *args: Faulty(works(*args), "read", 1, self._counted, after=self._after)
        return self._faulty(works) if name == self._call else works

    def _faulty(self, works):
        def call(*args, **kwargs):
            done = works(*args, **kwargs) if self._after else None
            self._counted()
            return done if self._after else works(*args, **kwargs)

        return call

    def _counted(self):
        self._left -= 1
        if not self._left:
            self.happened = True
            self._fault()

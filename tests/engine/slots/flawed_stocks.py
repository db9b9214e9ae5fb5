"""Stocks of pages with a flaw each."""

from __future__ import annotations

from ssd_jax.engine.slots.page_stock import PageStock


class Early(PageStock):
    """Has pages reused that are not filled."""

    def take(self, slot, tokens, names=(), spare=0, *, reuses=True):
        taken = super().take(slot, tokens, names, spare, reuses=reuses)
        if taken is not None:
            self.fill(slot, 10**6)
        return taken


class Uncounted(PageStock):
    """Takes a page back from everybody when one leaves it."""

    def give_back(self, slot):
        held = self._by_slot.get(slot)
        for page in held.pages if held else ():
            self._group(slot).users[page] = 1
            self._group(slot).names.pop(page, None)
        super().give_back(slot)

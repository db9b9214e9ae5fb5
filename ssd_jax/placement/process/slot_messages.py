"""Gives a worker what it lacks of the slots' requests: their openings, pages and texts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ssd_jax.placement.process.connection import Connection
from ssd_jax.roles.records import IDLE, Promotion, SlotOpening
from ssd_jax.speculation.draft_texts import DraftTexts
from ssd_jax.wire.draft_spec import DraftSpec
from ssd_jax.wire.messages import MorePages, Open, Prefill


class SlotMessages:
    """Messages about the slots' requests. A worker knows those that its stream has carried.

    Args:
      spec: of the worker.

    Attributes:
      epochs: of the slots' requests [B].
      texts: of the slots, and what the worker has of them.
    """

    def __init__(self, spec: DraftSpec) -> None:
        self.epochs = np.zeros(spec.slots, np.int32)
        self.texts = DraftTexts(spec.page_size)
        self._numbers, self._requests = itertools.count(1), itertools.count(1)
        self._link: Connection | None = None  # the stream that the messages went over
        self._opened: set[int] = set()  # slots whose request the worker knows
        self._grown: set[int] = set()  # slots with pages that the worker does not know of

    def new_number(self) -> int:
        """The number of the next message."""
        return next(self._numbers)

    def open(self, opening: SlotOpening) -> None:
        """A new request in a slot; the worker gets it with the first text."""
        slot = opening.slot
        self.epochs[slot] = next(self._requests)
        self.texts.open(opening)
        self._grown.discard(slot)
        self._opened.discard(slot)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """All pages of a slot, which has got more; the worker gets them with the next records."""
        self.texts.set_pages(slot, pages)
        self._grown.add(slot)

    def promotion(self, promotion: Promotion, link: Connection) -> Promotion:
        """Sends what the worker lacks for new records; returns the promotion that it can do."""
        slots = np.flatnonzero(promotion.position != IDLE).tolist()
        self._use(link)
        unknown = [slot for slot in slots if slot not in self._opened]
        for slot in unknown:
            self.texts[slot].expanded = False
        # A branch is lost with its stream, or by an interrupted step.
        lost = [slot for slot in slots if self.texts[slot].cached == promotion.position[slot]]
        self._send_pages(set(slots) - set(unknown), link)
        winner = promotion.winner.copy()
        winner[unknown + lost] = -1
        promotion = self.texts.record(promotion, lambda slot: self.send_text(slot, link))
        return promotion._replace(winner=winner)

    def send_text(self, slot: int, link: Connection) -> None:
        """Sends the tokens of a slot's text that the worker lacks: all if the request is new."""
        epoch = int(self.epochs[slot])
        self._use(link)
        if slot not in self._opened:
            self._opened.add(slot)
            self.texts.forget(slot)
            opening = self.texts.reusable(slot)
            link.send(Open(number=self.new_number(), epoch=epoch, opening=opening))
            self._grown.discard(slot)

        def prefill(tokens: list[int], offset: int) -> None:
            number, ids = self.new_number(), np.array(tokens, np.int32)
            link.send(Prefill(number=number, slot=slot, epoch=epoch, offset=offset, tokens=ids))

        self.texts.teach(slot, prefill)

    def _use(self, link: Connection) -> None:
        """The messages go over this stream; a new one has no request, and no page."""
        if self._link is not link:
            self._link = link
            self._opened.clear()
            self.texts.forget_pages()

    def _send_pages(self, slots: set[int], link: Connection) -> None:
        """Sends the pages that these slots have got since."""
        for slot in self._grown & slots:
            epoch, pages = int(self.epochs[slot]), tuple(self.texts[slot].opening.pages)
            number = self.new_number()
            link.send(MorePages(number=number, slot=slot, epoch=epoch, pages=pages))
        self._grown -= slots

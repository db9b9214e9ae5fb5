"""Makes the events of requests: of what rounds have committed, and of what ends them otherwise.

Pure host code. An event is made once and kept until it is handed out.
"""

from __future__ import annotations

import logging
from collections import deque

from ssd_jax.engine.request import FinishReason, TokenEvent
from ssd_jax.engine.requests.state import RequestState
from ssd_jax.engine.rounds.log import CommittedRow, RoundLog
from ssd_jax.engine.slots.seats import Seats
from ssd_jax.errors import SsdError

_LOG = logging.getLogger(__name__)


class EventReports:
    """Events of an engine's requests, which leave their seats as they end."""

    def __init__(self, seats: Seats, log: RoundLog) -> None:
        self._seats, self._log = seats, log
        self._committed: deque[CommittedRow] = deque()  # not yet events
        self._cut_off: deque[tuple[RequestState, FinishReason, Exception | None]] = deque()
        self._events: list[TokenEvent] = []  # not yet handed out

    @property
    def due(self) -> bool:
        """Whether there is an event to make, or to hand out."""
        return bool(self._committed or self._cut_off or self._events)

    def commit(self, row: CommittedRow) -> None:
        """Takes what a round has committed for a request."""
        self._committed.append(row)

    def cancel(self, state: RequestState, *, silent: bool) -> None:
        """Ends a request; unless `silent`, with an event."""
        if not silent:
            self._cut_off.append((state, "cancelled", None))
        self._end(state, "cancelled")

    def fail(self, state: RequestState, error: Exception | None = None) -> None:
        """Ends a request by an error of its own, or (None) by one that ends all requests."""
        self._end(state, "error")
        self._cut_off.append((state, "error", error))

    def make(self) -> None:
        """Makes the events that are due; an error in one request's text ends that request alone."""
        while self._committed:
            _, state, tokens, reason = self._committed.popleft()
            if state.ended:
                continue
            try:
                event = self._event(state, tokens, reason)
            except Exception as error:
                self.fail(state, error)
                continue
            if event.token_ids or event.text or event.output:
                self._add(event)
        while self._cut_off:
            state, reason, error = self._cut_off.popleft()
            if state.ended:  # by an earlier event
                continue
            explained = error if isinstance(error, SsdError) else None
            if error is not None:
                message, trace = (repr(error), error) if explained is None else (explained, None)
                _LOG.error(
                    "request %d ends by an error: %s", state.request_id, message, exc_info=trace
                )
            self._add(state.final(reason, state.text.cut(), explained))

    def take(self) -> list[TokenEvent]:
        """Hands the events out."""
        events, self._events = self._events, []
        return events

    def _add(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._log.text(event)

    def _event(
        self, state: RequestState, tokens: list[int], reason: FinishReason | None
    ) -> TokenEvent:
        released = state.text.push(tokens, stop_last=reason == "stop")
        if released.stopped:
            self._end(state, "stop")
            return state.final("stop", released)
        if reason is None:
            return state.event(released)
        rest = state.text.finish()
        if rest.stopped:
            reason = "stop"
        return state.final(reason, released.followed_by(rest))

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        state.sequence.finish_reason = reason
        self._seats.leave(state)

"""The `process` placement: a supervised worker, and a draft in it for every engine that asks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from ssd_jax.errors import InputError
from ssd_jax.placement.process.client import PATIENCE, RemoteDraft
from ssd_jax.placement.process.connection import Connection
from ssd_jax.placement.process.messages import Hello
from ssd_jax.placement.process.settings import WorkerSettings
from ssd_jax.placement.process.supervisor import COMMAND, Supervisor

_RETRY, _LONGEST_RETRY = 0.2, 10.0  # seconds between attempts to connect
_STEADY = 60.0  # seconds that a stream lasts before its end is taken for chance
_LOG = logging.getLogger(__name__)
_GREETING = 30.0  # seconds for a worker to answer a new stream


def connector(
    hello: Hello,
    token: str,
    address: Callable[[], str | None],
    counters: Counter[str],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[], Connection | None]:
    """Connects to wherever `address` says; None while it is nowhere, or was tried just now.

    Where streams keep breaking at the same address, the next one waits twice as long each time.
    """
    last, pause, tried = -float("inf"), 0.0, ""

    def connect() -> Connection | None:
        nonlocal last, pause, tried
        where, now = address(), clock()
        same = where == tried
        if where is None or (same and now < last + pause):
            return None
        again = same and now < last + pause + _STEADY
        pause = min(2 * pause, _LONGEST_RETRY) if again else _RETRY
        last, tried = now, where
        return Connection(where, hello, token, counters)

    return connect


class DraftWorker:
    """A worker process and the drafts that engines have there.

    Args:
      settings: of the worker.
      patience: seconds that a round waits for it.
      command: what to run.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        patience: float = PATIENCE,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._settings, self.patience = settings, patience
        self.supervisor = Supervisor(settings, command)
        self.drafts: list[RemoteDraft] = []

    def draft(self, patience: float | None = None) -> RemoteDraft:
        """A draft with empty slots, over a stream of its own.

        A worker that does not answer now, because it is just being started again, may do so later.

        Args:
          patience: seconds to wait for its answers; None is the worker's.

        Raises:
          InputError: the worker refuses.
        """
        hello, counters = self._settings.hello, Counter()
        supervisor = self.supervisor  # which so lives as long as this draft
        draft = RemoteDraft(
            hello,
            connector(hello, self._settings.token, lambda: supervisor.address, counters),
            greedy=self._settings.greedy,
            patience=self.patience if patience is None else patience,
            counters=counters,
            address=lambda: supervisor.address,
            end=supervisor.end,
        )
        with ExitStack() as on_failure:
            on_failure.callback(draft.close)
            if not draft.wait_ready(_GREETING) and draft.refused:
                raise InputError(f"the draft worker does not serve: {draft.trouble}")
            self.drafts.append(draft)
            on_failure.pop_all()
        return draft

    @property
    def counters(self) -> Counter[str]:
        """What happened to all drafts, see `RemoteDraft`, and "starts" of the process."""
        return sum(
            (draft.counters for draft in self.drafts), Counter(starts=self.supervisor.starts)
        )

    def close(self) -> None:
        """Ends the streams and the process."""
        _LOG.info("the draft worker's figures: %s", dict(self.counters))
        for draft in self.drafts:
            draft.close()
        self.supervisor.close()

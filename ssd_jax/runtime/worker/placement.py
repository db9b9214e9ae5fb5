"""The `process` placement: a supervised worker, and a draft in it for every engine that asks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from ssd_jax.errors import InputError
from ssd_jax.runtime.worker.client import PATIENCE, RemoteDraft
from ssd_jax.runtime.worker.connection import Connection
from ssd_jax.runtime.worker.messages import Hello
from ssd_jax.runtime.worker.settings import WorkerSettings
from ssd_jax.runtime.worker.supervisor import COMMAND, Supervisor

_RETRY = 0.2  # seconds between attempts to connect
_GREETING = 30.0  # seconds for a worker that is ready to answer a new stream


def connector(
    hello: Hello,
    address: Callable[[], str | None],
    counters: Counter[str],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[], Connection | None]:
    """Connects to wherever `address` says, not too often; None while it is nowhere."""
    next_try = -float("inf")

    def connect() -> Connection | None:
        nonlocal next_try
        where, now = address(), clock()
        if where is None or now < next_try:
            return None
        next_try = now + _RETRY
        return Connection(where, hello, counters)

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

    def start(self) -> None:
        """Starts the process; returns at once."""
        self.supervisor.start()

    def wait_ready(self) -> None:
        """Waits until it is ready.

        Raises:
          InputError: it cannot start.
        """
        self.supervisor.wait_ready()

    def draft(self) -> RemoteDraft:
        """A draft with empty slots, over a stream of its own.

        Raises:
          InputError: the worker does not answer, or refuses.
        """
        hello, counters = self._settings.hello, Counter()
        connect = connector(hello, lambda: self.supervisor.address, counters)
        draft = RemoteDraft(
            hello,
            connect,
            greedy=self._settings.greedy,
            patience=self.patience,
            counters=counters,
        )
        if not draft.wait_ready(_GREETING):
            raise InputError(f"the draft worker does not serve: {draft.trouble or 'no answer'}")
        self.drafts.append(draft)
        return draft

    def close(self) -> None:
        """Ends the streams and the process."""
        for draft in self.drafts:
            draft.close()
        self.supervisor.close()

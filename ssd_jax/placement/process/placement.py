"""The `process` placement: a supervised worker, with a draft for every engine that asks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from ssd_jax.errors import InputError
from ssd_jax.placement.process.client import PATIENCE, RemoteDraft
from ssd_jax.placement.process.connection import Connection, Link, connector
from ssd_jax.placement.process.supervisor import COMMAND, Supervisor, WorkerSettings
from ssd_jax.placement.process.worker_streams import WorkerStreams

_LOG = logging.getLogger(__name__)
_READY_SECONDS = 30.0  # seconds for a worker to answer a new stream


class Worker(Protocol):
    """Starts a worker, as `Supervisor`, or knows where one is.

    Attributes:
      starts: number of starts of the worker so far.
      link: how the worker is reached.
    """

    starts: int
    link: Link

    @property
    def address(self) -> str | None:
        """Where the worker listens; None while there is none."""
        ...

    def start(self) -> None:
        """Starts loading; returns at once."""
        ...

    def wait_ready(self) -> None:
        """Waits until the worker serves. Raises: InputError: it cannot."""
        ...

    def check(self) -> None:
        """Raises: InputError: the worker could not start. Does not wait."""
        ...

    def hold(self) -> None:
        """Opens a stream, where a worker without one may drop the draft. Does not wait."""
        ...

    def take_stream(self) -> Connection | None:
        """The stream that `start` or `hold` has opened, if there is one."""
        ...

    @property
    def end(self) -> Callable[[str], None] | None:
        """A function that ends the hanging worker at an address, which another then replaces;
        None where that is not possible."""
        ...

    def close(self) -> None:
        """The worker is no longer needed."""
        ...


class DraftWorker:
    """A worker, and the drafts that engines have there.

    Args:
      settings: settings of the worker.
      patience: seconds that a round waits.
      command: the command that starts the worker.
      worker: a worker that was started by someone else.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        patience: float = PATIENCE,
        command: Sequence[str] = COMMAND,
        worker: Worker | None = None,
    ) -> None:
        self._settings, self.patience = settings, patience
        self.supervisor = worker or Supervisor(settings, command)
        self.drafts: list[RemoteDraft] = []
        self._closed = False

    def start(self) -> None:
        """Starts loading; returns at once."""
        self.supervisor.start()

    def wait_ready(self) -> None:
        """Waits until the worker serves. Raises: InputError: it cannot."""
        self.supervisor.wait_ready()

    def check(self) -> None:
        """Raises: InputError: the worker could not start. Does not wait."""
        self.supervisor.check()

    def draft(self, patience: float | None = None) -> RemoteDraft:
        """A draft with empty slots, over its own stream.

        A worker that does not answer now because it is being restarted may answer later.

        Args:
          patience: seconds to wait for answers; None is the `patience` of this object.

        Raises:
          InputError: the worker refuses.
        """
        spec, token, counters = self._settings.spec, self._settings.token, Counter()
        supervisor = self.supervisor  # keeps it alive as long as this draft

        def address() -> str | None:
            return supervisor.address

        opened = supervisor.take_stream()
        connect = connector(spec, token, address, counters, link=supervisor.link, first=opened)
        streams = WorkerStreams(connect, counters, address, supervisor.end)
        draft = RemoteDraft(
            spec,
            streams,
            greedy=spec.draft_temperature == 0,
            patience=self.patience if patience is None else patience,
        )
        try:
            is_ready = streams.wait_ready(_READY_SECONDS, until=lambda: self._closed)
            if not is_ready and streams.refused:
                raise InputError(f"the draft worker does not serve: {streams.trouble}")
        except BaseException:
            draft.close()
            raise
        self.drafts.append(draft)
        if self._closed:
            draft.close()
        return draft

    def end_last(self) -> None:
        """Ends the draft made last; its figures are dropped."""
        self.drafts.pop().close()
        self.supervisor.hold()

    @property
    def counters(self) -> Counter[str]:
        """Counters of all `RemoteDraft`s, and "starts" of the process."""
        return sum(
            (draft.counters for draft in self.drafts), Counter(starts=self.supervisor.starts)
        )

    def close(self) -> None:
        """Ends the streams and the process."""
        _LOG.info("the draft worker's figures: %s", dict(self.counters))
        self._closed = True  # also of a draft whose worker is still waited for
        for draft in self.drafts:
            draft.close()
        self.supervisor.close()

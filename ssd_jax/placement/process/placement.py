"""The `process` placement: a supervised worker, and a draft in it for every engine that asks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from ssd_jax.errors import InputError
from ssd_jax.placement.process.client import PATIENCE, RemoteDraft
from ssd_jax.placement.process.connection import connector
from ssd_jax.placement.process.supervisor import COMMAND, Supervisor, WorkerSettings

_LOG = logging.getLogger(__name__)
_GREETING = 30.0  # seconds for a worker to answer a new stream


class DraftWorker:
    """A worker process and the drafts that engines have there; a round waits `patience` seconds."""

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
          patience: seconds to wait for its answers; None is what the worker was made with.

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
        try:
            if not draft.wait_ready(_GREETING) and draft.refused:
                raise InputError(f"the draft worker does not serve: {draft.trouble}")
        except BaseException:
            draft.close()
            raise
        self.drafts.append(draft)
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

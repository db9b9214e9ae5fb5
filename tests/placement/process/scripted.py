"""Engines over remote drafts, with a scripted target."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request
from ssd_jax.placement.process.client import RemoteDraft
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.controller import Controller, Policies
from ssd_jax.speculation.fan_out_flag import parse
from ssd_jax.speculation.pace import Pace
from ssd_jax.speculation.tuner import FixedTuner, SpeculationPlan
from ssd_jax.speculation.waiting import Waiting
from ssd_jax.testing.fakes import Silent
from tests.fakes.paces import Patient
from tests.fakes.repeatable import RepeatableTarget
from tests.placement.process.script import HELLO, PROMPT, SLOTS, K, M, token_at


class VerifyingTarget(RepeatableTarget):
    """Emits the script's tokens; notes the proposals as they were verified."""

    def __init__(self) -> None:
        super().__init__(
            lambda _, at: token_at(at), slots=SLOTS, context=HELLO.context, max_chunk=3
        )
        self.verified: list[Any] = []

    def forward(self, tokens, lengths, drafted=None):
        self._drafted = drafted
        return super().forward(tokens, lengths, drafted)

    def accept(self, logits, proposal=None):
        if self._drafted is not None:
            self.verified.append((self._drafted, proposal))
        return super().accept(logits, proposal)


class Run(NamedTuple):
    """An engine over a remote draft; `sessions` are the worker's, where it is in this process."""

    engine: Engine
    target: VerifyingTarget
    draft: RemoteDraft
    sessions: Sequence[DraftSession] = ()

    def generate(self, count: int = 2, size: int = 60, **params) -> Counter[str]:
        """Completes requests, whose texts must be the script's; returns causes and hits."""
        for index in range(count):
            self.engine.add(request(index, max_tokens=size, **params))
        sources: Counter[str] = Counter()
        while self.engine.has_work:
            for event in self.engine.step():
                if event.output is not None:
                    assert event.output.token_ids == text(size)
                    sources += Counter(event.output.metrics["miss_causes"])
        return sources

    def until(self, wanted: Callable[[Counter[str]], bool], **params) -> Counter[str]:
        """Completes requests until the causes of their fallbacks are as wanted; returns all."""
        total: Counter[str] = Counter()
        end = time.monotonic() + 180
        while True:
            found = self.generate(**params)
            total += found
            if wanted(found):
                return total
            assert time.monotonic() < end, (total, self.draft.counters, self.draft.streams.trouble)


def request(index: int, **params) -> Request:
    ids = [token_at(position) for position in range(PROMPT)]
    return Request(prompt_ids=ids, params=SamplingParams(ignore_eos=True, **params), index=index)


def text(size: int) -> list[int]:
    return [token_at(position) for position in range(PROMPT, PROMPT + size)]


def run_of(draft: RemoteDraft, *, backup: Any = "none", pace: Pace | None = None) -> Run:
    """An engine over a remote draft, which by default waits for all that is to come; the draft's
    methods may be replaced later."""
    controller = Controller(
        draft,
        Policies(
            k=K,
            tuner=FixedTuner(SpeculationPlan(k=K, budget=M)),
            fan_out=lambda: parse("uniform", K, M),
            backup=backup,
            tokens=128,
        ),
        elsewhere=True,
        asks_first=True,
        waiting=Waiting(lambda: draft.activity(), pace=pace or Patient()),
    )
    target = VerifyingTarget()
    return Run(Engine(target, Silent, frozenset(), drafter=controller), target, draft)


def only_misses(causes: Counter[str]) -> bool:
    """Whether every round was answered in time."""
    return set(causes) <= {"miss"}

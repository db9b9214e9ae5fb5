"""Engines over remote drafts, with a scripted target."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

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
from ssd_jax.testing.fakes import Ready, Silent
from tests.fakes.paces import Patient
from tests.placement.process.script import HELLO, PROMPT, SLOTS, K, M, said_at


class ScriptedTarget:
    """Emits the script's tokens; notes the proposals as they were verified."""

    slots, context, max_chunk = SLOTS, HELLO.context, 3

    def __init__(self) -> None:
        self.verified: list[Any] = []

    def open(self, opening) -> None:
        pass

    def prefill(self, slot, tokens, offset) -> None:
        pass

    def prefill_last(self, slot, tokens, offset):
        return Ready([[said_at(offset + len(tokens))]])

    def forward(self, pending, lengths, drafted=None):
        return pending, lengths, drafted, None if drafted is None else drafted.tokens.copy()

    def accept(self, logits, proposal=None):
        pending, lengths, drafted, tokens = logits
        if drafted is not None:
            assert (np.asarray(proposal.tokens) == tokens).all()
            self.verified.append((drafted, proposal))
        emitted = [[0]] * SLOTS
        for slot in np.flatnonzero(lengths >= 0):
            at = int(lengths[slot])
            assert pending[slot] == said_at(at)
            right = []
            count = 0 if drafted is None else int(drafted.lengths[slot])
            for token in [] if proposal is None else proposal.tokens[slot, :count]:
                if token != said_at(at + 1 + len(right)):
                    break
                right.append(int(token))
            emitted[slot] = [*right, said_at(at + 1 + len(right))]
        return Ready(emitted)


class Run(NamedTuple):
    """An engine over a remote draft; `sessions` are the worker's, where it is in this process."""

    engine: Engine
    target: ScriptedTarget
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
        end = time.monotonic() + 60
        while True:
            found = self.generate(**params)
            total += found
            if wanted(found):
                return total
            assert time.monotonic() < end, (total, self.draft.counters, self.draft.streams.trouble)


def request(index: int, **params) -> Request:
    ids = [said_at(position) for position in range(PROMPT)]
    return Request(prompt_ids=ids, params=SamplingParams(ignore_eos=True, **params), index=index)


def text(size: int) -> list[int]:
    return [said_at(position) for position in range(PROMPT, PROMPT + size)]


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
    target = ScriptedTarget()
    return Run(Engine(target, Silent, frozenset(), drafter=controller), target, draft)


def only_misses(causes: Counter[str]) -> bool:
    """Whether every round was answered in time."""
    return set(causes) <= {"miss"}

"""A session of a worker, and the messages of a round to it."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np

from ssd_jax.placement.process.session import DraftSession
from ssd_jax.roles.records import IDLE, SlotOpening
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.wire import codec
from ssd_jax.wire.messages import ExpandMessage, Open, Prefill, RecordMessage
from tests.placement.process.script import HELLO, PROMPT, SLOTS, K, M, ScriptedDraft, token_at

PARAMS = SamplingParams(logit_bias=((3, 0.5),), seed=2**64 - 1)
OPENING = SlotOpening(
    slot=1, params=PARAMS, banned=[1], ban_before=9, pages=[], bad_word_ids=[[2], [3, 4]]
)
OPEN = Open(number=1, epoch=1, opening=OPENING)
PREFILL = Prefill(
    number=2,
    slot=1,
    epoch=1,
    offset=0,
    tokens=np.array([token_at(at) for at in range(PROMPT)], np.int32),
)


def rows(value, nothing=0):
    """[B, ...] int32 that is this in slot 1, where the request is, and nothing in the other one."""
    row = np.array(value, np.int32)
    return np.stack([np.full_like(row, nothing), row])


RECORDS = RecordMessage(
    number=3,
    epochs=rows(1),
    position=rows(PROMPT - 1, IDLE),
    pending=rows(token_at(PROMPT - 1)),
    committed=rows([-1] * (K + 1), -1),
    winner=rows(-1, -1),
    tokens=rows([0] * K),
    limit=rows(0),
    node=rows(0),
    parents=rows([]),
    drafts=rows(0),
    lowered=np.full((SLOTS, K), 2, np.int32),
    sampled=rows(1),
)
EXPAND = ExpandMessage(
    number=4,
    epochs=rows(1),
    counts=rows([M, 0, 0, 0]),
    skip=rows([0] * (K + 1)),
    follow=rows(0),
    lowered=np.full((SLOTS, K), 2, np.int32),
    forwards=K,
)
ROUND = RECORDS, EXPAND


class Talk:
    """A session and what it has answered."""

    def __init__(self, *messages, session=DraftSession, called=lambda: False):
        self.session = session(HELLO, ScriptedDraft, called)
        self.answers = self.say(*messages)

    def say(self, *messages):
        read = functools.partial(codec.decode, spec=HELLO)
        return [
            read(codec.encode(answer))
            for message in messages
            for answer in self.session.handle(read(codec.encode(message)))
        ]

    @property
    def counters(self) -> Counter[str]:
        return self.session.counters

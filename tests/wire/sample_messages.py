"""A message of each kind."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from ssd_jax.wire.messages import BranchMessage, MorePages, RecordTokens, Refused, Welcome, Work
from tests.placement.process.conversation import EXPAND, OPEN, PREFILL, RECORDS
from tests.placement.process.script import HELLO, drafting

SPEC = replace(drafting(HELLO, k=3, support=4), slots=4, budgets=(2,), tokens=2**31 - 1)
"""What the answers here fit."""
RNG = np.random.default_rng(7)
WINNER = RecordTokens(
    number=2**40,
    work=(),
    slots=np.array([0, 3], np.int32),
    epochs=np.array([5, 6], np.int32),
    received=1.5,
    sent=1.75,
    lengths=np.array([1, 2], np.int32),
    tokens=RNG.integers(0, 2**31 - 1, (2, 3), np.int32),
    parents=np.empty((2, 0), np.int32),
    confidence=RNG.integers(-1, 8, (2, 3), np.int32),
    sampled=np.array([3], np.int32),
    support=RNG.integers(-1, 9, (1, 3, 4)).astype(np.int32),
    q=RNG.random((1, 3, 4), np.float32),
)
SPECULATIONS = BranchMessage(
    number=8,
    work=(),
    complete=True,
    forwards=2,
    slots=np.array([1], np.int32),
    epochs=np.array([1], np.int32),
    received=3.0,
    sent=3.0,
    bonus=np.array([[4, -1]], np.int32),
    lengths=np.array([[2, 0]], np.int32),
    tokens=np.arange(6, dtype=np.int32).reshape(1, 2, 3),
    confidence=np.array([[[7, 0, -1], [-1, -1, -1]]], np.int32),
    node=np.empty((1, 0), np.int32),
    parents=np.empty((1, 0, 0), np.int32),
)
OF_TREES = replace(drafting(SPEC, nodes=5), budgets=(2,))
TREES = replace(
    SPECULATIONS,
    tokens=np.arange(10, dtype=np.int32).reshape(1, 2, 5),
    confidence=np.full((1, 2, 5), -1, np.int32),
    node=np.array([[3, -1]], np.int32),
    parents=np.array([[[0, 0, 1, 1, 4], [0, 0, 0, 0, 0]]], np.int32),
)
MESSAGES = [
    HELLO,
    Welcome(),
    Refused(reason="ünlike"),
    OPEN,
    MorePages(number=2, slot=1, epoch=1, pages=(0, 7)),
    replace(
        drafting(HELLO, predict="plain", saguaro_c=0.5, confident=True),
        draft_temperature=0.5,
        budgets=(4, 6),
        attention="xla",
    ),
    PREFILL,
    RECORDS,
    EXPAND,
    WINNER,
    replace(WINNER, work=(Work("grow", 0.1, 0.2), Work("grow", 0.2, 1e9))),
    replace(WINNER, sampled=WINNER.sampled[:0], support=WINNER.support[:0], q=WINNER.q[:0]),
    SPECULATIONS,
]


def spec_of(message):
    if isinstance(message, MorePages):
        return replace(HELLO, page_size=64, pages=8)
    return SPEC if isinstance(message, RecordTokens | BranchMessage) else HELLO

"""Workers in this process that load what engines want, of a scripted draft."""

from __future__ import annotations

import time

from ssd_jax.placement.process.connection import Link
from ssd_jax.placement.process.server import GREETING, STREAMS, wanted_sessions
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.placement.remote.serving import server_at
from ssd_jax.wire.address import Address
from ssd_jax.wire.messages import Wanted
from ssd_jax.wire.refusals import Refusals
from ssd_jax.wire.stream import Stream
from tests.placement.process.script import HELLO, TOKEN, ScriptedDraft

WANTED = Wanted(HELLO, "float32", {"support": 2}, None, (6,), "auto")
SIZE = 2**22
FAR = Link(Stream, WANTED, clock=False)
"""How such a worker is reached."""


def serving(load=None, *, ahead=0.0, size=SIZE, streams=STREAMS, greeting=GREETING):
    """A worker whose clock is ahead."""

    def clock():
        return time.perf_counter() + ahead

    def usual(wanted, _gone):
        return lambda called: DraftSession(wanted.hello, ScriptedDraft, called, clock=clock)

    refusals = Refusals()
    answers = wanted_sessions(load or usual, size, refusals, streams, greeting)
    address = Address("127.0.0.1", 0)
    return server_at(address, answers, TOKEN, None, size=size, refusals=refusals)

"""Workers in this process that load what engines want, of a scripted draft."""

from __future__ import annotations

import time

from ssd_jax.placement.process.connection import Link
from ssd_jax.placement.process.server import FIRST_MESSAGE, STREAMS, wanted_sessions
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.placement.remote.serving import server_at
from ssd_jax.wire.address import Address
from ssd_jax.wire.refusals import Refusals
from tests.placement.process.script import TOKEN, ScriptedDraft

SIZE = 2**22
FAR = Link(shares_clock=False)
"""How such a worker is reached."""


def serving(load=None, *, ahead=0.0, size=SIZE, streams=STREAMS, first_message=FIRST_MESSAGE):
    """A worker whose clock is ahead."""

    def clock():
        return time.perf_counter() + ahead

    def usual(spec, _gone):
        return lambda called: DraftSession(spec, ScriptedDraft, called, clock=clock)

    refusals = Refusals()
    answers = wanted_sessions(load or usual, size, refusals, streams, first_message)
    address = Address("127.0.0.1", 0)
    return server_at(address, answers, TOKEN, None, size=size, refusals=refusals)

"""Activities of a scripted draft, and what it says of its rounds."""

from __future__ import annotations

import numpy as np

from ssd_jax.roles.activity import Activity, Busy
from ssd_jax.roles.records import CacheLookup, Drafted, Outcomes

LOOK = (0, 2, 0, 3)  # k, prepared, rank, wasted


# The target is busy from 0 to 10, 12 to 22, 24 to 34, 36 to 46, 46 to 56.
ACTIVITIES = (
    Activity((Busy("prefill", 1, 4, [0]), Busy("expand", 4, 6, [0])), 100),  # 5 of 5 hidden
    Activity((Busy("expand", 13, 17, [0]), Busy("grow", 20, 23, [0])), 300),  # 6 of 7
    Activity((Busy("draft", 34, 35, [0]), Busy("grow", 40, 40.5, [1])), 500),  # 0 of 1
)


class Script:
    """Target, drafter and clock in one: time passes where it says, one token a round.

    The prompt takes from 0 to 10. Round i is dispatched at once, `read` after 10 s more, and the
    next proposal takes 2 s.
    """

    slots, context, max_chunk, k = 2, 64, 8, 1
    on_device, timed, asks_first, branches = False, False, False, False

    def __init__(self, activities, sources, looks):
        self.now, self.reports = 0.0, iter(zip(activities, sources, looks, strict=True))

    def clock(self):
        return self.now

    def open(self, *arguments):
        pass

    def prefill(self, *arguments, **more):
        pass

    def prefill_last(self, slot, tokens, offset):
        return self

    def forward(self, tokens, lengths, drafted=None):
        return None

    def accept(self, logits, proposal=None):
        return self

    def ready(self):
        return False

    def gather(self, until):
        pass

    def proposal(self):
        return None

    def read(self):
        self.now += 10
        return Outcomes(np.zeros(2, np.int32), np.full((2, 2), 40, np.int32))

    def propose(self, batch):
        self.now += 2
        done, source, look = next(self.reports)
        lookup = CacheLookup(
            *(np.array([row, -1]) for row in (0, *look[:2], -1 if look[2] is None else look[2])),
            lengths=np.array([[look[3]], [0]]),
        )
        return Drafted(np.zeros(2, np.int32), None, {0: source}, lookup, activity=done)

    def speculate(self):
        pass

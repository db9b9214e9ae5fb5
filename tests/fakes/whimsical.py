"""A planner that decides by chance."""

import random

from ssd_jax.engine.planner import RoundPlan


class Whimsical:
    """A planner that changes its mind every few rounds: K, and whether there are branches."""

    timed = False

    def __init__(self, seed):
        self._draw, self._left, self._plan = random.Random(seed), 0, RoundPlan(0)

    def plan(self, reach):
        if not self._left:
            self._left = self._draw.randrange(1, 5)
            branches = self._draw.random() < 0.6
            self._plan = RoundPlan(self._draw.choice([0, 0, 1, 9]), branches)
        self._left -= 1
        return self._plan

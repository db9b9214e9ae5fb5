"""A planner that decides by chance."""

import random


class Whimsical:
    """A planner that changes its mind every few rounds."""

    timed = False

    def __init__(self, seed):
        self._draw, self._left, self._k = random.Random(seed), 0, 0

    def most_proposed(self, rows):
        if not self._left:
            self._left = self._draw.randrange(1, 5)
            self._k = self._draw.choice([0, 0, 1, 9])
        self._left -= 1
        return self._k

"""Waits for what another thread or process does."""

import time


def eventually(condition, seconds=120):
    """Returns once the condition holds; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.02)

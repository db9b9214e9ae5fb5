"""Waits for the end of what was cancelled, which comes with the round under way."""

import time

PATIENCE = 120  # seconds; only a failing test waits so long


def wait_until_idle(engine):
    """Waits until an engine has no work."""
    end = time.monotonic() + PATIENCE
    while engine.has_work:
        assert time.monotonic() < end, "requests that were cancelled go on"
        time.sleep(1e-3)

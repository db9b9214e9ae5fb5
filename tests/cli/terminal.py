"""A program in a terminal of its own, as a person has it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

PATIENCE = 240  # seconds; only a failing test waits so long
# The child makes the terminal its own, so that Ctrl-C is a signal to it.
_IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


class Terminal:
    """Runs `python ARGUMENTS`; `seen` is all that has appeared."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._master, slave = os.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200", **environment},
        )
        os.close(slave)
        self.seen = ""
        self._read_to = 0

    def wait_for(self, text: str) -> str:
        """What appeared since the last wait, up to and including `text`."""
        start = self._read_to
        deadline = time.monotonic() + PATIENCE
        while (found := self.seen.find(text, start)) < 0:
            assert self._receive(deadline), f"ended without {text!r}: {self._shown}"
        self._read_to = found + len(text)
        return self.seen[start : self._read_to]

    def wait_for_more(self, least: int = 1) -> None:
        """Until so many characters more have appeared."""
        deadline = time.monotonic() + PATIENCE
        while len(self.seen) < self._read_to + least:
            assert self._receive(deadline), f"ended: {self._shown}"
        self._read_to = len(self.seen)

    def type(self, text: str) -> None:
        """Presses keys."""
        os.write(self._master, text.encode())

    def ended(self) -> int:
        """The exit status."""
        deadline = time.monotonic() + PATIENCE
        while self._receive(deadline):
            pass
        return self._process.wait(PATIENCE)

    def close(self) -> None:
        """Ends what still runs."""
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    @property
    def _shown(self) -> str:
        """The ends of what was seen, for messages."""
        return f"{self.seen[:300]!r} ... {self.seen[-300:]!r}"

    def _receive(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing came in {PATIENCE} s after {self._shown}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux: the last one has closed the terminal
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)

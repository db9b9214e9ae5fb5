"""The type of progress callbacks."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), growing, never by two threads at once."""

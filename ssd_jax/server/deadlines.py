"""Time-outs of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

T = TypeVar("T")

_AGAIN = 0.01  # seconds


async def before(deadline: float, source: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """What comes from a generator up to a time, at which it is closed.

    It is closed then also while nobody asks for the next item, such as when a client reads slowly.

    Args:
      deadline: time of the running event loop.

    Raises:
      TimeoutError: the source has not ended by then.
    """
    loop = asyncio.get_running_loop()
    waits = False
    closing: asyncio.Task[None] | None = None

    def expire() -> None:
        nonlocal closing, timer
        if waits:  # and has a time-out of its own
            timer = loop.call_later(_AGAIN, expire)
        else:
            closing = loop.create_task(source.aclose())

    timer = loop.call_at(deadline, expire)
    try:
        while True:
            if closing is not None:
                raise TimeoutError
            waits = True
            try:
                async with asyncio.timeout_at(deadline):
                    item = await anext(source)
            except StopAsyncIteration:
                return
            finally:
                waits = False
            yield item
    finally:
        timer.cancel()
        if closing is not None:
            await closing
        await source.aclose()

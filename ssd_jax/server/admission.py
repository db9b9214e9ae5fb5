"""Which requests may wait for a slot, and when the others should come again."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Iterator
from typing import TypeVar

from ssd_jax.server.errors import ApiError, invalid

_LONGEST_WAIT = 60  # seconds
T = TypeVar("T")


class QueuePlace:
    """What an admitted request takes of the queue.

    Until its first token comes, requests of a lower `priority` may displace it where the queue is
    full.

    Attributes:
      texts: of the request.
    """

    def __init__(self, texts: int, priority: int) -> None:
        self.texts, self.priority = texts, priority
        self._begun, self._retry_after = False, 0
        self._limit: asyncio.Timeout | None = None

    @property
    def displaceable(self) -> bool:
        """Whether no token has come, and nobody has displaced it."""
        return not self._begun and not self.displaced

    @property
    def displaced(self) -> bool:
        """Whether another request has its place."""
        return self._retry_after > 0

    def displace(self, retry_after: int) -> None:
        """Ends the request's wait; it may come again in so many seconds."""
        self._retry_after = retry_after
        if self._limit is not None:
            self._limit.reschedule(0)

    @property
    def _refusal(self) -> ApiError:
        return ApiError(
            429,
            f"the queue is full, and requests of a lower `priority` than {self.priority} have "
            "come; try again later",
            code="queue_full",
            retry_after=self._retry_after,
        )

    async def guard(self, source: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """What comes from a generator, which is closed where the request is displaced.

        Raises:
          ApiError: it was displaced before the first item.
        """
        async with contextlib.aclosing(source):
            if self.displaced:
                raise self._refusal
            try:
                async with asyncio.timeout(None) as self._limit:
                    item = await anext(source)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if not self.displaced:
                    raise
                raise self._refusal from None
            self._begun, self._limit = True, None
            yield item
            async for more in source:
                yield more


class Admission:
    """Counts the texts that are decoded or wait.

    Args:
      slots: texts that are decoded at a time.
      queue: texts that may wait beside them.

    Attributes:
      texts: those admitted that have not ended.
    """

    def __init__(self, slots: int, queue: int) -> None:
        self.slots, self.queue = slots, queue
        self.texts = 0
        self._places: list[QueuePlace] = []  # in the order in which they came
        self._seconds = 1.0  # that a text takes, lately

    @property
    def running(self) -> int:
        """Texts in slots."""
        return min(self.texts, self.slots)

    @property
    def waiting(self) -> int:
        """Texts that wait for a slot."""
        return self.texts - self.running

    @contextlib.contextmanager
    def admit(self, texts: int, param: str = "n", priority: int = 0) -> Iterator[QueuePlace]:
        """Admits the texts of a request while the context lasts.

        Where they do not fit, requests of higher numbers of `priority` that have no token yet make
        room: of the highest number first, of the same the youngest.

        Args:
          param: the field that says how many they are.
          priority: of the request; lower numbers come first.

        Raises:
          ApiError: more than may ever wait, or more than may wait now.
        """
        limit = self.slots + self.queue
        if texts > limit:
            raise invalid(
                f"{param} asks for {texts} texts; at most {limit} run or wait at a time, so give "
                "fewer in a request",
                param,
            )
        self._make_room(self.texts + texts - limit, texts, priority)
        place = QueuePlace(texts, priority)
        self._places.append(place)
        self.texts += texts
        start = time.monotonic()
        try:
            yield place
        finally:
            if not place.displaced:
                self._leave(place)
                self._seconds += 0.1 * (time.monotonic() - start - self._seconds)

    def _leave(self, place: QueuePlace) -> None:
        self._places.remove(place)
        self.texts -= place.texts

    def _make_room(self, excess: int, texts: int, priority: int) -> None:
        """Displaces requests, so that there is room for so many texts more.

        Raises:
          ApiError: too few may be displaced.
        """
        later = [p for p in self._places if p.displaceable and p.priority > priority]
        later.sort(key=lambda place: place.priority)  # of the same number the youngest is the last
        displaced: list[QueuePlace] = []
        while later and sum(place.texts for place in displaced) < excess:
            displaced.append(later.pop())
        if sum(place.texts for place in displaced) < excess:
            raise ApiError(
                429,
                f"{self.texts} texts run or wait, and with {texts} more there would be more than "
                f"{self.slots + self.queue}; requests that have no token yet would make room for a "
                "lower `priority` than theirs, but there are too few; try again later",
                code="queue_full",
                retry_after=self._wait(excess),
            )
        for place in displaced:
            self._leave(place)
            place.displace(self._wait(place.texts))

    def _wait(self, excess: int) -> int:
        """Seconds until so many texts have ended, from how long requests took lately."""
        rounds = math.ceil(excess / self.slots)
        return min(max(math.ceil(rounds * self._seconds), 1), _LONGEST_WAIT)

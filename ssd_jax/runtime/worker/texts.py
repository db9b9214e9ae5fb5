"""What a worker knows of the text in a slot, and what it has to be told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import Moved
from ssd_jax.runtime.worker.connection import Connection
from ssd_jax.runtime.worker.messages import Move, Open, Prefill


@dataclasses.dataclass(kw_only=True)
class SlotText:
    """A request, and what the worker of `link` knows of it.

    Attributes:
      opening: the message that opens it.
      sampled: its verification needs q.
      text: prompt and committed tokens; the first `prompt` are the prompt's.
      known: positions whose keys and values the worker has for certain.
      counted: tokens that it has as prompt or counted as output.
      whole: its record was expanded by the last round: it has the keys and values of all of it.
    """

    opening: Open
    sampled: bool
    text: list[int] = dataclasses.field(default_factory=list)
    prompt: int = 0
    link: Connection | None = None
    known: int = 0
    counted: int = 0
    whole: bool = False

    @property
    def epoch(self) -> int:
        """Of the slot."""
        return self.opening.epoch

    def teach(self, link: Connection, numbers: Iterator[int]) -> None:
        """Gives a worker what it lacks of the text: all of it, if it is a new one."""
        opening = self.opening
        if self.link is not link:
            self.link, self.known, self.counted = link, 0, 0
            link.send(dataclasses.replace(opening, number=next(numbers)))
        if self.known < len(self.text):
            link.send(
                Prefill(
                    number=next(numbers),
                    slot=opening.slot,
                    epoch=opening.epoch,
                    offset=self.known,
                    tokens=np.array(self.text[self.known :], np.int32),
                )
            )
            self.known = len(self.text)
        self.counted = max(self.counted, self.prompt)

    def moved(self, moved: Moved, winner: int, limit: int, tokens: tuple[int, ...]) -> Move:
        """The message of a new record; all that was not counted yet counts as committed."""
        committed = tuple(int(token) for token in self.text[self.counted :])
        self.counted, self.known = len(self.text), moved.position
        return Move(
            slot=moved.slot,
            epoch=self.opening.epoch,
            position=int(moved.position),
            pending=int(moved.pending),
            committed=committed,
            winner=int(winner),
            limit=limit if winner >= 0 else 0,
            tokens=tokens,
            draft=0,
            sampled=self.sampled,
        )


def opening_of(params: SamplingParams, index: int, banned: Sequence[int], ban_before: int) -> Open:
    """The message that opens a slot, without slot and epoch."""
    return Open(
        number=0,
        slot=0,
        epoch=0,
        temperature=float(params.temperature),
        top_k=int(params.top_k),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        logit_bias=tuple((int(token), float(bias)) for token, bias in params.logit_bias),
        seed=int(params.seed),
        index=int(index),
        banned=tuple(int(token) for token in banned),
        ban_before=int(ban_before),
    )

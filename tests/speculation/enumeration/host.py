"""The product's engine, controller, cache, pace and backups over toy roles: see `host_roles`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request, RequestOutput
from ssd_jax.engine.requests.occurrences import Occurrences
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.controller import Controller, Policies
from ssd_jax.speculation.fan_out import FanOut, UniformFanOut
from ssd_jax.speculation.tuner import FixedTuner, SpeculationPlan, Tuner
from ssd_jax.speculation.waiting import Waiting
from ssd_jax.testing.fakes import Silent
from tests.speculation.enumeration.chance import Key, Law
from tests.speculation.enumeration.filters import Text
from tests.speculation.enumeration.host_roles import Clock, Name, ToyDraft, ToyTarget
from tests.speculation.enumeration.rounds import Game
from tests.speculation.enumeration.toys import PROMPT


class Hashed:
    """Noise of one sample: every key's exponential clocks, as `chance` has them, by a hash."""

    def token(self, law: Law, key: Key) -> int:
        """The token that the noise of `key` draws from `law`."""
        return min((self._clock(key, v) / float(p), v) for v, p in enumerate(law) if p)[1]

    def _clock(self, key: Key, token: int) -> float:
        digest = hashlib.blake2b(repr((*key, token)).encode(), digest_size=8).digest()
        return -math.log((int.from_bytes(digest, "little") + 0.5) / 2**64)


@dataclass(frozen=True, kw_only=True)
class Host:
    """An engine of mode ssd with the product's host classes, over toy roles.

    Attributes:
      game: target, draft, K and the rule.
      forward: seconds of a draft forward, by the expansion's number; None is a draft on the
        target's devices, whose time nobody sees.
      budget, fan_out, backup: as of the controller.
      width, patience, q_arrives: of the draft.
      slots: requests decoded together.
      chunk: tokens of prompts that a round reads; with one, requests begin in different rounds.
      tuner: chooses K and M; None are those of the game and `budget`.
    """

    game: Game
    forward: Callable[[int], float] | None = None
    budget: int = 3
    fan_out: Callable[[], FanOut] = UniformFanOut
    backup: Any = "auto"
    width: int = 9
    patience: float = float("inf")
    q_arrives: Callable[[int], bool] = lambda _number: True
    slots: int = 1
    chunk: int = 1
    tuner: Callable[[], Tuner] | None = None

    def engine(
        self,
        noise: Any,
        occurrences: Occurrences | None = None,
        watch: Callable[[ToyDraft], Any] = lambda draft: draft,
    ) -> Engine:
        """A new one; `watch` may come between controller and draft."""
        clock, k = Clock(), self.game.k
        target, draft = self.roles(noise, clock)
        tuner = self.tuner() if self.tuner else None
        policies = Policies(
            k=k,
            tuner=tuner or FixedTuner(SpeculationPlan.of_branches(k, self.budget)),
            fan_out=self.fan_out,
            backup=self.backup,
            tokens=len(self.game.target((0,))),
            rule=self.game.verify.__name__,
        )
        elsewhere = self.forward is not None
        controller = Controller(
            watch(draft),
            policies,
            elsewhere=elsewhere,
            waiting=Waiting(draft.activity if elsewhere else None, clock=clock),
        )
        return Engine(
            target,
            Silent,
            frozenset(),
            drafter=controller,
            clock=clock,
            occurrences=occurrences,
        )

    def roles(self, noise: Any, clock: Clock) -> tuple[ToyTarget, ToyDraft]:
        """Target and draft of an engine."""
        target = ToyTarget(self.game, noise, clock, slots=self.slots, chunk=self.chunk)
        return target, ToyDraft(self.game.draft, noise, clock, **self.draft_settings)

    @property
    def draft_settings(self) -> dict[str, Any]:
        """Size and pace of the draft."""
        return {
            "slots": self.slots,
            "k": self.game.k,
            "branches": self.budget,
            "width": self.width,
            "forward": self.forward or (lambda _number: 0.0),
            "patience": self.patience,
            "q_arrives": self.q_arrives,
        }


def outputs(
    engine: Engine, names: Sequence[Name], length: int, stop: Sequence[int] = ()
) -> list[RequestOutput]:
    """Of requests with these seeds and indices, which come all at once; ids of `stop` end them."""
    params = {"temperature": 1.0, "max_tokens": length, "stop_token_ids": tuple(stop)}
    ids = [
        engine.add(Request(prompt_ids=PROMPT, params=SamplingParams(seed=seed, **params), index=i))
        for seed, i in names
    ]
    found: dict[int, RequestOutput] = {}
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                found[event.request_id] = event.output
    return [found[request_id] for request_id in ids]


def texts(engine: Engine, names: Sequence[Name], length: int) -> tuple[Text, ...]:
    """Token ids of `outputs`."""
    return tuple(tuple(output.token_ids) for output in outputs(engine, names, length))

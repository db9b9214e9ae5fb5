"""Roles over toy models on a scripted clock: what the engine's real host classes are run on.

Engine, controller, cache, pace, fan-outs and backups are the product's own; here are a target and a
branching draft whose draws are those of a `Chance` (or of anything else that answers draws by key),
and a clock that moves only where somebody waits. A token is drawn when somebody looks at it: its
key is known before, so that makes no difference, but the branches that nobody looks at need not be
enumerated. Nothing here imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ssd_jax.roles.activity import Activity, Busy
from ssd_jax.roles.records import IDLE, BranchTokens, Drafted, Outcomes, Promotion, SlotOpening
from ssd_jax.sampling.confidence import EDGES, UNKNOWN
from ssd_jax.testing.by_row import Promoted, promoted
from tests.fakes.stepwise import StepwiseDraft
from tests.speculation.enumeration.chance import Key, Law, Renamed
from tests.speculation.enumeration.filters import Model, Text, point
from tests.speculation.enumeration.rounds import Game, Record, State
from tests.speculation.enumeration.ssd import ranked

Name = tuple[int, int]
"""Seed and index: whose noise it is."""


class Clock:
    """Seconds, which pass only where somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def until(self, moment: float) -> None:
        """Waits."""
        self.now = max(self.now, moment)


class Token:
    """A drafted token, drawn when it is looked at."""

    def __init__(self, draw: Callable[[], int]) -> None:
        self._draw, self._value = draw, None

    def __index__(self) -> int:
        if self._value is None:
            self._value = self._draw()
        return self._value

    def __eq__(self, other: object) -> bool:
        return int(self) == int(other)

    def __hash__(self) -> int:
        return hash(int(self))

    def __ge__(self, other: int) -> bool:
        return other <= 0 or int(self) >= other  # there is one, whichever it is

    def __gt__(self, other: int) -> bool:
        return int(self) > other

    def __lt__(self, other: int) -> bool:
        return int(self) < other


@dataclass
class Speculation:
    """Tokens that follow a text, with the laws that they are drawn from.

    Attributes:
      start: position of the text's last token.
      tokens: as far as they are known to the host.
      host: they are the host's own, and point masses.
      path: of a branch.
    """

    start: int
    text: Callable[[], Text]
    law: Callable[[Text], Law]
    noise: Any
    tokens: list[Any] = field(default_factory=list)
    host: bool = False
    path: list[Any] = field(default_factory=list)

    def grow(self, count: int) -> None:
        """Has `count` tokens, whose keys are those of its start."""
        for step in range(len(self.tokens), count):
            self.tokens.append(Token(lambda step=step: self._draw(step)))

    def _draw(self, step: int) -> int:
        return self.noise.token(self.law_at(step), Key(self.start, self.start + 1 + step, "draft"))

    def confidence(self) -> list[Any]:
        """The draft's in each token, looked at as late as the token itself."""
        return [Token(lambda step=step: self._class(step)) for step in range(len(self.tokens))]

    def _class(self, step: int) -> int:
        probability = self.law_at(step)[int(self.tokens[step])]
        return sum(probability >= edge for edge in EDGES)

    def law_at(self, step: int) -> Law:
        """The law of a token, given those before it."""
        return self.law((*self.text(), *map(int, self.tokens[:step])))


@dataclass
class Proposed:
    """See `rounds.Record`: tokens and laws one by one, as far as somebody asks."""

    speculation: Speculation
    length: int
    point_mass: bool

    @property
    def tokens(self) -> Iterator[int]:
        return map(int, self.speculation.tokens[: self.length])

    @property
    def laws(self) -> Iterator[Law]:
        for step in range(self.length):
            law = self.speculation.law_at(step)
            certain = self.point_mass or self.speculation.host
            yield point(int(self.speculation.tokens[step]), len(law)) if certain and law else law


class ToyDraft(StepwiseDraft):
    """See `protocols.BranchingDraft`: a draft elsewhere, as slow as it is said to be.

    Args:
      model: the draft's law of the next token.
      noise: answers its draws.
      width: candidates at each place.
      forward: seconds of a forward of an expansion, by the expansion's number; of a record's too.
      patience: seconds that are waited for it.
      q_arrives: whether the q of the proposals comes in time, by the round's number.
    """

    def __init__(
        self,
        model: Model,
        noise: Any,
        clock: Clock,
        *,
        slots: int,
        k: int,
        branches: int,
        width: int,
        forward: Callable[[int], float] = lambda _number: 0.0,
        patience: float = float("inf"),
        q_arrives: Callable[[int], bool] = lambda _number: True,
    ) -> None:
        self.slots, self.k, self.branches = slots, k, branches
        self._model, self._noise, self._clock = model, noise, clock
        self._width = width
        self._forward, self._patience, self._q_arrives = forward, patience, q_arrives
        self._names: dict[int, Name] = {}
        self._texts: dict[int, Text] = {}
        self._records: dict[int, Speculation] = {}
        self._branches: dict[int, list[Speculation | None]] = {}
        self._number = self._moves = 0
        self._began = self._free = 0.0  # of the expansion; when the draft has nothing to do
        self._planned = self._reported = 0
        self._serving, self._awaited, self._overdue = True, False, False
        self._spans: list[Busy] = []

    def open(self, opening: SlotOpening) -> None:
        name = opening.params.seed, opening.index
        self._names[opening.slot], self._texts[opening.slot] = name, ()

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        self._texts[slot] = (*self._texts[slot][:offset], *tokens)

    def promote(self, promotion: Promotion) -> None:
        self._cut()
        self._overdue = self._overdue and self._clock.now < self._free
        self._serving, self._awaited = not self._overdue, False
        self._moves += 1
        records = {}
        for moved in promoted(promotion):
            slot = moved.slot
            self._texts[slot] += tuple(moved.committed)
            text = self._texts[slot]
            assert (moved.position, moved.pending) == (len(text) - 1, text[-1])
            records[slot] = self._renewed(moved, text)
        self._records, self._branches = records, {}

    def _renewed(self, moved: Promoted, text: Text) -> Speculation:
        """The record of a slot, behind its text."""
        record = self._speculation(moved.slot, moved.position, lambda: text)
        record.tokens, record.host = list(moved.tokens), bool(moved.tokens)
        if moved.winner >= 0:
            won = self._winner(moved, text)
            assert moved.limit <= len(won.tokens)
            record.tokens = won.tokens[: moved.limit]
        return record

    def _winner(self, moved: Promoted, text: Text) -> Any:
        """The branch that becomes the record."""
        assert self._serving, "a winner of a draft that is not there"
        won = self._branches[moved.slot][moved.winner]
        assert won is not None
        path = text[self._records[moved.slot].start + 1 :]
        assert tuple(map(int, won.path)) == path, "the branch is of another outcome"
        return won

    def _speculation(self, slot: int, start: int, text: Callable[[], Text]) -> Speculation:
        name = self._names[slot]
        return Speculation(start, text, self._model, _of(self._noise, name))

    def draft(self, limits: np.ndarray, *, lowered: np.ndarray) -> Callable[[], np.ndarray]:
        if not self._serving:
            return lambda: np.zeros(self.slots, np.int32)
        for slot in np.flatnonzero(limits):
            self._records[slot].grow(int(limits[slot]))
        began = max(self._clock.now, self._free)
        self._free = began + int(limits.max()) * self._forward(self._number)
        self._clock.until(self._free)
        self._spans.append(Busy("draft", began, self._free))
        return lambda: limits

    def tokens(self) -> None:
        """Those of the proposal, which the target draws no sooner."""

    def proposal(self) -> dict[int, Proposed]:
        return self._proposal(point_mass=not self._q_arrives(self._moves))

    def _proposal(self, *, point_mass: bool) -> dict[int, Proposed]:
        return {
            slot: Proposed(record, len(record.tokens), point_mass)
            for slot, record in self._records.items()
        }

    def confidence(self) -> np.ndarray:
        found = np.full((self.slots, self.k), UNKNOWN, object)
        for slot, record in self._records.items():
            if not record.host:
                found[slot, : len(record.tokens)] = record.confidence()
        return found

    def branch_off(
        self,
        counts: np.ndarray,
        *,
        follow: np.ndarray,
        lowered: np.ndarray,
        forwards: int,
        skip: np.ndarray | None = None,
    ) -> None:
        if not self._serving:
            return
        self._number += 1
        self._awaited, self._planned, self._reported = True, forwards, 0
        self._began = max(self._clock.now, self._free)
        for slot, record in self._records.items():
            first = [0] * (self.k + 1) if skip is None else skip[slot].tolist()
            self._branches[slot] = self._forks(slot, record, counts[slot].tolist(), first)

    def _forks(
        self, slot: int, record: Any, counts: Sequence[int], first: Sequence[int]
    ) -> list[Any]:
        """The branches of a record."""
        return [
            self._branch(slot, record, k, first[k] + rank)
            for k, count in enumerate(counts)
            for rank in range(count)
        ]

    def _branch(self, slot: int, record: Speculation, k: int, rank: int) -> Speculation | None:
        text, size = self._texts[slot], len(self._model(self._texts[slot]))
        rejected = k < len(record.tokens)
        if rank >= min(size - rejected, self._width):
            return None

        def bonus() -> int:
            path = tuple(map(int, record.tokens[:k]))
            out = int(record.tokens[k]) if rejected else None
            return [t for t in ranked(self._model((*text, *path))) if t != out][rank]

        path = [*record.tokens[:k], Token(bonus)]
        branch = self._speculation(slot, record.start + 1 + k, lambda: (*text, *map(int, path)))
        branch.path = path
        return branch

    def branch_tokens(
        self, forwards: int, until: Callable[[], bool] | None = None
    ) -> BranchTokens | str | None:
        if not self._awaited:
            return "stale"
        made = self._began + forwards * self._forward(self._number)
        if until is not None and made > self._clock.now:
            return None  # the outcome comes first
        if made > self._clock.now + self._patience:
            self._clock.until(self._clock.now + self._patience)
            self._overdue = True
            self._free = made
            return "late"
        self._clock.until(made)
        return self._branch_tokens(self._made())

    def _made(self) -> int:
        """Forwards of the expansion that have ended."""
        seconds = self._forward(self._number)
        if not seconds:
            return self._planned
        passed = (self._clock.now - self._began) / seconds
        return min(int(passed + 1e-9), self._planned)

    def _cut(self) -> None:
        """The expansion ends with the forward that is running."""
        if not self._awaited:
            return
        self._tell()
        seconds = self._forward(self._number)
        running = self._reported < self._planned and self._clock.now > self._began
        self._free = max(self._free, self._began + (self._reported + running) * seconds)

    def _branch_tokens(self, made: int) -> BranchTokens:
        shape = self.slots, self.branches
        bonus, lengths = np.full(shape, -1, object), np.zeros(shape, np.int32)
        tokens = np.zeros((*shape, self.k), object)
        confidence = np.full((*shape, self.k), UNKNOWN, object)
        for slot, record in self._records.items():
            for row, branch in enumerate(self._branches[slot]):
                if branch is None:
                    continue
                last = len(branch.path) - 1 == len(record.tokens)
                count = min(made - last, self.k)
                branch.grow(count)
                bonus[slot, row], lengths[slot, row] = branch.path[-1], count
                tokens[slot, row, :count] = branch.tokens[:count]
                confidence[slot, row, :count] = branch.confidence()[:count]
        return BranchTokens(bonus, lengths, tokens, confidence, made)

    def activity(self) -> Activity:
        """What it has done, as far as it has ended."""
        if self._awaited:
            self._tell()
        spans, self._spans = self._spans, []
        return Activity(tuple(spans))

    def _tell(self) -> None:
        """Notes the forwards of the expansion that have ended."""
        seconds = self._forward(self._number)
        for forward in range(self._reported, self._made()):
            begin = self._began + forward * seconds
            self._spans.append(Busy("grow" if forward else "expand", begin, begin + seconds))
        self._reported = max(self._reported, self._made())


class Pending:
    """Outcomes that come at a moment."""

    def __init__(self, clock: Clock, moment: float, emitted: dict[int, Text]) -> None:
        self._clock, self._moment, self._emitted = clock, moment, emitted

    def ready(self) -> bool:
        return self._clock.now >= self._moment

    def read(self) -> Outcomes:
        self._clock.until(self._moment)
        rows = max(self._emitted, default=0) + 1
        accepted = np.zeros(rows, np.int32)
        tokens = np.zeros((rows, max(map(len, self._emitted.values()))), np.int32)
        for row, ids in self._emitted.items():
            accepted[row] = len(ids) - 1
            tokens[row, : len(ids)] = ids
        return Outcomes(accepted, tokens)


class ToyTarget:
    """See `protocols.Target`: verifies by the game's rule; a forward takes a second."""

    context = 64

    def __init__(self, game: Game, noise: Any, clock: Clock, *, slots: int, chunk: int) -> None:
        self.max_chunk = chunk
        self.slots, self._game, self._noise, self._clock = slots, game, noise, clock
        self._names: dict[int, Name] = {}
        self._texts: dict[int, Text] = {}
        self.lengths: list[tuple[Name, int]] = []
        """Of the proposals, whose and how long, round after round."""

    def open(self, opening: SlotOpening) -> None:
        name = opening.params.seed, opening.index
        self._names[opening.slot], self._texts[opening.slot] = name, ()

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        self._texts[slot] = (*self._texts[slot][:offset], *tokens)

    def prefill_last(self, slot: int, tokens: Sequence[int], offset: int) -> Pending:
        self.prefill(slot, tokens, offset)
        return Pending(self._clock, self._clock.now + 1, {0: self._verify(slot, Record())})

    def forward(
        self, tokens: np.ndarray, lengths: np.ndarray, drafted: Drafted | None = None
    ) -> tuple[np.ndarray, np.ndarray, Drafted | None]:
        return tokens, lengths, drafted

    def accept(
        self,
        logits: tuple[np.ndarray, np.ndarray, Drafted | None],
        proposal: dict[int, Proposed] | None = None,
    ) -> Pending:
        (tokens, lengths, drafted), proposal = logits, proposal or {}
        emitted = {}
        for slot in np.flatnonzero(lengths != IDLE).tolist():
            self._texts[slot] = self._texts[slot][: lengths[slot] + 1]
            assert self._texts[slot][-1] == tokens[slot]
            assert len(self._texts[slot]) == lengths[slot] + 1
            length = 0 if drafted is None else int(drafted.lengths[slot])
            assert length == (proposal[slot].length if slot in proposal else 0)
            self.lengths.append((self._names[slot], length))
            emitted[slot] = self._verify(slot, proposal.get(slot, Record()))
        return Pending(self._clock, self._clock.now + 1, emitted)

    def _verify(self, slot: int, record: Any) -> Text:
        before, noise = self._texts[slot], self._noise_of(slot)
        after = self._texts[slot] = self._game.verify(self._game, State(before), record, noise)
        return after[len(before) :]

    def _noise_of(self, slot: int) -> Renamed:
        return _of(self._noise, self._names[slot])


def _of(noise: Any, name: Name) -> Renamed:
    """The noise of one request."""
    return Renamed(noise, lambda key: key._replace(request=name))

"""A draft of branches driven through scripted rounds; all it holds is copied after each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ssd_jax.devices.branches.branching import Expansion
from ssd_jax.devices.branches.draft import BranchDraft
from ssd_jax.devices.draft.record import Record
from ssd_jax.roles.records import BranchTokens, ExpansionRequest, RecordRequest, SlotOpening
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.by_row import Promoted, promotion_of

ALL = -1
"""An outcome's k that stands for L."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What a slot is opened with."""

    prompt: tuple[int, ...]
    params: SamplingParams
    banned: tuple[int, ...] = ()
    ban_before: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a slot's verification: k tokens and a bonus token, and the record that follows.

    Attributes:
      k: accepted tokens.
      rank: of the branch that becomes the record; None is a bonus token of no branch.
      limit: most tokens of that branch.
      drafted: tokens drafted just in time.
      hosted: tokens that the draft did not make.
    """

    k: int = 0
    rank: int | None = None
    limit: int = 99
    drafted: int = 0
    hosted: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a draft held in one round; pages are [layers, B, heads, positions, 2 D].

    Attributes:
      texts: by slot, prompt and committed tokens, the pending one last.
      sources: by slot, where the record came from.
      moves: by slot, what the draft was told.
      moved: pages when the records were in place; `record` is as it was then.
      proposed: the records' tokens [B, K] for the target.
      grown: pages after the expansion, and `followed` the record.
      output: [B, V] tokens counted.
      counts: [B, K + 1], the fan-outs; 0 of slots without a record, whatever they are given.
      forwards: of the model, in order, as tokens a row: of new records, and of the expansion.
    """

    texts: Mapping[int, tuple[int, ...]]
    requests: Mapping[int, Request]
    sources: Mapping[int, str]
    moves: Mapping[int, Promoted]
    moved: np.ndarray
    record: Record
    proposed: Any
    grown: np.ndarray
    followed: Record
    output: np.ndarray
    counts: np.ndarray
    expansion: Expansion
    on_host: BranchTokens
    forwards: tuple[list[int], list[int]]

    @property
    def budget(self) -> int:
        """M of the programs that made the branches."""
        return self.expansion.path.shape[0] // len(self.output)

    def branches(self, slot: int) -> list[tuple[int, int, int]]:
        """(number, k, rank) of the slot's branches."""
        ranks = [(k, rank) for k, count in enumerate(self.counts[slot]) for rank in range(count)]
        return [(number, *where) for number, where in enumerate(ranks)]


class Rounds:
    """Slots driven as the controller would, the target's part played by a script.

    Args:
      fan_out: (slot, L) -> F_0..F_L.
      lowered: [K], D of Saguaro sampling.
      ran: gets an entry for each forward of the model.
    """

    def __init__(
        self,
        draft: BranchDraft,
        fan_out: Callable[[int, int], Sequence[int]],
        *,
        forwards: int,
        lowered: Sequence[int] = (),
        ran: list[int],
    ) -> None:
        self._draft, self._fan_out, self._forwards, self._ran = draft, fan_out, forwards, ran
        row = np.array([*lowered, *[1] * draft.k][: draft.k], np.int32)
        self._lowered = np.tile(row, (draft.slots, 1))
        self._texts: dict[int, list[int]] = {}
        self._requests: dict[int, Request] = {}
        self.seen: list[Seen] = []

    def run(self, moves: Mapping[int, Outcome | Request]) -> Seen:
        """One round: new records for these slots, none for others; then their branches."""
        self._forwards_since()
        moved, limits = [], np.zeros(self._draft.slots, np.int32)
        sources = {}
        for slot, how in moves.items():
            if isinstance(how, Request):
                moved.append(self._open(slot, how))
                sources[slot] = "prompt"
            else:
                moved.append(self._take(slot, how))
                limits[slot] = how.drafted
                hit, hosted = how.rank is not None, bool(how.hosted)
                sources[slot] = (
                    "hit" if hit else "host" if hosted else "draft" if how.drafted else "none"
                )
        self._texts = {slot: self._texts[slot] for slot in moves}
        self._forwards_since()  # prefills
        promotion = promotion_of(moved, self._draft.slots, self._draft.k)
        answer = self._draft.record(RecordRequest(promotion, limits, self._lowered))
        drafting, proposed = self._forwards_since(), answer.tokens()
        record, pages = copied(self._draft._record), layered(self._draft._pages, self._draft.slots)
        counts = np.zeros((self._draft.slots, self._draft.k + 1), np.int64)
        for slot in moves:
            fan_out = self._fan_out(slot, int(record.proposal.length[slot]))
            counts[slot, : len(fan_out)] = fan_out
        asked = counts.copy()
        most = counts.sum(axis=1).max()
        asked[[slot not in moves for slot in range(self._draft.slots)], 0] = most
        follow = np.array([sources.get(slot) == "host" for slot in range(self._draft.slots)])
        request = ExpansionRequest(asked, follow, self._lowered, self._forwards)
        branches = self._draft.expand(request)
        self.seen.append(
            Seen(
                texts={slot: tuple(text) for slot, text in self._texts.items()},
                requests={slot: self._requests[slot] for slot in moves},
                sources=sources,
                moves={move.slot: move for move in moved},
                moved=pages,
                record=record,
                proposed=proposed,
                grown=layered(self._draft._pages, self._draft.slots),
                followed=copied(self._draft._record),
                output=np.array(self._draft._history.output),
                counts=counts,
                expansion=copied(self._draft._active.expansion),
                on_host=branches.branches(1),
                forwards=(drafting, self._forwards_since()),
            )
        )
        return self.seen[-1]

    def _open(self, slot: int, request: Request) -> Promoted:
        self._requests[slot], self._texts[slot] = request, list(request.prompt)
        bans = request.banned, request.ban_before
        self._draft.open(
            SlotOpening(slot, request.params, slot, *bans, bad_word_ids=request.bad_word_ids)
        )
        self._draft.prefill(slot, request.prompt, 0)
        return Promoted(slot=slot, position=len(request.prompt) - 1, pending=request.prompt[-1])

    def _take(self, slot: int, how: Outcome) -> Promoted:
        last, text = self.seen[-1], self._texts[slot]
        tokens = np.asarray(last.record.proposal.tokens)[slot].tolist()
        length = int(last.record.proposal.length[slot])
        k = length if how.k == ALL else how.k
        assert k <= length
        prepared = {
            rank: (number, int(last.on_host.bonus[slot, number]))
            for number, at, rank in last.branches(slot)
            if at == k
        }
        if how.rank is None:
            taken = {bonus for _, bonus in prepared.values()} | set(tokens[k : k + 1])
            winner, bonus = -1, next(token for token in range(97, 200) if token not in taken)
        else:
            winner, bonus = prepared[how.rank % len(prepared)]
        committed = [*tokens[:k], bonus]
        text += committed
        return Promoted(
            slot=slot,
            position=len(text) - 1,
            pending=bonus,
            committed=committed,
            winner=winner,
            tokens=how.hosted,
            limit=min(how.limit, self._draft.k),
        )

    def _forwards_since(self) -> list[int]:
        """Forwards that ran since the last call."""
        self._draft.finish()
        jax.block_until_ready(self._draft._active.expansion)
        jax.effects_barrier()
        since = list(self._ran)
        self._ran.clear()
        return since


def copied(tree):
    """On the host, so that donating the original changes nothing."""
    return jax.tree.map(lambda array: np.array(array), tree)


def layered(pages: jax.Array, slots: int) -> np.ndarray:
    """Pages of slots that have one each, [layers, B, heads, positions, 2 D], copied."""
    return np.array(pages).reshape(-1, slots, *pages.shape[1:])

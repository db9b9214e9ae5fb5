"""A draft of mode ssd that works on the host: its records and branches are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from typing_extensions import override

from ssd_jax.placement.host_drafter import AnswerChecks
from ssd_jax.placement.host_proposals import HostProposals
from ssd_jax.roles.protocols import BranchingDraft, ExpansionAnswer, RecordAnswer
from ssd_jax.roles.records import (
    ABSENCES,
    Absence,
    BranchTokens,
    DraftSetup,
    ExpansionRequest,
    RecordRequest,
    Row,
    SlotOpening,
)
from ssd_jax.sampling.proposal import Proposal


class HostBranchingDraft(BranchingDraft):
    """A branching draft whose tokens are point masses, unless it draws them from the q it gives.

    Args:
      draft: records and expands.
      setup: what it was made for.
      name: of the draft, for errors.
      draws_from_q: see `HostDrafter`.
    """

    def __init__(
        self, draft: BranchingDraft, setup: DraftSetup, *, name: str, draws_from_q: bool = False
    ) -> None:
        self.slots, self.k, self.branches = setup.slots, setup.k, setup.branches
        self._draft, self._setup = draft, setup
        self._checks = AnswerChecks(name, setup)
        self._draws_from_q = draws_from_q and setup.support > 1

    @override
    def open(self, opening: SlotOpening) -> None:
        self._draft.open(opening)

    @override
    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        self._draft.set_pages(slot, pages)

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        self._draft.prefill(slot, tokens, offset)

    @override
    def record(self, request: RecordRequest) -> RecordAnswer:
        answer, setup = self._draft.record(request), self._setup
        proposals = HostProposals(setup.slots, setup.k, setup.support, setup.ids)
        return CheckedRecords(
            answer, request, self._checks, proposals, draws_from_q=self._draws_from_q
        )

    @override
    def expand(self, request: ExpansionRequest) -> ExpansionAnswer:
        return CheckedBranches(self._draft.expand(request), self._setup, self._checks)

    @override
    def close(self) -> None:
        self._draft.close()


class CheckedRecords(RecordAnswer):
    """Records of a draft on the host: tokens of the promotion, or drafted just in time.

    Args:
      proposals: gets the tokens.
      draws_from_q: the q of tokens that the draft made counts.
    """

    def __init__(
        self,
        answer: RecordAnswer,
        request: RecordRequest,
        checks: AnswerChecks,
        proposals: HostProposals,
        *,
        draws_from_q: bool,
    ) -> None:
        self._answer, self._request, self._checks = answer, request, checks
        self._proposals, self._draws_from_q = proposals, draws_from_q
        self._is_drafted = request.drafts > 0
        self._lengths: Row | None = None
        self._has_tokens = False

    @override
    def lengths(self) -> Row:
        if self._lengths is None:
            drafts = self._request.drafts
            self._lengths = np.zeros_like(drafts)
            if self._is_drafted.any():
                self._lengths = self._checks.lengths("lengths", self._answer.lengths(), drafts)
        return self._lengths

    @override
    def tokens(self) -> np.ndarray:
        if not self._has_tokens:
            promotion, lengths = self._request.promotion, self.lengths()
            tokens = promotion.tokens
            if self._is_drafted.any():
                drawn = self._checks.tokens("tokens", self._answer.tokens(), lengths)
                tokens = np.where(self._is_drafted[:, None], drawn, tokens)
            self._proposals.put(tokens, np.where(self._is_drafted, lengths, promotion.limit))
            self._has_tokens = True
        return self._proposals.tokens

    @override
    def confidence(self) -> np.ndarray:
        shape = self._request.promotion.tokens.shape
        return self._checks.classes("confidence", self._answer.confidence(), shape)

    @override
    def proposal(self) -> Proposal:
        self.tokens()
        has_winner = self._request.promotion.winner >= 0
        slots = np.flatnonzero((has_winner | self._is_drafted) & (self._proposals.lengths > 0))
        if self._draws_from_q and len(slots):
            self._checks.take_q(self._proposals, slots.tolist(), self._answer.proposal)
        return self._proposals.proposal()


class CheckedBranches(ExpansionAnswer):
    """Branches of a draft on the host."""

    def __init__(self, answer: ExpansionAnswer, setup: DraftSetup, checks: AnswerChecks) -> None:
        self._answer, self._setup, self._checks = answer, setup, checks
        self._last_answer: tuple[Any, BranchTokens | Absence | None] = None, None

    @override
    def branches(
        self, forwards: int, until: Callable[[], bool] | None = None
    ) -> BranchTokens | Absence | None:
        """Waits for the draft's answer.

        Raises:
          InputError: that is malformed.
        """
        answer = self._answer.branches(forwards, until)
        if answer is not self._last_answer[0]:
            self._last_answer = answer, self._check(answer)
        return self._last_answer[1]

    def _check(self, answer: Any) -> BranchTokens | Absence:
        setup, checks = self._setup, self._checks
        if isinstance(answer, str) and answer in ABSENCES:
            return answer
        if not isinstance(answer, BranchTokens):
            checks.refuse(
                f"branches returned {answer!r}, and must return BranchTokens, None, or one of "
                f"{', '.join(ABSENCES)}"
            )
        shape = setup.slots, setup.branches
        limits = np.full(shape, setup.k)
        lengths = checks.lengths("BranchTokens.lengths", answer.lengths, limits)
        bonus = checks.array("BranchTokens.bonus", answer.bonus, shape)
        if ((bonus < -1) | (bonus >= setup.ids)).any():
            checks.refuse(f"BranchTokens.bonus must be -1, or ids from 0 to {setup.ids - 1}")
        return BranchTokens(
            bonus.astype(np.int32),
            lengths,
            checks.tokens("BranchTokens.tokens", answer.tokens, lengths),
            checks.classes("BranchTokens.confidence", answer.confidence, (*shape, setup.k)),
            self._forwards(answer.forwards),
            self._absent(answer.absent),
        )

    def _forwards(self, forwards: Any) -> int:
        if not isinstance(forwards, Integral) or forwards < 0:
            self._checks.refuse(f"BranchTokens.forwards = {forwards!r} is no number of forwards")
        return int(forwards)

    def _absent(self, absent: Any) -> dict[int, Absence]:
        slots = range(self._setup.slots)
        if not isinstance(absent, Mapping) or not all(
            slot in slots and why in ABSENCES for slot, why in absent.items()
        ):
            self._checks.refuse(
                f"BranchTokens.absent = {absent!r} must map slots to {', '.join(ABSENCES)}"
            )
        return dict(absent)

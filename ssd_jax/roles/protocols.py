"""What is asked of the roles: pure host types, so that tests can give the engine fakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Int, Int32

from ssd_jax.roles.records import (
    Absence,
    BranchTokens,
    DraftBatch,
    Drafted,
    Outcomes,
    Promotion,
    SlotOpening,
)


class Pending(Protocol):
    """The outcomes of a dispatched program.

    Attributes:
      bonus: [B] int32, the bonus tokens, which may still be computed: the next round's pending
        ones. A `Target.forward` takes them unread.
    """

    bonus: Any

    def read(self) -> Outcomes:
        """Waits for them."""
        ...

    def ready(self) -> bool:
        """Whether `read` waits for nothing."""
        ...


class Drafter(Protocol):
    """The draft role: proposes tokens for the target to verify.

    Attributes:
      k: most tokens of a proposal.
      on_device: whether it keeps the devices busy that it shares with the target.
      timed: whether lengths of its proposals depend on time, or on other requests, where sampled
        texts depend on them: under the ratio rule. See `occurrences`.
      asks_first: whether `speculate` is called before the target's forward is dispatched, since it
        only sends a message: behind it the message would wait for cores that the target uses.
    """

    k: int
    on_device: bool
    timed: bool = False
    asks_first: bool = False

    def open(self, opening: SlotOpening) -> None:
        """Empties a slot for a new request."""
        ...

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Gives a slot more pages behind those of its opening; `pages` are all of them."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """Takes tokens of the text that there is, at most the target's `max_chunk` at a time; see
        `SlotOpening.reused` and `SlotOpening.prompt`."""
        ...

    def gather(self, until: Callable[[], bool]) -> None:
        """Takes what was speculated, if anything, before the outcome is read; waits for it no
        longer than `until` the outcome is there."""

    def propose(self, batch: DraftBatch) -> Drafted:
        """Proposes for these rows; L is 0 in all others."""
        ...

    def speculate(self) -> None:
        """Works ahead, if it does; called in every step, when the target's forward, if any, was
        dispatched, or just before it if it `asks_first`."""

    def proposal(self) -> Any:
        """What `propose` has proposed, as `sampling.proposal.Proposal`: waits for each q that is
        still on its way. Called once a round, behind `speculate`."""
        ...


class BranchingDraft(Protocol):
    """A draft that speculates for several verification outcomes at once.

    It holds a record of each slot, the speculation that the target verifies, and branches of it.

    Attributes:
      slots: rows of every call.
      k: most tokens of a record or branch.
      branches: M, most branches a slot.
    """

    slots: int
    k: int
    branches: int

    def open(self, opening: SlotOpening) -> None:
        """Sets a slot's sampling."""
        ...

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """See `Drafter.set_pages`."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """Takes tokens of the text that there is, the last one too; see `SlotOpening`."""
        ...

    def promote(self, promotion: Promotion) -> None:
        """Gives these slots new records; idle ones have none. Branches are gone."""
        ...

    def draft(
        self, limits: Int[np.ndarray, "B"], *, lowered: Int[np.ndarray, "B K"]
    ) -> Callable[[], Int[np.ndarray, "B"]]:
        """Has records of `limits` tokens drafted just in time; 0 leaves a record as it is.

        `lowered`: D of Saguaro sampling for each token.

        Returns: what waits for the draft, if it has to be waited for, and says how many tokens
          there will be: `limits`, or 0 where the draft did not answer. It is called before
          anything else is.
        """
        ...

    def tokens(self) -> Any:
        """The records' tokens [B, K], for the target's forward."""
        ...

    def proposal(self) -> Any:
        """The records' proposals: waits for each q that is on its way. Called once a round, behind
        `expand`, if there is one."""
        ...

    def confidence(self) -> Int32[np.ndarray, "B K"]:
        """Waits for the draft's confidence in tokens drafted just in time; -1 is unknown."""
        ...

    def expand(
        self,
        counts: Int[np.ndarray, "B F"],
        *,
        follow: Bool[np.ndarray, "B"],
        lowered: Int[np.ndarray, "B K"],
        forwards: int,
        skip: Int[np.ndarray, "B F"] | None = None,
    ) -> None:
        """Branches off every record.

        Args:
          counts: F_0..F_L of each slot.
          skip: ranks of each k that other drafts have branches for; None is none.
          follow: slots whose record has tokens that the draft did not make.
          lowered: D of Saguaro sampling for each token of the branches.
          forwards: how many; the first gives branches of k < L a token, those of k = L start with
            the second.
        """
        ...

    def branch_tokens(
        self, forwards: int, until: Callable[[], bool] | None = None
    ) -> BranchTokens | Absence | None:
        """Waits until that many forwards have made the branches, or says why there are none.

        It may be asked again for more of the same expansion.

        Args:
          until: ends the wait, once it is true, with None: they may still come.
        """
        ...


class Target(Protocol):
    """The target role: slots, and programs that are dispatched without waiting.

    Attributes:
      slots: rows of a batched forward.
      context: most positions a sequence may have, prompt and output together.
      max_chunk: most prompt tokens one prefill runs.
    """

    slots: int
    context: int
    max_chunk: int

    def open(self, opening: SlotOpening) -> None:
        """Sets a slot's sampling."""
        ...

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """See `Drafter.set_pages`."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """Writes the keys and values of tokens of the text that there is; see `SlotOpening`."""
        ...

    def prefill_last(self, slot: int, tokens: Sequence[int], offset: int) -> Pending:
        """Prefills the prompt's last tokens and draws the first token, in row 0."""
        ...

    def forward(
        self, pending: Any, lengths: Int32[np.ndarray, "B"], drafted: Drafted | None = None
    ) -> Any:
        """Runs each row's pending token [B] at position `lengths` and the proposed ones after it.

        Args:
          pending: int32, or the `bonus` of a round that was not read yet.

        Returns: the logits, for `accept`.
        """
        ...

    def accept(self, logits: Any, proposal: Any = None) -> Pending:
        """Verifies what `forward` has run; without a proposal, draws the token after the pending
        one."""
        ...

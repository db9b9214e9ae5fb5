"""Protocols of the roles: pure host types, so that tests can give the engine fakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int32

from ssd_jax.roles.handles import LogitsHandle, ProposalHandle, TokenArray
from ssd_jax.roles.records import (
    Absence,
    BranchTokens,
    DraftBatch,
    Drafted,
    DraftSetup,
    ExpansionRequest,
    Masks,
    Outcomes,
    ProposedTokens,
    RecordRequest,
    Row,
    SlotOpening,
    TopLogprobs,
)


class Pending(Protocol):
    """The outcomes of a dispatched program."""

    @property
    def bonus(self) -> TokenArray:
        """The bonus tokens [B], which may still be computing: the pending ones of the next round.

        `Target.forward` takes them unread.
        """
        ...

    def read(self) -> Outcomes:
        """Waits for the outcomes."""
        ...

    def ready(self) -> bool:
        """Whether `read` would return without a wait."""
        ...


class PendingLogprobs(Protocol):
    """Log-probabilities of T tokens that a program computes."""

    def read(self) -> TopLogprobs:
        """Waits for them, in one row: [1, T]."""
        ...


class Drafter(Protocol):
    """The draft role: proposes tokens for the target to verify.

    Attributes:
      k: most tokens of a proposal.
      on_device: whether it keeps busy the devices that it shares with the target.
      timed: whether lengths of its proposals depend on time, or on other requests, where sampled
        texts depend on lengths, as `sampling/rules.py` says. See `occurrences`.
      timed_in_turn: the same of proposals for requests without branches, in mode ssd.
      asks_first: whether `speculate` is called before the target's forward is dispatched, because
        it only sends a message, which would otherwise wait for cores that the target uses.
      branches: whether it prepares branches, as mode ssd does; see `DraftBatch.branches`.
    """

    k: int
    branches: bool = False
    on_device: bool = False
    timed: bool = False
    timed_in_turn: bool = False
    asks_first: bool = False

    def open(self, opening: SlotOpening) -> None:
        """Empties a slot for a new request."""

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Gives a slot more pages behind those of its opening; `pages` are all its pages."""

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """Takes tokens of the text so far, at most the target's `max_chunk` at a time.

        Which of them need no run, and which are output, is in `SlotOpening.reused` and `prompt`. It
        is called again, for tokens behind the last proposal, before the proposal of a round that
        follows rounds without the drafter. `last` ends a text: its last token is the prompt's, or
        the pending one.
        """

    def gather(self, until: Callable[[], bool]) -> None:
        """Takes what was speculated, if anything, before the outcome is read.

        It waits no longer than `until` the outcome is there.
        """

    def propose(self, batch: DraftBatch) -> Drafted:
        """Proposes for these rows; L is 0 in all others."""
        ...

    def speculate(self) -> None:
        """Works ahead, if this drafter does.

        Called in every step, after the target's forward, if any, was dispatched, or just before
        that if it `asks_first`.
        """

    def proposal(self) -> ProposalHandle:
        """The proposal that `propose` made.

        Waits for each q that is still on its way. Called once a round, after `speculate`; of a
        drafter of point masses, which is wrapped in a `HostDrafter`, it is not asked for.
        """
        raise TypeError(f"{type(self).__name__} gives no q")


class RecordAnswer(Protocol):
    """What a draft answers to a `RecordRequest`; no part of it waits for the parts behind."""

    def lengths(self) -> Row:
        """Waits for tokens drafted just in time, and returns their number a slot.

        That is `RecordRequest.drafts`, or 0 where the draft did not answer.
        """
        ...

    def tokens(self) -> TokenArray:
        """Tokens of all records [B, K], known after `lengths` or on their way."""
        ...

    def parents(self) -> TokenArray | None:
        """The trees that the tokens are [B, m], known as these are; None where they are chains."""
        return None

    def confidence(self) -> Int32[np.ndarray, "B K"]:
        """Waits for the draft's confidence in tokens drafted just in time; -1 means unknown."""
        ...

    def proposal(self) -> ProposalHandle:
        """The records' proposals; waits for each q that is still on its way."""
        ...


class ExpansionAnswer(Protocol):
    """What a draft answers to an `ExpansionRequest`."""

    def branches(
        self, forwards: int, until: Callable[[], bool] | None = None
    ) -> BranchTokens | Absence | None:
        """Waits until that many forwards have made the branches, or returns why there are none.

        It may be called again for more forwards; it returns the same object if nothing has come
        since.

        Args:
          until: once it is true, ends the wait with None: the branches may still come.
        """
        ...


class BranchingDraft(Protocol):
    """A draft that speculates for several verification outcomes at once.

    It holds a record of each slot, which is the speculation that the target verifies, and branches
    of the record. A round asks it twice: for new records, and to expand them. The same slots,
    records and branches are meant wherever the draft runs: in this process, on other devices, in
    a worker.

    Attributes:
      slots: rows of every call.
      k: most tokens of a record or branch; of a path, where they are trees.
      branches: M, most branches a slot.
      nodes: of a tree; 0 where records and branches are chains.
    """

    slots: int
    k: int
    branches: int
    nodes: int = 0

    def open(self, opening: SlotOpening) -> None:
        """Sets a slot's sampling."""
        ...

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Gives a slot more pages behind those of its opening; `pages` are all its pages."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """Takes tokens of the text so far, including the last one, as `Drafter.prefill` does."""
        ...

    def record(self, request: RecordRequest) -> RecordAnswer:
        """Gives slots new records, and drafts tokens just in time; does not wait."""
        ...

    def expand(self, request: ExpansionRequest) -> ExpansionAnswer:
        """Branches off every record; does not wait. The answer to the last `record` stays valid."""
        ...

    def close(self) -> None:
        """Ends the draft."""
        ...


DraftFactory = Callable[[DraftSetup], Drafter | BranchingDraft]
"""Makes the draft of an engine: a `Drafter` for mode sd, a `BranchingDraft` for mode ssd."""


class Target(Protocol):
    """The target role: slots, and programs that are dispatched without waiting.

    Attributes:
      slots: rows of a batched forward.
      context: most positions of a sequence, prompt and output together.
      max_chunk: most prompt tokens that one prefill runs.
    """

    slots: int
    context: int
    max_chunk: int

    def open(self, opening: SlotOpening) -> None:
        """Sets a slot's sampling."""
        ...

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Gives a slot more pages behind those of its opening; `pages` are all its pages."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """Writes the keys and values of tokens of the text so far, but those that are reused."""
        ...

    def prefill_last(
        self, slot: int, tokens: Sequence[int], offset: int, masks: Masks | None = None
    ) -> Pending:
        """Prefills the prompt's last tokens and draws the first token, in row 0.

        Args:
          masks: [1, 1, mask], of a request with a grammar.
        """
        ...

    def score(self, slot: int, tokens: Sequence[int]) -> PendingLogprobs:
        """Log-probabilities of the tokens behind the first ones of the prefill just before.

        The slot's request asks for `prompt_logprobs`. They are the model's own: a prompt is not
        sampled.
        """
        ...

    def forward(
        self, pending: TokenArray, lengths: Row, drafted: Drafted | None = None
    ) -> LogitsHandle:
        """Runs each row's pending token [B] at position `lengths`, then the proposed tokens.

        Args:
          pending: int32, or the `bonus` of a round that was not read yet.

        Returns: the logits, for `accept`.
        """
        ...

    def read_tokens(self, drafted: Drafted) -> ProposedTokens:
        """Waits for the proposed tokens of the last `forward`, for masks of them."""
        ...

    def accept(
        self,
        logits: LogitsHandle,
        proposal: ProposalHandle | None = None,
        masks: Masks | None = None,
    ) -> Pending:
        """Verifies what `forward` has run.

        Without a proposal it draws the token after the pending one. The programs for masks must
        have been loaded.

        Args:
          masks: of a round in which a request has a grammar; those of positions that the proposal
            does not reach may be left out at the end.
        """
        ...

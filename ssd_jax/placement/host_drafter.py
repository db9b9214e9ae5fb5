"""A drafter of mode sd that works on the host: its proposals are checked, and sent as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from typing_extensions import override

from ssd_jax.errors import InputError
from ssd_jax.placement.host_proposals import DraftedTokens, HostProposals
from ssd_jax.roles.protocols import Drafter
from ssd_jax.roles.records import DraftBatch, Drafted, DraftSetup, Row
from ssd_jax.sampling.confidence import EDGES, UNKNOWN
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.system import notices


class AnswerChecks:
    """Checks of what a draft answers, before any of it reaches the target.

    Args:
      name: of the draft, for errors.
      setup: what it was made for.
    """

    def __init__(self, name: str, setup: DraftSetup) -> None:
        self._name, self._setup = name, setup

    def refuse(self, problem: str) -> NoReturn:
        """Raises: InputError: always."""
        raise InputError(f"draft {self._name}: {problem}")

    def array(self, name: str, value: Any, shape: Sequence[int], kind: str = "iu") -> np.ndarray:
        """An array of this shape on the host; by default of integers.

        Raises:
          InputError: it is anything else.
        """
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):
            self.refuse(f"{name} is no array: {value!r}")
        if array.dtype.kind not in kind:
            kind_name = "integers" if kind == "iu" else "numbers"
            self.refuse(f"{name} has the dtype {array.dtype}, and must have {kind_name}")
        if array.shape != tuple(shape):
            self.refuse(f"{name} has the shape {array.shape}, and must have {tuple(shape)}")
        return array

    def lengths(self, name: str, value: Any, limits: np.ndarray) -> Row:
        """Numbers of tokens, each at most as many as these.

        Raises:
          InputError: they are anything else.
        """
        lengths = self.array(name, value, limits.shape)
        wrong = np.argwhere((lengths < 0) | (lengths > limits))
        if len(wrong):
            index = tuple(wrong[0].tolist())
            self.refuse(
                f"{name}{[*index]} is {lengths[index]}, and 0 to {limits[index]} is possible"
            )
        return lengths.astype(np.int32)

    def tokens(self, name: str, value: Any, lengths: np.ndarray) -> np.ndarray:
        """Tokens [..., K], of which the first ones are used; the others become 0.

        Raises:
          InputError: a token is none of the ids, or they are no such array.
        """
        k, ids = self._setup.k, self._setup.ids
        tokens = self.array(name, value, (*lengths.shape, k))
        is_used = np.arange(k) < lengths[..., None]
        wrong = np.argwhere(is_used & ((tokens < 0) | (tokens >= ids)))
        if len(wrong):
            index = tuple(wrong[0].tolist())
            self.refuse(f"{name}{[*index]} is {tokens[index]}, and ids are 0 to {ids - 1}")
        return np.where(is_used, tokens, 0).astype(np.int32)

    def classes(self, name: str, value: Any, shape: Sequence[int]) -> np.ndarray:
        """Classes of confidence.

        Raises:
          InputError: they are anything else.
        """
        classes = self.array(name, value, shape)
        if ((classes < UNKNOWN) | (classes > len(EDGES))).any():
            self.refuse(f"{name} must be {UNKNOWN} (unknown), or classes 0 to {len(EDGES)}")
        return classes.astype(np.int32)

    def take_q(
        self, proposals: HostProposals, slots: Sequence[int], read_proposal: Callable[[], Any]
    ) -> None:
        """Takes the q of these slots' tokens, which stay point masses where it is malformed.

        Args:
          read_proposal: returns the draft's proposal, with `support` and `q` [B, K, N].

        Raises:
          InputError: these are no such arrays.
        """
        answer, k, support_limit = read_proposal(), self._setup.k, self._setup.support
        ids, q = getattr(answer, "support", None), getattr(answer, "q", None)
        num_ids = getattr(ids, "shape", (0,))[-1]
        if not 1 <= num_ids <= support_limit:
            self.refuse(
                f"support must have the shape {(self._setup.slots, k, support_limit)}, or fewer ids"
            )
        shape = self._setup.slots, k, num_ids
        ids, q = self.array("support", ids, shape), self.array("q", q, shape, "f")
        rows, width = np.array(slots, np.int32), len(proposals.tokens[0])
        support = np.full((len(rows), width, support_limit), -1, np.int32)
        probs = np.zeros(support.shape, np.float32)
        inside = np.s_[:, :k, :num_ids]
        support[inside] = np.clip(ids[rows], -1, self._setup.ids)
        probs[inside] = q[rows]
        lengths, tokens = proposals.lengths[rows], proposals.tokens[rows]
        drafted = DraftedTokens(rows, lengths, tokens, rows, support, probs)
        if proposals.put_q(rows, drafted):
            notices.warn_once(
                [
                    f"draft {self._name}: a q is no distribution that gives its token; from there "
                    "on a proposal's tokens are verified as point masses"
                ]
            )


class HostDrafter(Drafter):
    """A drafter whose tokens are point masses, unless it draws them from the q that it gives.

    Args:
      drafter: what proposes.
      setup: what it was made for.
      name: of the draft, for errors.
      width: tokens that proposals have room for, at least K.
      draws_from_q: each token is drawn from the q that `drafter.proposal` gives, by noise that is
        independent of the target's.
    """

    def __init__(
        self,
        drafter: Drafter,
        setup: DraftSetup,
        *,
        name: str,
        width: int,
        draws_from_q: bool = False,
    ) -> None:
        self.k, self.on_device = setup.k, drafter.on_device
        self.timed, self.asks_first = drafter.timed, drafter.asks_first
        self.open, self.set_pages = drafter.open, drafter.set_pages
        self.prefill, self.gather = drafter.prefill, drafter.gather
        self.speculate = drafter.speculate
        self._drafter, self._setup = drafter, setup
        self._checks = AnswerChecks(name, setup)
        self._draws_from_q = draws_from_q and setup.support > 1
        self._slots: list[int] = []
        self._proposals = HostProposals(setup.slots, width, setup.support, setup.ids)

    @override
    def propose(self, batch: DraftBatch) -> Drafted:
        """Proposes what the drafter does.

        Raises:
          InputError: that is malformed.
        """
        drafted, checks = self._drafter.propose(batch), self._checks
        if not isinstance(drafted, Drafted):
            checks.refuse(f"propose returned {drafted!r}, and must return a Drafted")
        lengths = checks.lengths("Drafted.lengths", drafted.lengths, batch.limit)
        tokens = np.zeros_like(self._proposals.tokens)
        tokens[:, : self.k] = checks.tokens("Drafted.tokens", drafted.tokens, lengths)
        self._slots = batch.slots
        self._proposals.put(tokens, lengths)
        return Drafted(self._proposals.lengths, self._proposals.tokens)

    @override
    def proposal(self) -> Proposal:
        if self._draws_from_q:
            self._checks.take_q(self._proposals, self._slots, self._drafter.proposal)
        return self._proposals.proposal()

"""A scripted target and drafter, and a toy text decoder: an `Engine` without JAX and weights.

fake = FakeTarget(lambda prompt_ids, position: 97 + position % 26)
engine = Engine(fake, Letters, frozenset(), drafter=FakeDrafter(...))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

import numpy as np

from ssd_jax.engine.request import CompletionOutput, FinishReason, LengthLimit, RequestOutput
from ssd_jax.engine.request_metrics import RequestMetrics
from ssd_jax.engine.requests.metrics import empty
from ssd_jax.roles.records import IDLE, DraftBatch, Drafted, Outcomes, SlotOpening, TopLogprobs
from ssd_jax.testing.by_row import rows_of


class Ready:
    """Outcomes that are already available, one (accepted tokens..., bonus) a row."""

    def __init__(self, emitted: Sequence[Sequence[int]]) -> None:
        tokens = np.zeros((len(emitted), max(map(len, emitted))), np.int32)
        for row, ids in enumerate(emitted):
            tokens[row, : len(ids)] = ids
        self.bonus = np.array([ids[-1] for ids in emitted], np.int32)
        self._outcomes = Outcomes(np.array([len(ids) - 1 for ids in emitted], np.int32), tokens)

    def ready(self) -> bool:
        return True

    def read(self) -> Outcomes:
        return self._outcomes


def pair_score(before: int, token: int) -> float:
    """The log-probability that `FakeTarget` gives a prompt's token behind another."""
    return -float(1000 * before + token)


class Scored:
    """Log-probabilities that are already available; no token has likelier ones beside it."""

    def __init__(self, scores: Sequence[float]) -> None:
        nothing = np.zeros((1, len(scores), 0))
        chosen = np.array([scores], np.float32)
        self._log = TopLogprobs(chosen, nothing.astype(np.int32), nothing.astype(np.float32))

    def read(self) -> TopLogprobs:
        return self._log


class FakeTarget:
    """Continues each prompt by `script(prompt_ids, position)`; keeps what a device would hold.

    Records every position that a token is written to, so that reading a position that was not
    written, or was overwritten by another request, fails at once.
    """

    def __init__(
        self,
        script: Callable[[Sequence[int], int], int],
        *,
        slots: int = 2,
        context: int = 64,
        max_chunk: int = 4,
    ) -> None:
        self.slots, self.context, self.max_chunk = slots, context, max_chunk
        self._script = script
        self._pages = [[-1] * context for _ in range(slots)]
        self._prefilled: list[list[int]] = [[] for _ in range(slots)]
        self._reused, self._prompt_ends = [0] * slots, [0] * slots
        self.pages: dict[int, tuple[int, ...]] = {}
        self.opened: list[SlotOpening] = []
        self.calls: list[str] = []

    def open(self, opening: SlotOpening) -> None:
        self._prefilled[opening.slot], self._prompt_ends[opening.slot] = [], opening.prompt
        self._reused[opening.slot] = opening.reused
        self.pages[opening.slot] = tuple(opening.pages)
        self.opened.append(opening)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        pages_before = self.pages[slot]
        assert len(pages) > len(pages_before)
        assert tuple(pages[: len(pages_before)]) == pages_before
        self.pages[slot] = tuple(pages)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        assert 0 < len(tokens) - max(self._reused[slot] - offset, 0) <= self.max_chunk
        assert offset == len(self._prefilled[slot])
        self._prefilled[slot] += tokens
        self._chunk = slot, offset
        self._pages[slot][offset : offset + len(tokens)] = tokens
        self.calls.append("prefill")

    def prefill_last(self, slot: int, tokens: Sequence[int], offset: int) -> Ready:
        self.prefill(slot, tokens, offset)
        prompt = self._prefilled[slot]
        return Ready([[self._script(prompt, len(prompt))]])

    def score(self, slot: int, tokens: Sequence[int]) -> Scored:
        """Scores, by `pair_score`, of the tokens behind those of the prefill just before."""
        assert self._chunk[0] == slot
        before = self._prefilled[slot][self._chunk[1] :]
        assert 0 < len(tokens) <= len(before)
        self.calls.append("score")
        return Scored([pair_score(*pair) for pair in zip(before, tokens, strict=False)])

    def forward(
        self, tokens: np.ndarray, lengths: np.ndarray, drafted: Drafted | None = None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The emitted tokens, and the proposed tokens."""
        assert tokens.shape == lengths.shape == (self.slots,)
        self.calls.append("forward")
        given: list[list[int]] = [[]] * self.slots
        emitted: list[list[int]] = [[0]] * self.slots
        for slot, length in enumerate(lengths):
            if length == IDLE:
                continue
            prompt = self._prefilled[slot][: self._prompt_ends[slot]]
            self._pages[slot][length] = tokens[slot]
            expected = prompt + [self._script(prompt, at) for at in range(len(prompt), length + 1)]
            assert self._pages[slot][: length + 1] == expected
            if drafted is not None:
                given[slot] = np.asarray(drafted.tokens)[slot, : drafted.lengths[slot]].tolist()
            self._pages[slot][length + 1 : length + 1 + len(given[slot])] = given[slot]
            assert len(self._pages[slot]) == self.context, "a token was written past the context"
            emitted[slot] = self._verify(prompt, length + 1, given[slot])
        return emitted, given

    def accept(
        self, logits: tuple[list[list[int]], list[list[int]]], proposal: Any = None
    ) -> Ready:
        emitted, given = logits
        for slot, tokens in enumerate(given):
            assert not tokens or proposal.tokens[slot, : len(tokens)].tolist() == tokens
        return Ready(emitted)

    def _verify(self, prompt: list[int], position: int, proposed: Sequence[int]) -> list[int]:
        emitted = []
        for token in [*proposed, None]:
            emitted.append(self._script(prompt, position + len(emitted)))
            if token != emitted[-1]:
                break
        return emitted


class FakeDrafter:
    """Proposes the script's own tokens, spoilt where `wrong(position)` says so.

    It keeps each slot's tokens and checks that new ones follow without a gap.
    """

    on_device, timed, asks_first, branches = False, False, False, False

    def __init__(
        self,
        script: Callable[[Sequence[int], int], int],
        *,
        k: int = 3,
        slots: int = 2,
        wrong: Callable[[int], bool] = lambda position: False,
        length: Callable[[int], int] = lambda position: 16,
    ) -> None:
        self.k, self._slots = k, slots
        self._script, self._wrong, self._length = script, wrong, length
        self._texts: list[list[int]] = [[] for _ in range(slots)]
        self._prompts, self._prompt_ends = [0] * slots, [0] * slots
        self._ended = [False] * slots  # whether the text was said to end where it does
        self.limits: list[int] = []
        self.speculated = 0

    def open(self, opening: SlotOpening) -> None:
        self._texts[opening.slot], self._prompt_ends[opening.slot] = [], opening.prompt

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        pass

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        assert offset == len(self._texts[slot])
        self._texts[slot] += tokens
        self._prompts[slot], self._ended[slot] = (
            min(len(self._texts[slot]), self._prompt_ends[slot]),
            last,
        )
        if last and len(self._texts[slot]) > self._prompt_ends[slot]:
            del self._texts[slot][-1]  # the first round repeats the pending token

    def gather(self, until: Callable[[], bool]) -> None:
        pass

    def speculate(self) -> None:
        self.speculated += 1

    def proposal(self) -> Drafted:
        """The proposal, with tokens and lengths alone."""
        return self._drafted

    def propose(self, batch: DraftBatch) -> Drafted:
        lengths = np.zeros(self._slots, np.int32)
        tokens = np.zeros((self._slots, self.k), np.int32)
        for row in rows_of(batch):
            text = self._texts[row.slot]
            assert self._ended[row.slot]
            text += row.committed
            assert row.position == len(text) - 1
            assert batch.pending[row.slot] == text[-1]
            assert 1 <= row.limit <= self.k
            self.limits.append(row.limit)
            prompt = text[: self._prompts[row.slot]]
            begin, length = len(text), min(row.limit, self._length(len(text)))
            for position in range(begin, begin + length):
                right = self._script(prompt, position)
                tokens[row.slot, position - begin] = right + self._wrong(position)
            lengths[row.slot] = length
        self._drafted = Drafted(lengths, tokens)
        return self._drafted


def finished(
    text: str = "so",
    reason: FinishReason = "stop",
    *,
    index: int = 0,
    token_ids: Sequence[int] = (5, 6),
    limit: LengthLimit | None = None,
    **metrics: Any,
) -> RequestOutput:
    """The output of a request that has ended, with these metrics."""
    found = CompletionOutput(
        prompt_index=index,
        seed=0,
        token_ids=[*token_ids],
        text=text,
        finish_reason=reason,
        limit=limit,
        metrics=cast("RequestMetrics", empty() | metrics),
    )
    return RequestOutput(request_id=index, prompt=None, prompt_token_ids=[1], outputs=[found])


class Letters:
    """Token id -> a character, whatever precedes it; ids below 32 are special: <5>."""

    def __init__(
        self, _after: int = 0, *, skip_special: bool = True, visible_ids: Collection[int] = ()
    ) -> None:
        self._skip, self._visible_ids = skip_special, visible_ids

    def push(self, ids: Iterable[int]) -> str:
        return "".join(map(self._text, ids))

    def _text(self, token: int) -> str:
        if token >= 32:
            return chr(token)
        return "" if self._skip and token not in self._visible_ids else f"<{token}>"

    def flush(self) -> str:
        return ""


class Silent(Letters):
    """Token id -> no text."""

    def push(self, ids: Iterable[int]) -> str:
        del ids
        return ""


class Clock:
    """Advances by one second each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now

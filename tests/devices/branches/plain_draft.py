"""What a draft should say: every text is run from its start, and its laws are taken in NumPy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.kernels.noise import gumbel_of
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.sampling import keys
from ssd_jax.sampling.keys import Purpose
from ssd_jax.testing import tiny
from tests.devices.branches.rounds import Request, layered
from tests.models.golden import FLOAT32, Runner, parameters
from tests.sampling.reference import next_law

_ROWS, _LENGTH = 24, 144


class Run(NamedTuple):
    """A text's logits [T, ids] and its keys and values [layers, heads, T, 2 D]."""

    logits: np.ndarray
    kv: np.ndarray


class Plain:
    """A model without slots, branches or records."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        model = FunctionalModel(checkpoint.config, FLOAT32)
        weights = parameters(checkpoint, model)
        self._run = Runner(model, weights, slots=_ROWS, context=_LENGTH)

    def __call__(self, texts: Sequence[Sequence[int]]) -> list[Run]:
        """Runs texts, all of each at once."""
        runs = []
        for begin in range(0, len(texts), _ROWS):
            part = texts[begin : begin + _ROWS]
            tokens = np.zeros((_ROWS, _LENGTH), np.int32)
            for row, text in enumerate(part):
                tokens[row, : len(text)] = text
            logits = self._run(tokens)
            kv = layered(self._run.pages, _ROWS)
            for row, text in enumerate(part):
                size = len(text)
                runs.append(Run(logits[row, :size, : tiny.TOKENS], kv[:, row, :, :size]))
        return runs


@dataclasses.dataclass(frozen=True)
class Speculation:
    """One row of a record or of branches.

    Attributes:
      request, index: whose text it continues, as the draft was told.
      text: up to the pending token.
      tokens: L of them.
      support, q: [L, N]; None where the tokens were not drawn.
      candidates: [L, W].
    """

    request: Request
    index: int
    text: tuple[int, ...]
    tokens: tuple[int, ...]
    support: np.ndarray | None
    q: np.ndarray | None
    candidates: np.ndarray

    @classmethod
    def of(cls, record, row: int, request: Request, index: int, text, *, drawn=True):
        """Row `row` of a record that follows a text."""
        length = int(record.proposal.length[row])
        return cls(
            request,
            index,
            tuple(text),
            tuple(record.proposal.tokens[row, :length].tolist()),
            record.proposal.support[row, :length] if drawn else None,
            record.proposal.q[row, :length] if drawn else None,
            record.candidates[row, :length],
        )

    @property
    def sequence(self) -> tuple[int, ...]:
        """The text with the proposed tokens."""
        return (*self.text, *self.tokens)


def allowed(logits: np.ndarray, request: Request, text: Sequence[int]) -> np.ndarray:
    """Log-probabilities [ids] after a text, before temperature and filters."""
    plain = dataclasses.replace(request.params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    with np.errstate(divide="ignore"):
        return np.log(_law(logits, dataclasses.replace(request, params=plain), text))


def assert_likeliest(ids: np.ndarray, scores: np.ndarray) -> None:
    """These are different ids with the largest scores in order, up to rounding."""
    assert len(set(ids.tolist())) == len(ids)
    assert (ids >= 0).all()
    np.testing.assert_allclose(scores[ids], np.sort(scores)[::-1][: len(ids)], atol=2e-4)


def assert_as_plain(one: Speculation, run: Run, *, lowered=None, c: float = 1.0) -> None:
    """Candidates, laws and draws of a speculation follow from a run of its whole text.

    Args:
      lowered: D of Saguaro sampling for each token.
    """
    for step, token in enumerate(one.tokens):
        before = (*one.text, *one.tokens[:step])
        logits, w = run.logits[len(before) - 1], one.candidates[step]
        assert_likeliest(w, allowed(logits, one.request, before))
        if one.support is None or one.q is None:
            continue
        ids, q = one.support[step], one.q[step]
        present = ids >= 0
        if one.request.params.temperature == 0:
            assert token == w[0] == ids[0]
            assert present.sum() == q[0] == q.sum() == 1
            continue
        law = _law(logits, one.request, before)
        assert present.sum() == min(len(ids), np.count_nonzero(law))
        with np.errstate(divide="ignore"):
            assert_likeliest(ids[present], np.log(law))
        expected = law[ids[present]]
        inside = np.isin(ids[present], w[: 0 if lowered is None else lowered[step]])
        if not inside.all():
            expected = np.where(inside, c * expected, expected)
        np.testing.assert_allclose(q[present], expected / expected.sum(), rtol=2e-3, atol=1e-5)
        assert not q[~present].any()
        at = (len(one.text) - 1, step, Purpose.DRAFT)
        assert token == _drawn(q, ids, one, at)


def assert_coupled(one: Speculation, run: Run) -> None:
    """`assert_as_plain` of tokens drawn with the target's noise, of the whole law."""
    for step, token in enumerate(one.tokens):
        before = (*one.text, *one.tokens[:step])
        logits, w = run.logits[len(before) - 1], one.candidates[step]
        assert_likeliest(w, allowed(logits, one.request, before))
        if one.support is None:
            continue
        assert one.support[step] == token
        law = _law(logits, one.request, before)
        at = (0, len(before), Purpose.TOKEN)
        assert token == _drawn(law, np.arange(len(law)), one, at)


def assert_foreseen(
    ids: np.ndarray, logits: np.ndarray, one: Speculation, before: int, *, without: int | None
) -> None:
    """These are the first bonus tokens in the order of the draft's law and the round's noise.

    Args:
      logits: after the text and `before` proposed tokens.
      without: the proposed token there, which cannot be the bonus token.
    """
    text = (*one.text, *one.tokens[:before])
    law = _law(logits, one.request, text)
    at = (len(one.text) - 1, len(text), Purpose.BONUS)
    with np.errstate(divide="ignore"):
        drawn = np.log(law) + _noise(one, at, np.arange(len(law)))
    behind = allowed(logits, one.request, text) - 1000
    scores = np.where(law > 0, drawn, behind)
    if without is not None:
        scores[without] = -np.inf
    assert_likeliest(ids, scores)


def _law(logits: np.ndarray, request: Request, text: Sequence[int]) -> np.ndarray:
    settings = dataclasses.asdict(request.params)
    bias = request.params.logit_bias
    settings |= {"bias_ids": [i for i, _ in bias], "bias": [value for _, value in bias]}
    settings |= {"banned": request.banned, "ban_before": request.ban_before}
    settings |= {"bad_word_ids": request.bad_word_ids}
    size = len(request.prompt)
    return next_law(logits, settings, text[:size], text[size:])


def _drawn(q: np.ndarray, ids: np.ndarray, one: Speculation, at: tuple[int, int, Purpose]) -> int:
    """The token that a law's noise draws, at (start, position, purpose)."""
    with np.errstate(divide="ignore"):
        return ids[(np.log(q) + _noise(one, at, ids)).argmax()]


def _noise(one: Speculation, at: tuple[int, int, Purpose], ids: np.ndarray) -> np.ndarray:
    """Gumbel noise of ids at (start, position, purpose)."""
    seed, (start, position, purpose) = one.request.params.seed, at
    words = np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32)
    where = (np.array([start], np.int32), np.array([position], np.int32))
    noise = _gumbel(words, np.array([one.index], np.uint32), *where, purpose, ids[None])[0]
    return np.asarray(noise)


@functools.partial(jax.jit, static_argnums=4)
def _gumbel(seed, request, start, position, purpose, ids):
    return gumbel_of(keys.derive(seed, request, start, position, purpose), jnp.asarray(ids))

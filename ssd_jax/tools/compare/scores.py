"""The target's scores at a fork: one pass over the prompt and the common output."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.devices.programs.sampling_rows import SamplingRows
from ssd_jax.engine.request import Request
from ssd_jax.engine.requests.sequence import stop_ids
from ssd_jax.kernels.distribution import sampled_probs
from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling import keys
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.params import MAX_BAD_WORD_TOKENS
from ssd_jax.sampling.penalties import History
from ssd_jax.sampling.probs import allowed_logits
from ssd_jax.sampling.settings import Sampling, sampling_of
from ssd_jax.system.stored_jit import StoredJit

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of the two tokens, as the target sees it.

    Attributes:
      score: allowed logit, plus temperature times noise where sampled; -inf if banned.
      may_stay: whether top-k, top-p and min-p keep it, or would if the logits were rounded in its
        favour.
      may_go: whether they drop it, or would if the logits were rounded against it.
    """

    score: float
    may_stay: bool
    may_go: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """The target's view of a fork: tokens `a` and `b`, and the `best` score of a drawable token."""

    a: Candidate
    b: Candidate
    best: float

    @property
    def margin(self) -> float:
        """Difference between the scores; infinite if a token is banned."""
        if math.isinf(self.a.score) or math.isinf(self.b.score):
            return math.inf
        return abs(self.a.score - self.b.score)


class ForkScorer:
    """Scores tokens with a loaded target by its compiled prefill, whatever the length.

    Args:
      llm: the model; its programs are used, its engines are not.
      limit: see `judges.LIMITS`.
    """

    def __init__(self, llm: LLM, limit: float) -> None:
        self._programs, self._parameters = llm.local.programs, list(llm.local.parameters)
        self._tokenizer, self._limit = llm.tokenizer, limit
        self._pages, self._history = self._programs.new_pages(), self._programs.new_history()

    def scores(self, request: Request, common: Sequence[int], a: int, b: int) -> Scores:
        """Scores of tokens `a` and `b` after the request's prompt and the common output."""
        vocab = self._programs.model.config.vocab_size
        position = len(request.prompt_ids) + len(common)
        results = _scores(
            self._logits([*request.prompt_ids, *common]),
            self._sampling(request),
            _history(request.prompt_ids, common, vocab),
            jnp.array([position]),
            jnp.array([a, b]),
            jnp.float32(self._limit / 2),
            tokens=self._tokenizer.size,
        )
        score, best, stay, go = (np.asarray(array) for array in results)
        candidate_a, candidate_b = (
            Candidate(score=float(score[i]), may_stay=bool(stay[i]), may_go=bool(go[i]))
            for i in range(2)
        )
        return Scores(a=candidate_a, b=candidate_b, best=float(best))

    def _logits(self, ids: Sequence[int]) -> jax.Array:
        """The target's logits [1, V] after some ids."""
        text = self._parameters, self._pages, self._history, self._programs.any_table()
        self._pages, self._history, logits, _ = self._programs.prefill(*text, 0, ids, 0)
        return logits

    def _sampling(self, request: Request) -> Sampling:
        """The request's settings as the engine has them."""
        params = request.params
        stops = sorted(stop_ids(request, self._tokenizer.eos_ids)) if params.min_tokens else []
        before = min(len(request.prompt_ids) + params.min_tokens, self._programs.context)
        rows = SamplingRows(1, self._programs.model.config.vocab_size)
        words = request.bad_word_ids
        rows.set(SlotOpening(0, params, request.index, stops, before, bad_word_ids=words))
        return rows.on_device()


def _history(prompt: Sequence[int], output: Sequence[int], vocab: int) -> History:
    in_prompt, output_counts = np.zeros((1, vocab), bool), np.zeros((1, vocab), np.int32)
    in_prompt[0, list(prompt)] = True
    np.add.at(output_counts[0], list(output), 1)
    recent = np.full((1, MAX_BAD_WORD_TOKENS - 1), -1, np.int32)
    last = list(output)[-recent.shape[1] :]
    recent[0, recent.shape[1] - len(last) :] = last
    return History(*map(jnp.asarray, (in_prompt, output_counts, recent)))


@functools.partial(StoredJit, static=("tokens",))
def _scores(
    logits: jax.Array,
    sampling: Sampling,
    history: History,
    position: jax.Array,
    pair: jax.Array,
    rounding: jax.Array,
    *,
    tokens: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Scores of a pair of tokens at one position; the best token has the highest score.

    Args:
      logits: [1, V] float32.
      sampling, history: of one row.
      position: [1] int32, of the token that the logits predict.
      rounding: how far a logit may be from its exact value.
      tokens: number of ids that exist.

    Returns: scores [2]; the best score of a token that may be drawn; [2] whether each may stay, and
      whether it may go (see `Candidate`).
    """
    allowed = allowed_logits(logits, sampling, position, lambda: history, tokens)
    where = (jnp.zeros_like(position), position)
    key = keys.derive(sampling.seed, sampling.request, *where, Purpose.TOKEN)
    # Times the temperature: log p + noise in units of logits, but for a constant of the row.
    noise = sampling.temperature[:, None] * keys.gumbel(key, allowed.shape[1])
    scores = (allowed + jnp.where(sampling.temperature[:, None] > 0, noise, 0.0))[0]

    # A filter keeps a token the sooner, the higher it is and the lower the tokens above it are; so
    # rounding favours it most, or least, if these move oppositely. First row: nothing moves.
    level = jnp.concatenate([jnp.zeros(1), jnp.repeat(allowed[0, pair], 2)])[:, None]
    move = rounding * jnp.array([0.0, 1.0, -1.0, 1.0, -1.0])[:, None]
    moved = allowed + jnp.where(allowed <= level, move, -move)
    rows = sampling_of(sampling, jnp.zeros(len(moved), jnp.int32))
    drawable = jnp.where(rows.temperature[:, None] > 0, sampled_probs(moved, rows) > 0, True)
    drawable &= moved > -jnp.inf
    best = jnp.max(jnp.where(drawable[0], scores, -jnp.inf))
    stay, go = drawable[jnp.array([1, 3]), pair], ~drawable[jnp.array([2, 4]), pair]
    return scores[pair], best, stay, go

"""Sums over every token that an engine says, which are martingales if it follows the law.

Whether a token lies in a set that was fixed before it was drawn, minus the set's probability under
the law then, has mean 0 whatever was said before. So the sums over tokens chosen by what is known
before they are drawn do, for any vocabulary and length of text: no law of whole texts is needed.

Of a token of a round this much is known before: whether the round follows a hit, its L, whether its
q got lost, and, by the token before it, that all before it were accepted. What was drafted is not:
given the proposed token, the emitted one does not follow p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ssd_jax import LLM, SamplingParams
from ssd_jax.engine.request import Request
from ssd_jax.engine.rounds.trace import RowTrace
from ssd_jax.roles.records import Drafted
from ssd_jax.sampling.proposal import as_point_mass_where
from ssd_jax.testing import tiny
from tests.fakes.instrument import instrument
from tests.models.golden import FLOAT32, runner
from tests.sampling.reference import next_law

ALPHA = 1e-6
"""Of one run with all its sums; some 30 runs, the slow ones included, are made."""
LENGTH = 24
PROMPTS = tuple(list(text) for text in (b"abcabc", b"xy xy ", b"0123.?", b"the th"))
# Few ids, so that the laws of all places are of the same ones, and more than there are branches.
_LETTERS = dict.fromkeys(range(97, 109), 25.0)
SETTINGS: dict[str, dict] = {
    "plain": {"temperature": 1.0},
    "top-k": {"temperature": 0.8, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.05},
    "penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
    },
    "bias": {"temperature": 1.0, "logit_bias": _LETTERS},
    "bias, frequency": {"temperature": 0.8, "logit_bias": _LETTERS, "frequency_penalty": 0.5},
    "bias, min_tokens": {
        "temperature": 1.0,
        "logit_bias": _LETTERS | {tiny.EOS: 24.0},
        "min_tokens": 4,
        "ignore_eos": False,
    },
}
FEW_IDS = tuple(name for name in SETTINGS if name.startswith("bias"))
_BATCH = 512
_TILTS = np.array([1.7**-step for step in range(9)])  # for sums of variance 40 to 200,000


class Rounds:
    """Rounds of each request of an engine, in order; see `trace.EngineTrace`."""

    def __init__(self) -> None:
        self.of: dict[int, list[RowTrace]] = {}

    def round(self, span: tuple[float, float], rows: Sequence[RowTrace]) -> None:
        for row in rows:
            self.of.setdefault(row.request, []).append(row)

    def prefill(self, *_: object) -> None: ...
    def draft(self, *_: object) -> None: ...
    def host(self, *_: object) -> None: ...
    def text(self, *_: object, **_more: object) -> None: ...


class SampledText(NamedTuple):
    """A request's text.

    Attributes:
      setting: its name.
      slot: that it was in; None where its first token was its last.
      known: what was known of each token before it was drawn, as names of sums.
    """

    request: Request
    setting: str
    slot: int | None
    tokens: list[int]
    known: list[list[str]]


def say(
    llm: LLM,
    count: int,
    *,
    mode: str | None = None,
    names: Sequence[str] = tuple(SETTINGS),
    length: int = LENGTH,
    seed: int = 11,
) -> list[SampledText]:
    """Texts of `count` requests of these settings and all prompts, through the public interface, in
    the order in which they took their slots."""
    rounds = llm.engine_of(mode or llm.mode)._log._trace = Rounds()
    asked = []
    for index in range(count):
        options = {"max_tokens": length, "ignore_eos": True, "seed": seed}
        options |= SETTINGS[names[index % len(names)]]
        prompt = PROMPTS[index // len(names) % len(PROMPTS)]
        asked.append(llm.request(prompt, SamplingParams(**options), index))
    # Shuffled, so that settings meet each other in the slots.
    asked = [asked[place] for place in np.random.default_rng(0).permutation(count)]
    found = {}
    for event in llm.run(asked, mode):
        if event.output is not None:
            found[event.prompt_index] = event.request_id, event.output.token_ids
    samples = []
    for request in asked:
        request_id, tokens = found[request.index]
        rows = rounds.of.get(request_id, [])
        known = [["the prompt"]]
        known += [_known(row, place) for row in rows for place in range(len(row.tokens))]
        assert tokens == [tokens[0], *(token for row in rows for token in row.tokens)]
        slot = rows[0].slot if rows else None
        samples.append(SampledText(request, names[request.index % len(names)], slot, tokens, known))
    return samples


def _known(row: RowTrace, place: int) -> list[str]:
    source, _, lost = (row.source or "no look-up").partition(" and ")
    if not row.L:
        where = "nothing proposed"
    elif place == row.L:
        where = "k = L"
    elif place:
        where = f"later after {source}"
    else:
        where = f"first after {source}"
    return [where, *([lost] if lost else [])]


def lose_q(drafter: Any, share: float, seed: int = 3) -> None:
    """Has a share of a drafter's q lost; rows are chosen before anything is drawn."""
    rng, lost = np.random.default_rng(seed), np.zeros(0, bool)

    def propose(drafted: Drafted) -> Drafted:
        nonlocal lost
        lost = rng.random(len(drafted.lengths)) < share
        sources = {
            slot: f"{source} and q lost" if lost[slot] and drafted.lengths[slot] else source
            for slot, source in drafted.sources.items()
        }
        return dataclasses.replace(drafted, sources=sources)

    instrument(drafter, change={"propose": propose, "proposal": lambda found: _lose(found, lost)})


_lose = jax.jit(as_point_mass_where)


class Sums(NamedTuple):
    """Martingales by name: their ends, the conditional variances of their steps added up, and how
    many steps they had."""

    names: list[tuple[str, str]]
    ends: np.ndarray
    variances: np.ndarray
    counts: np.ndarray

    @property
    def sigmas(self) -> np.ndarray:
        """Each is close to N(0, 1) if the law is followed and its variance is not small."""
        return self.ends / np.sqrt(np.maximum(self.variances, 1e-9))

    @property
    def p_value(self) -> float:
        """A bound of the probability of sums like these, at any number of tokens.

        exp(tilt * end - psi(tilt) * variance), psi(x) = e^x - 1 - x, is a supermartingale for steps
        below 1 (Bennett, Freedman), and so is the mean of any of them. Its end is below 1 / alpha
        with a probability of at least 1 - alpha (Ville).
        """
        room = np.expm1(_TILTS) - _TILTS
        both = np.stack([self.ends, -self.ends])[..., None]
        exponents = both * _TILTS - self.variances[:, None] * room
        most = exponents.max()
        return float(min(1.0, np.exp(-most) / np.mean(np.exp(exponents - most))))

    def worst(self, count: int = 5) -> list[tuple[str, str, float]]:
        order = np.argsort(-abs(self.sigmas))[:count]
        return [(*self.names[place], round(float(self.sigmas[place]), 1)) for place in order]

    def sees(self, sigmas: float) -> np.ndarray:
        """The change of each sum's mean step that is so many standard deviations."""
        return sigmas * np.sqrt(self.variances) / np.maximum(self.counts, 1)


def sums(
    samples: Sequence[SampledText], target: Path, draft: Path | None = None, **execution: Any
) -> Sums:
    """All sums over texts; the law is worked out from the checkpoints' own logits.

    Args:
      target, draft: checkpoints. The draft's law matters for what sums are made, not for their law.
      execution: how the target is run, if not in float32.
    """
    over, mates = _over(samples), _slot_mates(samples)
    of_target = _Forced(target, execution)
    of_draft = None if draft is None else _Forced(draft, {})
    names: list[str] = []
    ids = None  # the likeliest after the prompts alone: chosen before anything was drawn
    ends = variances = np.zeros(())
    done = 0
    for begin in range(0, len(samples), _BATCH):
        part = samples[begin : begin + _BATCH]
        p = of_target.laws(part)
        q = None if of_draft is None else of_draft.rough_laws(part)
        here = slice(done, done + len(p))
        done += len(p)
        if ids is None:
            first = np.cumsum([0, *(len(text.tokens) for text in part[:-1])])
            ids = np.argsort(-p[first].sum(axis=0))[:4]
        sets = dict(_sets(part, p, q, ids, mates[here]))
        names = [*sets]
        chosen = np.concatenate([text.tokens for text in part])
        inside = np.array([members[np.arange(len(p)), chosen] for members in sets.values()], float)
        mean = np.array([np.where(members, p, 0).sum(axis=1) for members in sets.values()])
        masks = np.array([mask[here] for mask in over.values()], float)
        ends = ends + masks @ (inside - mean).T
        variances = variances + masks @ (mean * (1 - mean)).T
    counts = np.repeat([mask.sum() for mask in over.values()], len(names))
    pairs = [(which, name) for which in over for name in names]
    return Sums(pairs, ends.ravel(), variances.ravel(), counts)


def _sets(samples: Sequence[SampledText], p, q, chosen: np.ndarray, mates: np.ndarray):
    """Names and members [n, V] of sets of tokens, each known before the token is drawn."""
    ids = np.arange(p.shape[1])
    likeliest = np.argsort(-p, axis=1, kind="stable")
    for rank in range(4):
        yield f"rank {rank} of p", likeliest[:, [rank]] == ids
    yield "impossible", p == 0
    for token in chosen:
        yield f"id {token}", np.broadcast_to(ids == token, p.shape)
    before = [text.tokens[:place] for text in samples for place in range(len(text.tokens))]
    last = np.array([text[-1] if text else -1 for text in before])
    yield "the last token again", last[:, None] == ids
    again = np.zeros(p.shape, bool)
    for row, text in enumerate(before):
        again[row, text] = True
    yield "any token again", again
    yield "as before in the slot", mates[:, None] == ids
    if q is not None:
        yield "q above p", q > p
        best = np.argsort(-q, axis=1, kind="stable")
        for rank in range(2):
            yield f"rank {rank} of q", best[:, [rank]] == ids


def _over(samples: Sequence[SampledText]) -> dict[str, np.ndarray]:
    """Which tokens [n] each sum is over, by what is known before they are drawn."""
    texts = [(text, place) for text in samples for place in range(len(text.tokens))]
    over = {"all": np.ones(len(texts), bool)}
    for kind in sorted({name for text in samples for known in text.known for name in known}):
        over[kind] = np.array([kind in text.known[place] for text, place in texts])
    for name in dict.fromkeys(text.setting for text in samples):
        over[name] = np.array([text.setting == name for text, _ in texts])
    for begin, end in ((1, 4), (4, 12), (12, LENGTH)):
        label = f"positions {begin} to {end - 1}"
        over[label] = np.array([begin <= place < end for _, place in texts])
    return over


def _slot_mates(samples: Sequence[SampledText]) -> np.ndarray:
    """What came at each position after the same token when the slot last had it there; -1 if never.

    Noise that is a slot's, and not a request's, repeats itself.
    """
    last: dict[tuple, int] = {}
    found = []
    for spoken in samples:
        text = [*spoken.request.prompt_ids, *spoken.tokens]
        for at in range(len(spoken.request.prompt_ids), len(text)):
            where = spoken.slot, at, text[at - 1]
            found.append(last.get(where, -1))
            last[where] = text[at]
    return np.array(found)


class _Forced:
    """A checkpoint, teacher-forced over texts."""

    def __init__(self, path: Path, execution: Mapping[str, Any]) -> None:
        execution = dataclasses.replace(FLOAT32, **execution)
        self._run = runner(path, slots=_BATCH, execution=execution)

    def laws(self, samples: Sequence[SampledText]) -> np.ndarray:
        """The law [n, V] of every token, by the slow reference."""
        rows, laws = iter(self.logits(samples)), []
        for text in samples:
            prompt, settings = text.request.prompt_ids, _as_rows(text)
            for place in range(len(text.tokens)):
                laws.append(next_law(next(rows), settings, prompt, text.tokens[:place]))
        return np.array(laws)

    def rough_laws(self, samples: Sequence[SampledText]) -> np.ndarray:
        """Laws [n, V] without penalties and truncation."""
        logits = self.logits(samples).astype(np.float64)
        ends = np.cumsum([len(text.tokens) for text in samples])
        for text, end in zip(samples, ends, strict=True):
            rows = logits[end - len(text.tokens) : end]
            for token, bias in SETTINGS[text.setting].get("logit_bias", {}).items():
                rows[:, token] += bias
            rows /= SETTINGS[text.setting]["temperature"]
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    def logits(self, samples: Sequence[SampledText]) -> np.ndarray:
        """Logits [n, V] before every token."""
        texts = np.zeros((_BATCH, max(map(len, PROMPTS)) + LENGTH), np.int32)
        for row, spoken in enumerate(samples):
            text = [*spoken.request.prompt_ids, *spoken.tokens]
            texts[row, : len(text)] = text
        logits, found = self._run(texts)[..., : tiny.TOKENS], []
        for row, spoken in enumerate(samples):
            first = len(spoken.request.prompt_ids) - 1
            found.append(logits[row, first : first + len(spoken.tokens)])
        return np.concatenate(found)


def _as_rows(text: SampledText) -> dict:
    """The settings as the slow reference takes them."""
    settings = dict(SETTINGS[text.setting])
    bias = settings.pop("logit_bias", {})
    settings |= {"bias_ids": tuple(bias), "bias": tuple(bias.values())}
    stops = (tiny.EOS, tiny.END_OF_TURN)
    return settings | {
        "banned": stops,
        "ban_before": len(text.request.prompt_ids) + settings.get("min_tokens", 0),
    }

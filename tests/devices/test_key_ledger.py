"""Every draw that a run consumes is the one that its own key gives, wherever the draft is.

No statistics: draws are worked out again on the host, from seed, index, start, position and
purpose, and from the q that was verified and the target's law. So whoever uses another key, a key
twice, or another q than it drew from says something else within a few tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from ssd_jax import LLM, SamplingParams
from ssd_jax.devices.branches.draft import BranchDraft
from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request
from ssd_jax.engine.requests.occurrences import derived
from ssd_jax.placement.process import server
from ssd_jax.placement.process.client import RemoteDraft
from ssd_jax.placement.process.connection import Connection
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.placement.process.worker_streams import WorkerStreams
from ssd_jax.roles.records import IDLE
from ssd_jax.sampling import keys
from ssd_jax.sampling.keys import Purpose
from ssd_jax.testing import tiny
from ssd_jax.wire.draft_spec import DraftSpec
from tests.fakes.paces import Patient
from tests.llm import law
from tests.llm.law import FEW_BRANCHES
from tests.loading.variation import varied
from tests.models.golden import our_logits
from tests.placement.process.serving import steady_streams
from tests.sampling.reference import next_law
from tests.selection import cases

NEAR = 1e-3  # what two floats may differ by, where a draw is too near to say

CONTEXT = 32
PROMPTS = [law.PROMPT[:size] for size in (10, 4, 7, 2, 9, 5)]
SETTINGS = [law.COMMON | {"temperature": 1.0, "top_k": 3}, law.SAMPLED["top-p, frequency"]]


class Row(NamedTuple):
    """A row of a round: what was verified, and what came of it."""

    name: tuple[int, int]
    prompt: list[int]
    output: list[int]  # before the round
    settings: dict
    length: int
    tokens: Any
    support: Any
    q: Any
    emitted: list[int]

    @property
    def start(self) -> int:
        return len(self.prompt) + len(self.output) - 1


class Noted:
    """A target, and the rounds of its sampled rows."""

    def __init__(self, target: Any) -> None:
        self._target, self.rows = target, []
        self._requests: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def open(self, opening) -> None:
        slot, params, index = opening.slot, opening.params, opening.index
        settings = {**SETTINGS[index % 2], "temperature": params.temperature}
        self._requests[slot] = ((params.seed, index), [], [], settings)
        self._target.open(opening)

    def prefill(self, slot, tokens, offset):
        self._requests[slot][1][offset:] = tokens
        self._target.prefill(slot, tokens, offset)

    def prefill_last(self, slot, tokens, offset):
        self._requests[slot][1][offset:] = tokens
        return self._read(self._target.prefill_last(slot, tokens, offset), {0: slot}, None)

    def forward(self, tokens, lengths, drafted=None):
        self._slots = {slot: slot for slot in np.flatnonzero(lengths != IDLE).tolist()}
        return self._target.forward(tokens, lengths, drafted)

    def accept(self, logits, proposal=None):
        pending = self._target.accept(logits, proposal)
        proposal = None if proposal is None else jax.tree.map(np.asarray, proposal)
        return self._read(pending, self._slots, proposal)

    def _read(self, pending, slots, proposal):
        def read():
            found = pending.read()
            for row, slot in slots.items():
                emitted = found.tokens[row, : found.accepted[row] + 1].tolist()
                name, prompt, output, settings = self._requests[slot]
                proposed = (np.zeros(0, int), np.zeros((0, 1)), np.zeros((0, 1)))
                length = 0
                if proposal is not None:
                    length = int(proposal.length[slot])
                    arrays = (proposal.tokens, proposal.support, proposal.q)
                    proposed = tuple(array[slot, :length] for array in arrays)
                self.rows.append(
                    Row(name, list(prompt), list(output), settings, length, *proposed, emitted)
                )
                output += emitted
            return found

        return SimpleNamespace(read=read, ready=pending.ready)


class Draw(NamedTuple):
    """A draw that was consumed.

    Attributes:
      weights: of every id; of an acceptance p(x) / q(x).
      token: that was drawn; of an acceptance whether x was accepted.
    """

    name: tuple[int, int]
    start: int
    position: int
    purpose: Purpose
    weights: Any
    token: int

    @property
    def key(self) -> tuple:
        return self[:4]


def consumed(rows: list[Row], target) -> list[Draw]:
    """The draws of some rounds."""
    draws = []
    for row, laws in zip(rows, laws_of(rows, target), strict=True):
        accepted = len(row.emitted) - 1
        for place in range(min(accepted + 1, row.length)):
            q, token = dense(row, place), int(row.tokens[place])
            draws.append(Draw(row.name, row.start, place, Purpose.DRAFT, q, token))
            odds, position = laws[place][token] / q[token], row.start + 1 + place
            passed = int(place < accepted)
            draws.append(Draw(row.name, row.start, position, Purpose.ACCEPT, odds, passed))
        left = laws[accepted]
        if accepted < row.length:
            left = np.maximum(left - dense(row, accepted), 0)
        position, bonus = row.start + 1 + accepted, row.emitted[-1]
        draws.append(Draw(row.name, row.start, position, Purpose.BONUS, left, bonus))
    return draws


def dense(row: Row, place: int) -> np.ndarray:
    q = np.zeros(tiny.TOKENS)
    used = row.support[place] >= 0
    q[row.support[place][used]] = row.q[place][used]
    return q


def laws_of(rows: list[Row], target) -> list[list[np.ndarray]]:
    """The target's laws after 0, 1, ... of each row's accepted tokens."""
    texts = {row.name: [*row.prompt, *row.output, *row.emitted] for row in rows}
    padded = np.array([text + [0] * (CONTEXT - len(text)) for text in texts.values()])
    logits = dict(zip(texts, our_logits(target, padded)[..., : tiny.TOKENS], strict=True))

    def laws(row: Row) -> list[np.ndarray]:
        settings, text = law.as_rows(row.settings), [*row.output, *row.emitted]
        ends = range(len(row.output), len(text))
        follow = logits[row.name][row.start : row.start + len(ends)]
        return [
            next_law(tokens, settings, row.prompt, text[:end])
            for tokens, end in zip(follow, ends, strict=True)
        ]

    return [laws(row) for row in rows]


def right(draws: list[Draw]) -> tuple[list[Draw], int]:
    """Those that are not what their keys give, and how many were too near to say."""
    wrong, near = [], 0
    for purpose in sorted({draw.purpose for draw in draws}):
        those = [draw for draw in draws if draw.purpose == purpose]
        seeds = [(seed & 0xFFFFFFFF, seed >> 32) for (seed, _), *_ in those]
        requests = jnp.array([request for (_, request), *_ in those], jnp.uint32)
        where = jnp.array([(start, position) for _, start, position, *_ in those], jnp.int32)
        key = keys.derive(jnp.array(seeds, jnp.uint32), requests, *where.T, purpose)
        weights = np.array([draw.weights for draw in those])
        if purpose == Purpose.ACCEPT:
            left = weights - np.asarray(keys.uniform(key))
            found, margin = left > 0, abs(left)
        else:
            with np.errstate(divide="ignore"):
                scores = np.log(weights) + np.asarray(keys.gumbel(key, tiny.TOKENS))
            found = scores.argmax(axis=1)
            last = np.sort(scores, axis=1)[:, -2:]
            margin = last[:, 1] - last[:, 0]
        near += int((margin <= NEAR).sum())
        drawn = np.array([draw.token for draw in those])
        wrong += [those[place] for place in np.flatnonzero((drawn != found) & (margin > NEAR))]
    return wrong, near


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return law.write_checkpoints(tmp_path_factory.mktemp("ledger"))


@pytest.fixture(scope="module")
def llm(checkpoints):
    return law.open_llm(checkpoints, "ssd", **FEW_BRANCHES)


@contextmanager
def remote(llm, session=DraftSession):
    """A draft behind a worker's server, in this process, with the programs that there are."""
    inline, drafting = llm.loaded.inline, llm.loaded.inline.branching()[0].base.drafting
    hello = DraftSpec(
        model="tiny",
        slots=llm.config.slots,
        context=llm.context,
        tokens=llm.tokenizer.size,
        drafting=drafting,
        budgets=(drafting.branches,),
        dtype="float32",
    )

    def draft():
        return BranchDraft(inline.branching(), inline.parameters())

    token = "secret"
    serving = server.serve(lambda called: session(hello, draft, called), hello, token)
    counters = Counter()
    streams = WorkerStreams(lambda: Connection(serving.address, hello, token, counters), counters)
    made = RemoteDraft(hello, streams, patience=120.0)
    try:
        with steady_streams():
            assert made.streams.wait_ready(60)
            yield made
    finally:
        made.close()
        serving.stop()


@contextmanager
def placed(llm, where, session=DraftSession):
    """Roles with the draft in a placement; whatever is to come is waited for.

    The fan-out looks at no confidence: a sub-mesh does not wait for that.
    """
    loaded = varied(llm.loaded, fan_out="measured")
    if where == "process":
        with remote(llm, session) as draft:
            worker = SimpleNamespace(draft=lambda _patience: draft)
            roles = dataclasses.replace(loaded, worker=worker).roles("ssd", llm.config.speculated)
            roles.drafter._waiting.pace = Patient()
            yield roles
        return
    placement = dataclasses.replace(llm.placement, kind=where)
    resolved = dataclasses.replace(loaded.resolved, placement=placement)
    roles = dataclasses.replace(loaded, resolved=resolved).roles("ssd", llm.config.speculated)
    if where == "submesh":
        roles.drafter._draft.patience = 120.0
    yield roles


FIRST = 10  # index of the first request: no slot has it
SEED = 2**40 + 7
AGAIN = derived(SEED, FIRST, 0, 1)


def request(place, prompt, size):
    params = SamplingParams(seed=SEED, max_tokens=size, ignore_eos=True, **SETTINGS[place % 2])
    return Request(prompt_ids=prompt, params=params, index=FIRST + place)


def run(llm, roles, count=99):
    """Requests that come and go, the first of which is asked for twice: outputs and rounds."""
    prompts = enumerate(PROMPTS[:count])
    asked = [request(place, prompt, 20 - 2 * place) for place, prompt in prompts]
    return answered(llm, roles, [*asked, asked[0]])


def answered(llm, roles, asked):
    """Outputs of requests, and the rounds."""
    target = Noted(roles.target)
    engine = Engine(
        target,
        llm.tokenizer.open_stream,
        llm.tokenizer.eos_ids,
        drafter=roles.drafter,
    )
    ids = [engine.add(request) for request in asked]
    found = {}
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                found[event.request_id] = event.output
    return [found[request_id] for request_id in ids], target.rows


@pytest.fixture(scope="module")
def played(llm):
    """`run` in a placement, once."""

    @functools.cache
    def play(where):
        with placed(llm, where) as roles:
            return run(llm, roles)

    return play


WHERE = pytest.mark.parametrize("where", cases(["inline", "submesh", "process"], "inline"))


@WHERE
def test_every_consumed_draw_has_a_key_of_its_own_and_is_what_it_gives(played, checkpoints, where):
    outputs, rows = played(where)
    draws = consumed(rows, checkpoints[0])
    wrong, near = right(draws)
    assert [draw.key for draw in wrong] == []
    assert near < len(draws) / 50
    assert min(Counter(draw.purpose for draw in draws).values()) > 30
    assert 0 < np.mean([output.metrics["hit_rate"] for output in outputs]) < 1
    keys = [draw.key for draw in draws]
    if where == "inline":  # the request that came again said the same
        keys = list(dict.fromkeys(keys))
    assert len(set(keys)) == len(keys)
    assert ((AGAIN, FIRST) in {draw.name for draw in draws}) == (where != "inline")


@WHERE
def test_sampled_text_of_the_same_rounds_is_the_same_in_every_placement(played, where):
    """All that is to come is waited for, so that there are no other rounds."""
    here, there = played("inline")[0], played(where)[0]
    assert [output.token_ids for output in here[:-1]] == [output.token_ids for output in there[:-1]]
    for name in ("hit_rate", "acceptance_histogram", "miss_causes"):
        assert [output.metrics[name] for output in here[:-1]] == [
            output.metrics[name] for output in there[:-1]
        ]
    assert (there[-1].token_ids == there[0].token_ids) == (where == "inline")


def laws_along(rows: list[Row], target) -> list[list[np.ndarray]]:
    """The target's laws after 0, 1, ... L of each row's proposed tokens."""
    texts = [[*row.prompt, *row.output, *row.tokens.tolist()] for row in rows]
    padded = np.array([text + [0] * (CONTEXT - len(text)) for text in texts])
    logits = our_logits(target, padded)[..., : tiny.TOKENS]

    def law_at(row: Row, logits: np.ndarray, place: int) -> np.ndarray:
        output = [*row.output, *row.tokens[:place].tolist()]
        settings = law.as_rows(row.settings)
        return next_law(logits[row.start + place], settings, row.prompt, output)

    return [
        [law_at(row, logits_of_row, place) for place in range(row.length + 1)]
        for row, logits_of_row in zip(rows, logits, strict=True)
    ]


def ends_by_block(row: Row, laws: list[np.ndarray]) -> tuple[int, int] | None:
    """(k, t*) of a row by the definition of block verification; None if too near to say."""
    q = [dense(row, place) for place in range(row.length)]
    c, k, margins = [1.0], 0, [1.0]
    for place, token in enumerate(row.tokens.tolist()):
        c.append(min(1.0, c[-1] * laws[place][token] / q[place][token]))
    for count in range(1, row.length + 1):
        h = c[count]
        if count < row.length and h < 1:
            surplus = np.maximum(c[count] * laws[count] - q[count], 0).sum()
            h = surplus / (surplus + 1 - c[count])
        u = float(keys.uniform(key_of(row, row.start + count, Purpose.ACCEPT))[0])
        margins.append(abs(u - h))
        k = count if u < h else k
    weights = laws[k] if k == row.length else np.maximum(c[k] * laws[k] - q[k], 0)
    noise = keys.gumbel(key_of(row, row.start + 1 + k, Purpose.BONUS), tiny.TOKENS)
    with np.errstate(divide="ignore"):
        scores = np.log(weights) + np.asarray(noise)[0]
    last = np.sort(scores)[-2:]
    near = min(*margins, last[1] - last[0]) <= NEAR
    return None if near else (k, int(scores.argmax()))


def key_of(row: Row, position: int, purpose: Purpose) -> keys.Key:
    (seed, request), start = row.name, row.start
    words = jnp.array([[seed & 0xFFFFFFFF, seed >> 32]], jnp.uint32)
    at = (jnp.array([at_position], jnp.int32) for at_position in (start, position))
    return keys.derive(words, jnp.array([request], jnp.uint32), *at, purpose)


@pytest.mark.parametrize("mode", cases(["sd", "ssd"], "sd"))
def test_block_verification_has_the_draws_of_its_keys_and_the_q_of_the_draft(checkpoints, mode):
    settings = {"slots": 4, "k": "3", "context": CONTEXT, "dtype": "float32", "verify": "block"}
    settings |= {"mode": mode, "proposal_support": "2", "compile_cache": "off"}
    if mode == "ssd":
        settings |= FEW_BRANCHES | {"draft_placement": "inline"}
    target, draft = map(str, checkpoints)
    with LLM(target, draft=draft, **settings) as llm:
        _, rows = run(llm, llm.loaded.roles(mode, 3))
    expected = [*map(ends_by_block, rows, laws_along(rows, target))]
    found = [(len(row.emitted) - 1, row.emitted[-1]) for row in rows]
    wrong = [pair for pair in zip(found, expected, strict=True) if pair[1] not in (None, pair[0])]
    assert wrong == []
    assert expected.count(None) < len(rows) / 10
    assert {k for k, _ in found} == {0, 1, 2, 3}
    drawn = [
        Draw(row.name, row.start, place, Purpose.DRAFT, dense(row, place), int(row.tokens[place]))
        for row in rows
        for place in range(row.length)
    ]
    assert right(drawn)[0] == []
    # Point masses would keep the law, and accept less.
    assert np.mean([np.count_nonzero(draw.weights) for draw in drawn]) > 1.5


def test_the_first_token_after_one_token_is_drawn_too(llm, checkpoints):
    asked = [request(place, [law.LETTERS[place % 3]], 1) for place in range(30)]
    _, rows = answered(llm, llm.loaded.roles("ar", 0), asked)
    draws = consumed(rows, checkpoints[0])
    wrong, _ = right(draws)
    assert wrong == []
    assert sum(draw.token != draw.weights.argmax() for draw in draws) > 2


REAL = {"submesh": {"target_devices": "1", "draft_devices": "4"}, "process": {}}


@pytest.mark.slow
@pytest.mark.parametrize("where", REAL)
def test_a_draft_that_really_is_elsewhere_has_the_same_keys(checkpoints, where):
    """On other devices than the target's, and in a process of its own."""
    settings = FEW_BRANCHES | {"fan_out": "measured"} | REAL[where]
    settings |= {"slots": 4, "k": "2", "context": CONTEXT, "dtype": "float32", "mode": "ssd"}
    target, draft = map(str, checkpoints)
    cache = jax.config.jax_compilation_cache_dir  # both processes compile once
    with LLM(target, draft=draft, draft_placement=where, compile_cache=cache, **settings) as llm:
        if llm.loaded.worker is not None:
            llm.loaded.worker.patience = 120.0
        roles = llm.loaded.roles("ssd", 2)
        roles.drafter._draft.patience = 120.0
        roles.drafter._waiting.pace = Patient()
        _, rows = run(llm, roles)
    draws = consumed(rows, checkpoints[0])
    wrong, _ = right(draws)
    assert [draw.key for draw in wrong] == []
    assert len({draw.key for draw in draws}) == len(draws)


class BySlot(DraftSession):
    """A worker that keys its draws by slot."""

    def _open(self, draft, message):
        opening = dataclasses.replace(message.opening, index=message.opening.slot)
        super()._open(draft, replace(message, opening=opening))


def test_a_worker_that_keys_its_draws_by_slot_is_caught(llm, checkpoints):
    with placed(llm, "process", BySlot) as roles:
        _, rows = run(llm, roles, count=1)
    wrong, _ = right(consumed(rows, checkpoints[0]))
    assert {draw.purpose for draw in wrong} == {Purpose.DRAFT}

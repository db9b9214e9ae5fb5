"""Every draw that a run consumes is the one that its own key gives, wherever the draft is.

No statistics: draws are worked out again on the host, from seed, index, start, position and purpose,
and from the q that was verified and the target's law. So whoever uses another key, a key twice, or
another q than it drew from says something else within a few tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax import SamplingParams
from ssd_jax.runtime.branch_draft import BranchDraft
from ssd_jax.runtime.engine import Engine
from ssd_jax.runtime.occurrences import derived
from ssd_jax.runtime.request import Request
from ssd_jax.runtime.roles import IDLE
from ssd_jax.runtime.worker import server
from ssd_jax.runtime.worker.client import RemoteDraft
from ssd_jax.runtime.worker.connection import Connection
from ssd_jax.runtime.worker.messages import Hello
from ssd_jax.runtime.worker.session import Session
from ssd_jax.speculation import keys
from ssd_jax.speculation.keys import Purpose
from ssd_jax.text.detokenizer import Detokenizer
from tests import tiny
from tests.models.golden import our_logits
from tests.runtime import law
from tests.runtime.paces import Patient
from tests.runtime.test_engine_law import SSD
from tests.speculation.reference import next_law

NEAR = 1e-3  # what two floats may differ by, where a draw is too near to say

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

    def open(self, slot, params, index, *rest) -> None:
        settings = {**SETTINGS[index % 2], "temperature": params.temperature}
        self._requests[slot] = ((params.seed, index), [], [], settings)
        self._target.open(slot, params, index, *rest)

    def prefill(self, slot, tokens, offset):
        self._requests[slot][1][offset:] = tokens
        self._target.prefill(slot, tokens, offset)

    def prefill_last(self, slot, tokens, offset):
        self._requests[slot][1][offset:] = tokens
        return self._read(self._target.prefill_last(slot, tokens, offset), {0: slot}, None)

    def forward(self, tokens, lengths, drafted=None):
        proposal = None
        if drafted is not None:
            proposal = drafted.proposal if drafted.settle is None else drafted.settle()
            drafted = dataclasses.replace(drafted, settle=None, proposal=proposal)
            proposal = jax.tree.map(np.asarray, proposal)
        slots = {slot: slot for slot in np.flatnonzero(lengths != IDLE).tolist()}
        return self._read(self._target.forward(tokens, lengths, drafted), slots, proposal)

    def _read(self, pending, slots, proposal):
        def read():
            found = pending.read()
            for row, slot in slots.items():
                emitted = found.tokens[row, : found.accepted[row] + 1].tolist()
                name, prompt, output, settings = self._requests[slot]
                each = (np.zeros(0, int), np.zeros((0, 1)), np.zeros((0, 1)))
                length = 0
                if proposal is not None:
                    length = int(proposal.length[slot])
                    arrays = (proposal.tokens, proposal.support, proposal.q)
                    each = tuple(array[slot, :length] for array in arrays)
                self.rows.append(
                    Row(name, list(prompt), list(output), settings, length, *each, emitted)
                )
                output += emitted
            return found

        return SimpleNamespace(read=read)


class Draw(NamedTuple):
    """A draw that was consumed: its key, and what it should have been if it is not too near."""

    key: tuple[int, int, int, int, Purpose]
    right: bool
    sure: bool


def audit(rows: list[Row], target) -> list[Draw]:
    """All draws of some rounds."""
    draws = []
    for row in rows:
        laws = laws_of(row, target)
        accepted = len(row.emitted) - 1
        for place in range(min(accepted + 1, row.length)):
            token, support, q = row.tokens[place], row.support[place], row.q[place]
            key = (*row.name, row.start, place, Purpose.DRAFT)
            draws.append(drawn(key, support[support >= 0], q[support >= 0], token))
            key = (*row.name, row.start, row.start + 1 + place, Purpose.ACCEPT)
            odds = laws[place][token] / q[support == token].sum()
            u = uniform(key)
            draws.append(Draw(key, (u < odds) == (place < accepted), abs(u - odds) > NEAR))
        bonus = laws[accepted]
        if accepted < row.length:
            used = row.support[accepted] >= 0
            bonus = bonus.copy()
            bonus[row.support[accepted][used]] -= row.q[accepted][used]
        key = (*row.name, row.start, row.start + 1 + accepted, Purpose.BONUS)
        draws.append(drawn(key, np.arange(len(bonus)), np.maximum(bonus, 0), row.emitted[-1]))
    return draws


def laws_of(row: Row, target) -> list[np.ndarray]:
    """The target's law after 0, 1, ... of the accepted tokens."""
    text = [*row.prompt, *row.output, *row.emitted]
    logits = our_logits(target, np.array([text + [0] * (32 - len(text))]))[0, :, : tiny.TOKENS]
    settings, said = law.as_rows(row.settings), len(row.prompt) + len(row.output)
    return [
        next_law(logits[end - 1], settings, row.prompt, text[len(row.prompt) : end])
        for end in range(said, said + len(row.emitted))
    ]


def words(key):
    seed, index, start, position, purpose = key
    seed = jnp.array([[seed & 0xFFFFFFFF, seed >> 32]], jnp.uint32)
    numbers = jnp.array([index], jnp.uint32), jnp.array([start]), jnp.array([position])
    return keys.derive(seed, *numbers, purpose)


def uniform(key) -> float:
    return float(keys.uniform(words(key))[0])


def drawn(key, ids, weights, token) -> Draw:
    noise = np.asarray(keys.gumbel_of(words(key), jnp.asarray(ids)[None]))[0]
    with np.errstate(divide="ignore"):
        scores = np.log(weights) + noise
    best = np.argsort(scores)[::-1]
    sure = len(best) == 1 or scores[best[0]] - scores[best[1]] > NEAR
    return Draw(key, int(ids[best[0]]) == token, sure)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return law.write_checkpoints(tmp_path_factory.mktemp("ledger"))


@pytest.fixture(scope="module")
def llm(checkpoints):
    return law.open_llm(checkpoints, "ssd", **SSD["few branches by confidence"])


@contextmanager
def remote(llm, session=Session):
    """A draft behind a worker's server, in this process, with the programs that there are."""
    inline, drafting = llm.loaded.inline, llm.loaded.inline.branching()[0].base.drafting
    hello = Hello(
        token="secret",
        model="tiny",
        slots=llm.config.slots,
        context=llm.context,
        tokens=llm.tokenizer.size,
        k=drafting.k,
        branches=drafting.branches,
        support=drafting.support,
        rule=drafting.rule,
    )

    def draft():
        return BranchDraft(inline.branching(), inline.parameters())

    serving, port = server.serve(lambda called: session(hello, draft, called), hello)
    counters = Counter()
    made = RemoteDraft(
        hello,
        lambda: Connection(f"127.0.0.1:{port}", hello, counters),
        patience=120.0,
        counters=counters,
    )
    assert made.wait_ready(60)
    try:
        yield made
    finally:
        made.close()
        serving.stop(None)


@contextmanager
def placed(llm, where, session=Session):
    """Roles with the draft in a placement; whatever is to come is waited for."""
    loaded = llm.loaded
    if where == "process":
        with remote(llm, session) as draft:
            worker = SimpleNamespace(draft=lambda _patience: draft)
            roles = dataclasses.replace(loaded, worker=worker).roles("ssd", llm.config.speculated)
            roles.drafter._pace = Patient()
            yield roles
        return
    placement = dataclasses.replace(loaded.placement, kind=where)
    roles = dataclasses.replace(loaded, placement=placement).roles("ssd", llm.config.speculated)
    if where == "submesh":
        roles.drafter._draft.patience = 120.0
    yield roles


def run(llm, roles):
    """Texts of requests that come and go, the first of which is asked for twice; and the rounds."""
    target = Noted(roles.target)
    engine = Engine(
        target,
        lambda: Detokenizer(llm.tokenizer),
        llm.tokenizer.eos_ids,
        drafter=roles.drafter,
    )
    asked = [
        Request(
            prompt_ids=prompt,
            params=SamplingParams(
                seed=2**40 + 7, max_tokens=20 - 2 * place, ignore_eos=True, **SETTINGS[place % 2]
            ),
            index=place,
        )
        for place, prompt in enumerate(PROMPTS)
    ]
    ids = [engine.add(request) for request in [*asked, asked[0]]]
    found = {}
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                found[event.request_id] = event.output
    return [found[each] for each in ids], target.rows


@pytest.mark.parametrize("where", ["inline", "submesh", "process"])
def test_every_consumed_draw_has_a_key_of_its_own_and_is_what_it_gives(llm, checkpoints, where):
    with placed(llm, where) as roles:
        outputs, rows = run(llm, roles)
    draws = audit(rows, checkpoints[0])
    assert [draw for draw in draws if draw.sure and not draw.right] == []
    purposes = Counter(draw.key[-1] for draw in draws)
    assert min(purposes[each] for each in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.BONUS)) > 30
    assert np.mean([draw.sure for draw in draws]) > 0.98
    rates = [output.metrics["hit_rate"] for output in outputs]
    assert 0 < np.mean(rates) < 1
    own = [draw.key for draw in draws]
    if where == "inline":  # the request that came again said the same
        assert outputs[-1].token_ids == outputs[0].token_ids
        own = list(dict.fromkeys(own))
    else:
        assert outputs[-1].token_ids != outputs[0].token_ids
        assert derived(2**40 + 7, 0, 0, 1) in {key[0] for key in own}
    assert len(set(own)) == len(own)

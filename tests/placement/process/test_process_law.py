"""Sampled text of SSD over a worker process follows the law of the model, also when q gets lost."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from ssd_jax.llm.llm import LLM
from ssd_jax.placement.host_proposals import HostProposals
from ssd_jax.placement.process.client import RemoteRecords
from ssd_jax.wire.messages import RecordTokens
from tests.fakes.paces import Moody
from tests.llm import law
from tests.sampling.evidence import ALPHA

pytestmark = pytest.mark.slow  # key by key, test_key_ledger.py says the same of fewer texts


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return law.write_checkpoints(tmp_path_factory.mktemp("law"))


@pytest.fixture(scope="module")
def llm(checkpoints):
    target, draft = checkpoints
    opened = LLM(
        str(target),
        mode="ssd",
        draft=str(draft),
        dtype="float32",
        slots=8,
        k="2",
        budget="2",
        proposal_support="2",
        backup="auto",
        context=32,
        draft_placement="process",
        compile_cache=jax.config.jax_compilation_cache_dir,
    )
    opened.loaded.worker.patience = 120.0
    with opened:
        yield opened


def test_texts_follow_the_law_when_a_fifth_of_the_q_is_lost_and_lengths_vary(
    checkpoints, llm, monkeypatch
):
    engine = llm.engine
    (draft,) = llm.loaded.worker.drafts
    take, rng, lost = RemoteRecords._take_q, np.random.default_rng(5), []

    def lossy(records):
        lost.append(records._asked_q.size > 0 and rng.random() < 0.2)
        if lost[-1]:
            records._asked_q = records._asked_q[:0]
        take(records)

    monkeypatch.setattr(RemoteRecords, "_take_q", lossy)
    engine._drafter._waiting.pace = Moody()
    metrics = law.assert_lawful(llm, law.laws_of(checkpoints[0]), engine, law.MANY)
    assert sum(lost) > 50
    # The answer that was not waited for may come when the next round has been sent.
    assert {*draft.counters} <= {"connections", "ignored", "overtaken"}
    assert draft.counters["connections"] == 1
    rates = [metric["hit_rate"] for metric in metrics if metric["hit_rate"] is not None]
    assert 0.1 < np.mean(rates) < 0.99


BROKEN = [
    lambda q: q * np.nan,
    lambda q: q * 2,
    lambda q: -q,
    lambda q: q * 0,
    lambda q: q[..., ::-1] * (q == 1),
]


def test_texts_follow_the_law_when_a_fifth_of_the_q_is_broken(checkpoints, llm):
    """What is broken in the message, on its way from the worker, makes point masses."""
    engine = law.engine_with(llm, "ssd", lambda drafter: drafter)
    draft = llm.loaded.worker.drafts[-1]
    link, rng, broken = draft.streams.current, np.random.default_rng(6), []
    take = link._handle

    def spoilt(message):
        if isinstance(message, RecordTokens) and message.sampled.size and rng.random() < 0.2:
            broken.append(len(message.sampled))
            message = replace(message, q=BROKEN[rng.integers(len(BROKEN))](message.q))
        take(message)

    link._handle = spoilt
    law.assert_lawful(llm, law.laws_of(checkpoints[0]), engine, law.MANY)
    assert sum(broken) > 50
    assert draft.counters["q malformed"] > sum(broken) / 2
    assert {*draft.counters} <= {"connections", "q malformed", "overtaken"}


def test_another_q_than_was_drawn_from_is_caught(checkpoints, llm, monkeypatch):
    engine = law.engine_with(llm, "ssd", lambda drafter: drafter)
    put = HostProposals.put_q

    def put_mixed(proposals, slots, answer):
        both = (answer.q > 0).all(axis=-1, keepdims=True)
        mixed = np.where(both, answer.q[..., ::-1], answer.q)
        return put(proposals, slots, replace(answer, q=mixed))

    monkeypatch.setattr(HostProposals, "put_q", put_mixed)
    outputs, _ = law.run(engine, law.requests(llm, law.MANY))
    found = law.p_values(law.laws_of(checkpoints[0]), outputs)
    assert min(found.values()) <= ALPHA

"""The worker's side of a stream, message by message."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from msgspec.structs import replace

from ssd_jax.placement.process.session import DraftSession
from ssd_jax.roles.records import IDLE, SlotOpening
from ssd_jax.sampling.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from ssd_jax.wire.fields import ProtocolError
from ssd_jax.wire.messages import BranchMessage, Prefill, RecordTokens, Welcome
from tests.fakes.instrument import instrument
from tests.placement.process.conversation import (
    EXPAND,
    OPEN,
    PARAMS,
    PREFILL,
    RECORDS,
    ROUND,
    Talk,
    rows,
)
from tests.placement.process.script import HELLO, PROMPT, SLOTS, K, M, ScriptedDraft, token_at


def test_a_round_is_answered_after_each_forward_and_the_last_answer_says_so():
    welcome, *found = Talk(HELLO, OPEN, PREFILL, *ROUND).answers
    assert welcome == Welcome()
    assert [(answer.number, answer.complete) for answer in found] == [
        (4, False),
        (4, False),
        (4, True),
    ]
    # The tail rule: branches of k = L start with the second forward.
    assert [answer.lengths.max() for answer in found] == [0, 1, 2]
    assert found[-1].bonus[0, 0] == token_at(PROMPT)
    assert found[-1].tokens[0, 0, 0] == token_at(PROMPT + 1)
    np.testing.assert_array_equal(found[-1].slots, [1])


def noting():
    """A draft, and what it is asked for."""
    calls = []
    return instrument(ScriptedDraft(), note={"grow": calls, "branch_tokens": calls}), calls


@pytest.mark.parametrize("forwards", [1, 2, K])
def test_the_next_round_cuts_an_expansion_short_but_never_its_first_forward(forwards):
    calls = iter([False] * (forwards - 1) + [True] * 9)
    talk = Talk(HELLO, OPEN, PREFILL, *ROUND, called=lambda: next(calls))
    assert len(talk.answers) == 1 + forwards
    assert talk.answers[-1].complete
    assert (talk.counters["forwards"], talk.counters["cut"]) == (forwards, int(forwards < K))


@pytest.mark.parametrize("forwards", [1, 2, K])
def test_a_forward_is_not_begun_once_the_next_round_has_come(forwards):
    """The next round would wait for it."""
    calls = iter([False] * (forwards - 1) + [True] * 9)
    draft, asked = noting()
    session = DraftSession(HELLO, lambda: draft, lambda: next(calls))
    for message in (HELLO, OPEN, PREFILL, *ROUND):
        list(session.handle(message))
    assert asked == (["branch_tokens", "grow"] * forwards)[:-1]


def test_a_forward_begins_when_the_one_before_it_has_ended_and_before_it_is_told_of():
    """Or the next round, which comes in the middle of one, would wait for two."""
    draft, asked = noting()
    session = DraftSession(HELLO, lambda: draft, lambda: False)
    for message in (HELLO, OPEN, PREFILL, RECORDS):
        list(session.handle(message))
    for count, _ in enumerate(session.handle(EXPAND), 1):
        assert asked == (["branch_tokens", "grow"] * count)[: 2 * K - 1]
    assert count == K


def test_q_is_sent_for_sampled_rows_alone():
    for sampled in (False, True):
        asked = replace(RECORDS, drafts=rows(2), sampled=rows(sampled))
        (winner,) = Talk(HELLO, OPEN, PREFILL, asked).answers[1:]
        assert isinstance(winner, RecordTokens)
        assert winner.lengths == [2]
        assert winner.tokens[0, :2].tolist() == [token_at(PROMPT), token_at(PROMPT + 1)]
        assert winner.q.shape == (int(sampled), K, 2)


def test_messages_that_were_executed_already_are_not_executed_again():
    talk = Talk(HELLO, OPEN, PREFILL, *ROUND)
    assert talk.say(OPEN, PREFILL, *ROUND, replace(RECORDS, number=2)) == []
    assert (talk.counters["stale"], talk.counters["rounds"]) == (5, 1)


def test_messages_for_an_earlier_request_of_a_slot_are_not_executed():
    newer = replace(OPEN, number=5, epoch=7)
    talk = Talk(HELLO, OPEN, PREFILL, *ROUND, newer)
    late = [
        replace(OPEN, number=6, epoch=6),
        replace(PREFILL, number=7),
        replace(RECORDS, number=8),
        replace(EXPAND, number=9),
    ]
    (answer,) = talk.say(*late)
    assert isinstance(answer, BranchMessage)  # an expansion is always answered
    assert answer.complete
    assert answer.slots.size == 0
    assert talk.counters["stale"] == 4


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[1:])
def test_messages_in_another_order_change_no_text(order):
    """What is answered is what was to be answered, or nothing; the draft checks its texts."""
    messages = [OPEN, PREFILL, *ROUND]
    right = {answer.number: answer for answer in Talk(HELLO, *messages).answers[1:]}
    talk = Talk(HELLO)
    with contextlib.suppress(ProtocolError):  # the stream ends, and the engine tells all anew
        talk.say(*(messages[place] for place in order))
    for answer in talk.answers[1:]:
        if answer.slots.size:
            np.testing.assert_array_equal(answer.tokens, right[answer.number].tokens)


def opening(**changes):
    fields = {"slot": 1, "params": PARAMS, **changes}
    return replace(OPEN, number=9, epoch=2, opening=SlotOpening(**fields))


def params(**changes):
    """Sampling parameters that no engine can have made."""
    made = SamplingParams()
    for name, value in changes.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize(
    "message",
    [
        opening(pages=[0]),
        opening(slot=2),
        opening(slot=-1),
        opening(params=params(temperature=-1.0)),
        opening(params=params(temperature="hot")),
        opening(params=SamplingParams(logit_bias=((500, 1.0),))),
        opening(banned=[1] * 99),
        opening(banned=[128]),
        opening(bad_word_ids=[[1, 128]]),
        opening(bad_word_ids=[[1], []]),
        opening(bad_word_ids=[[1] * (MAX_BAD_WORD_TOKENS + 1)]),
        opening(bad_word_ids=[[1]] * (MAX_BAD_WORDS + 1)),
        opening(index=2**32),
        opening(ban_before=HELLO.context + 1),
        replace(OPEN, number=9, epoch=0),
        replace(PREFILL, slot=5),
        replace(PREFILL, offset=3),
        replace(PREFILL, offset=-1),
        replace(PREFILL, tokens=PREFILL.tokens[:0]),
        replace(PREFILL, tokens=PREFILL.tokens + 128),
        replace(PREFILL, tokens=np.zeros((2, 2), np.int32)),
        replace(PREFILL, tokens=np.zeros(3, np.float32)),
        replace(PREFILL, tokens=np.ones(HELLO.context + 1, np.int32)),
        replace(RECORDS, epochs=np.ones(SLOTS + 1)),
        replace(RECORDS, epochs=rows(-1)),
        replace(RECORDS, position=rows(HELLO.context, IDLE)),
        replace(RECORDS, position=rows(PROMPT + 3, IDLE)),
        replace(RECORDS, position=rows(-2, IDLE)),
        replace(RECORDS, pending=rows(128)),
        replace(RECORDS, committed=rows([-2] * 3, -1)),
        replace(RECORDS, committed=rows([128] * 3, -1)),
        replace(RECORDS, winner=rows(M, -1)),
        replace(RECORDS, winner=rows(-2, -1)),
        replace(RECORDS, winner=rows(1, -1), drafts=rows(1)),
        replace(RECORDS, limit=rows(1), drafts=rows(1)),
        replace(RECORDS, limit=rows(K + 1)),
        replace(RECORDS, tokens=rows([1] * (K + 1))),
        replace(RECORDS, tokens=rows([128] * K)),
        replace(RECORDS, drafts=rows(K + 1)),
        replace(RECORDS, sampled=rows(2)),
        replace(EXPAND, forwards=-1),
        replace(EXPAND, forwards=0),
        replace(EXPAND, forwards=K + 2),
        replace(EXPAND, lowered=EXPAND.lowered[:, 1:]),
        replace(RECORDS, lowered=RECORDS.lowered - 3),
        replace(EXPAND, lowered=EXPAND.lowered - 3),
        replace(EXPAND, counts=rows([M + 1, 0, 0, 0])),
        replace(EXPAND, counts=rows([M, 1, 0, 0])),
        replace(EXPAND, counts=rows([M, 0])),
        replace(EXPAND, counts=rows([M, -1, 0, 0])),
        replace(EXPAND, follow=rows(2)),
        Welcome(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_that_do_not_fit_are_refused_before_the_draft_sees_them(message):
    talk = Talk(HELLO, OPEN)
    if not isinstance(message, Prefill):
        talk.say(PREFILL)
    with pytest.raises(ProtocolError):
        talk.say(message)


def test_a_stream_begins_with_a_greeting():
    with pytest.raises(ProtocolError, match="begins with a DraftSpec"):
        Talk(OPEN)

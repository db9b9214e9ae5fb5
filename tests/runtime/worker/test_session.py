"""The worker's side of a stream, message by message."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ssd_jax.runtime.worker.messages import (
    Expand,
    Fork,
    Move,
    Open,
    Ping,
    Prefill,
    ProtocolError,
    Round,
    Speculations,
    Stats,
    Welcome,
    Winner,
)
from ssd_jax.runtime.worker.session import Session
from tests.runtime.worker.scripted import HELLO, PROMPT, K, M, ScriptedDraft, said_at

OPEN = Open(
    number=1,
    slot=1,
    epoch=1,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    logit_bias=((3, 0.5),),
    seed=2**64 - 1,
    index=0,
    banned=(1,),
    ban_before=9,
)
PREFILL = Prefill(
    number=2,
    slot=1,
    epoch=1,
    offset=0,
    tokens=np.array([said_at(at) for at in range(PROMPT)], np.int32),
)
MOVE = Move(
    slot=1,
    epoch=1,
    position=PROMPT - 1,
    pending=said_at(PROMPT - 1),
    committed=(),
    winner=-1,
    limit=0,
    tokens=(),
    draft=0,
    sampled=True,
)
FORK = Fork(slot=1, epoch=1, counts=(M, 0, 0, 0), follow=False)
EXPAND = Expand(forks=(FORK,), forwards=K)
ROUND = Round(number=3, moves=(MOVE,), lowered=np.full((2, K), 2, np.int32), expand=EXPAND)


class Talk:
    """A session and what it has answered."""

    def __init__(self, *messages, called=lambda: False):
        self.session = Session(HELLO, ScriptedDraft, called)
        self.answers = self.say(*messages)

    def say(self, *messages):
        return [answer for message in messages for answer in self.session.handle(message)]

    def stats(self, number=1000) -> Stats:
        (stats,) = self.say(Ping(number=number))
        return stats


def test_a_round_is_answered_after_each_forward_and_the_last_answer_says_so():
    welcome, *found = Talk(HELLO, OPEN, PREFILL, ROUND).answers
    assert welcome == Welcome()
    assert [(answer.number, answer.complete) for answer in found] == [
        (3, False),
        (3, False),
        (3, True),
    ]
    # The tail rule: branches of k = L start with the second forward.
    assert [answer.lengths.max() for answer in found] == [0, 1, 2]
    assert found[-1].bonus[0, 0] == said_at(PROMPT)
    assert found[-1].tokens[0, 0, 0] == said_at(PROMPT + 1)
    np.testing.assert_array_equal(found[-1].slots, [1])


class Watched(ScriptedDraft):
    """A draft that tells what it is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def grow(self, lowered):
        self.asked.append("grow")
        super().grow(lowered)

    def news(self, forwards):
        self.asked.append("news")
        return super().news(forwards)


@pytest.mark.parametrize("forwards", [1, 2, K])
def test_the_next_round_cuts_an_expansion_short_but_never_its_first_forward(forwards):
    calls = iter([False] * (forwards - 1) + [True] * 9)
    talk = Talk(HELLO, OPEN, PREFILL, ROUND, called=lambda: next(calls))
    assert len(talk.answers) == 1 + forwards
    assert talk.answers[-1].complete
    stats = talk.stats()
    assert (stats.forwards, stats.cut) == (forwards, int(forwards < K))


@pytest.mark.parametrize("forwards", [1, 2, K])
def test_a_forward_that_would_not_be_told_of_is_not_begun(forwards):
    """The next round would wait for it."""
    calls = iter([False] * (forwards - 1) + [True] * 9)
    session, draft = Session(HELLO, lambda: draft, lambda: next(calls)), Watched()
    for message in (HELLO, OPEN, PREFILL, ROUND):
        list(session.handle(message))
    assert draft.asked == (["news", "grow"] * forwards)[:-1]


def test_a_forward_begins_when_the_one_before_it_has_ended_and_before_its_news_are_sent():
    """Or the next round, which comes in the middle of one, would wait for two."""
    session, draft = Session(HELLO, lambda: draft, lambda: False), Watched()
    for message in (HELLO, OPEN, PREFILL):
        list(session.handle(message))
    for told, _ in enumerate(session.handle(ROUND), 1):
        assert draft.asked == (["news", "grow"] * told)[: 2 * K - 1]
    assert told == K


def test_q_is_sent_for_sampled_rows_alone():
    for sampled in (False, True):
        move = dataclasses.replace(MOVE, draft=2, sampled=sampled)
        talk = Talk(HELLO, OPEN, PREFILL, change(ROUND, moves=(move,), expand=None))
        (winner,) = talk.answers[1:]
        assert isinstance(winner, Winner)
        assert winner.lengths == [2]
        assert winner.tokens[0, :2].tolist() == [said_at(PROMPT), said_at(PROMPT + 1)]
        assert winner.q.shape == (int(sampled), K, 2)


def test_messages_that_were_executed_already_are_not_executed_again():
    talk = Talk(HELLO, OPEN, PREFILL, ROUND)
    assert talk.say(OPEN, PREFILL, ROUND, dataclasses.replace(ROUND, number=2)) == []
    assert talk.stats().stale == 4
    assert talk.stats(1001).rounds == 1


def test_messages_for_an_earlier_request_of_a_slot_are_not_executed():
    newer = dataclasses.replace(OPEN, number=4, epoch=7)
    talk = Talk(HELLO, OPEN, PREFILL, ROUND, newer)
    late = [
        dataclasses.replace(OPEN, number=5, epoch=6),
        dataclasses.replace(PREFILL, number=6),
        dataclasses.replace(ROUND, number=7),
    ]
    (answer,) = talk.say(*late)
    assert isinstance(answer, Speculations)  # a round is always answered
    assert answer.complete
    assert answer.slots.size == 0
    assert talk.stats().stale == 4


def change(part, **changes):
    return dataclasses.replace(part, **changes)


def with_move(**changes):
    return change(ROUND, moves=(change(MOVE, **changes),))


def with_expand(**changes):
    return change(ROUND, expand=change(EXPAND, **changes))


def with_fork(**changes):
    return with_expand(forks=(change(FORK, **changes),))


@pytest.mark.parametrize(
    "message",
    [
        change(OPEN, slot=2),
        change(OPEN, slot=-1),
        change(OPEN, epoch=2, number=9, temperature=-1.0),
        change(OPEN, epoch=2, number=9, logit_bias=((500, 1.0),)),
        change(OPEN, epoch=2, number=9, banned=(1,) * 99),
        change(PREFILL, slot=5),
        change(PREFILL, offset=3),
        change(PREFILL, offset=-1),
        change(PREFILL, tokens=PREFILL.tokens[:0]),
        change(PREFILL, tokens=PREFILL.tokens + 128),
        change(PREFILL, tokens=np.zeros((2, 2), np.int32)),
        change(PREFILL, tokens=np.zeros(3, np.float32)),
        change(PREFILL, tokens=np.ones(HELLO.context + 1, np.int32)),
        with_move(slot=9),
        with_move(position=HELLO.context),
        with_move(position=PROMPT + 3),
        with_move(pending=128),
        with_move(committed=(-1,)),
        with_move(winner=M),
        with_move(winner=-2),
        with_move(winner=1, draft=1),
        with_move(limit=K + 1),
        with_move(tokens=(1,) * (K + 1)),
        with_move(draft=K + 1),
        with_expand(forwards=0),
        with_expand(forwards=K + 2),
        change(ROUND, lowered=ROUND.lowered[:, 1:]),
        change(ROUND, lowered=ROUND.lowered - 3),
        with_fork(slot=-1),
        with_fork(counts=(M + 1, 0, 0, 0)),
        with_fork(counts=(M, 0)),
        with_fork(counts=(M, -1, 0, 0)),
        Welcome(),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_the_draft_sees_it(message):
    talk = Talk(HELLO, OPEN)
    if not isinstance(message, Prefill):
        talk.say(PREFILL)
    if isinstance(message, Open):
        message = change(message, number=9, epoch=2)
    with pytest.raises(ProtocolError):
        talk.say(message)


def test_a_stream_begins_with_a_greeting():
    with pytest.raises(ProtocolError, match="begins with a Hello"):
        Talk(OPEN)

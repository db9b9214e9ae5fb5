"""The engine on scripted roles: stops, lengths, counters, slots, cancels."""

import pytest

from ssd_jax.checkpoints.tokenizers.detokenizer import ByteStream
from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request_metrics import REQUEST_KEYS
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import MAX_STOP_IDS
from ssd_jax.testing.fakes import Clock, FakeDrafter, FakeTarget, Letters
from tests.engine.letters import (
    EOS,
    LONG,
    OTHER_EOS,
    drain,
    ids,
    make,
    outputs,
    request,
    speculate,
    spell,
)
from tests.fakes.instrument import At, instrument


def run(script, **params):
    _, engine = make(script)
    request_id = engine.add(request(**params))
    events = drain(engine)
    output = outputs(events)[request_id]
    assert "".join(event.text for event in events) == output.text
    assert [token for event in events for token in event.token_ids] == output.token_ids
    return output


def test_eos_ends_the_request_and_leaves_no_text():
    output = run(spell("hello"))
    assert (output.text, output.token_ids) == ("hello", [*ids("hello"), EOS])
    assert output.finish_reason == "stop"


def test_every_eos_id_of_the_checkpoint_ends_the_text():
    output = run(spell("hi", eos=OTHER_EOS))
    assert (output.token_ids, output.finish_reason) == ([*ids("hi"), OTHER_EOS], "stop")


def test_an_eos_as_first_token_is_noticed_at_once():
    target, engine = make(spell(""))
    engine.add(request())
    output = outputs(drain(engine))[0]
    assert (output.text, output.token_ids, output.finish_reason) == ("", [EOS], "stop")
    assert target.calls.count("forward") == 0


def test_max_tokens_ends_with_length():
    output = run(spell("hello"), max_tokens=3)
    assert (output.text, output.finish_reason) == ("hel", "length")


def test_a_stop_at_the_length_limit_is_a_stop():
    assert run(spell("abc"), max_tokens=4).finish_reason == "stop"
    assert run(spell("abc"), max_tokens=3).finish_reason == "length"
    assert run(spell("abcX"), max_tokens=4, stop="X").finish_reason == "stop"


def test_a_stop_string_at_the_length_limit_leaves_the_slots_next_request_alone():
    """By then the slot may belong to another request."""
    _, engine = make(spell("abX"), slots=1)
    first, second = engine.add(request(max_tokens=3, stop="X")), engine.add(request())
    done = outputs(drain(engine))
    assert (done[first].text, done[first].finish_reason) == ("ab", "stop")
    assert done[second].text == "abX"


def test_ignore_eos_generates_through_an_eos():
    output = run(spell("ab"), max_tokens=5, ignore_eos=True)
    assert (output.token_ids, output.finish_reason) == ([*ids("ab"), EOS, EOS, EOS], "length")


def test_own_stop_ids_end_the_text_even_when_eos_is_ignored():
    output = run(spell("abc"), stop_token_ids=(ord("b"),), ignore_eos=True)
    assert (output.text, output.token_ids) == ("a", ids("ab"))


def test_min_tokens_bans_every_stop_id_until_then():
    target, engine = make(spell("abcd"))
    engine.add(request(min_tokens=3, stop_token_ids=(9,)))
    drain(engine)
    banned, before = target.opened[0].banned, target.opened[0].ban_before
    assert (banned, before) == ([EOS, OTHER_EOS, 9], 3 + 3)


def test_a_stop_string_over_several_tokens_cuts_text_and_ids():
    output = run(spell("one--two"), stop="--")
    assert (output.text, output.token_ids, output.finish_reason) == ("one", ids("one"), "stop")


def timed(script, **params):
    """A run in which the n-th round is read at time n squared, so that every gap differs."""
    target, reads = FakeTarget(script, slots=1), []
    accept = target.accept

    def watched(*args):
        pending = accept(*args)
        read = pending.read
        pending.read = lambda: reads.append(pending) or read()
        return pending

    target.accept = watched
    engine = Engine(target, Letters, frozenset({EOS}), clock=lambda: float(len(reads) ** 2))
    engine.add(request(**params))
    (output,) = outputs(drain(engine)).values()
    return output


def test_counters_end_where_the_text_ends():
    """A round was already dispatched past the stop string; nothing counts it."""
    output = timed(spell("abcSTOPdef"), stop="STOP")
    assert output.token_ids == ids("abc")
    assert set(output.metrics) == set(REQUEST_KEYS)
    # Tokens at 0, 1 and 4 s: gaps of 1 and 3 s.
    assert output.metrics["tokens_per_second"] == pytest.approx(2 / 4)
    assert output.metrics["itl_p50_ms"] == pytest.approx(2000)
    assert output.metrics["round_ms"] == pytest.approx(2000)


def test_verification_time_leaves_the_prefill_out():
    output = timed(spell("abc"))
    # From 0 to 1, from 1 to 4 and from 4 to 9 s.
    assert output.metrics["verify_ms"] == pytest.approx(3000)
    assert timed(spell("abc"), max_tokens=1).metrics["verify_ms"] is None


def test_text_is_decoded_as_the_continuation_of_the_prompt():
    followed = []

    def decoder(after, *, skip_special, visible_ids):
        assert not visible_ids
        followed.append((after, skip_special))
        return Letters(after)

    engine = Engine(FakeTarget(spell("ab")), decoder, frozenset({EOS}), clock=Clock())
    engine.add(request(prompt=(65, 70)))
    engine.add(request(prompt=(65, 71), skip_special_tokens=False))
    assert followed == [(70, True), (71, False)]


def test_a_stop_string_that_the_last_flush_completes_is_a_stop():
    class Late(Letters):
        """Keeps the last letter back until it is flushed."""

        held = ""

        def push(self, ids):
            text = self.held + super().push(ids)
            self.held = text[-1:]
            return text[:-1]

        def flush(self):
            text, self.held = self.held, ""
            return text

    target = FakeTarget(spell("abX"))
    engine = Engine(target, Late, frozenset({EOS}), clock=Clock())
    engine.add(request(max_tokens=3, stop="X"))
    (output,) = outputs(drain(engine)).values()
    assert (output.text, output.finish_reason) == ("ab", "stop")


def test_a_request_that_no_role_can_open_ends_alone_with_an_error():
    target, engine = make(spell("abcdef"))
    instrument(target, fail={"open": At(2, RuntimeError("no"))})
    finished = engine.add(request())
    events = [event for _ in range(3) for event in engine.step()]
    failed = engine.add(request(index=9))
    events += drain(engine)
    assert "".join(event.text for event in events if event.request_id == finished) == "abcdef"
    assert outputs(events)[failed].finish_reason == "error"


def test_the_context_limit_ends_with_length():
    _, engine = make(spell("x" * 100), context=10)
    engine.add(request(prompt=[65] * 9))
    engine.add(request(prompt=[65] * 4))
    one, six = outputs(drain(engine)).values()
    assert (len(one.token_ids), one.finish_reason) == (1, "length")
    assert (len(six.token_ids), six.finish_reason) == (6, "length")


def test_a_prompt_without_room_for_output_is_refused_with_the_numbers():
    _, engine = make(spell("x"), context=10)
    with pytest.raises(InputError, match=r"10 tokens; the context is 10"):
        engine.add(request(prompt=[65] * 10))
    with pytest.raises(InputError, match="empty"):
        engine.add(request(prompt=[]))
    for index in (-1, 2**32):
        with pytest.raises(InputError, match=f"index = {index} is out of range"):
            engine.add(request(index=index))
    with pytest.raises(InputError, match=f"at most {MAX_STOP_IDS}"):
        engine.add(request(stop_token_ids=tuple(range(100, 100 + MAX_STOP_IDS))))
    assert not engine.has_work


def test_long_prompts_are_prefilled_in_chunks_while_others_decode():
    target, engine = make(spell("x" * 30), max_chunk=4)
    first = engine.add(request(max_tokens=20))
    for _ in range(3):
        engine.step()
    second = engine.add(request(prompt=list(range(40, 57)), max_tokens=2))
    target.calls.clear()
    done = outputs(drain(engine))
    assert target.calls[:8] == ["prefill", "forward"] * 4
    assert (len(done[first].token_ids), len(done[second].token_ids)) == (20, 2)


@pytest.mark.parametrize(
    ("lengths", "read"),
    [
        ((1, 1, 1, 1, 1, 1), [4, 2]),  # four at most
        ((3, 3, 3, 3), [2, 2]),  # one chunk at most
        ((2, 8, 2), [1, 1, 1]),
        ((8, 2, 2, 2), [1, 3]),
        ((20, 1), [1, 1, 2]),  # the rest of one and the next
    ],
)
def test_a_step_reads_one_chunk_or_a_few_short_prompts(lengths, read):
    target, engine = make(spell("x" * 30), max_chunk=8, slots=6)
    for index, length in enumerate(lengths):
        engine.add(request(prompt=[65] * length, index=index))
    found = []
    for _ in read:
        target.calls.clear()
        engine.step()
        found.append(target.calls.count("prefill"))
    assert found == read
    assert engine._seats.prefilled


def test_requests_enter_and_leave_slots_in_any_round():
    script = lambda prompt, position: 33 + (sum(prompt) * 7 + position) % 90  # noqa: E731
    target, engine = make(script, slots=3)
    wanted = {}
    events = []
    for number in range(12):
        prompt = [50 + number] * (1 + number % 6)
        length = 1 + number % 5
        wanted[engine.add(request(prompt=prompt, max_tokens=length, index=number))] = [
            script(prompt, len(prompt) + i) for i in range(length)
        ]
        events += engine.step()
    events += drain(engine)
    assert {key: output.token_ids for key, output in outputs(events).items()} == wanted
    assert {opening.slot for opening in target.opened} == {0, 1, 2}


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_cancel_ends_a_request_wherever_it_is(steps):
    _, engine = make(spell("abcdefgh"), slots=1)
    first, second = engine.add(request(prompt=[70] * 9)), engine.add(request())
    events = []
    for _ in range(steps):
        events += engine.step()
    engine.cancel(first)
    engine.cancel(first)
    events += drain(engine)
    done = outputs(events)
    assert done[first].finish_reason == "cancelled"
    assert "abcdefgh".startswith(done[first].text)
    assert done[second].text == "abcdefgh"


def test_cancelling_a_waiting_request_leaves_the_others():
    _, engine = make(spell("ab"), slots=1)
    finished, dropped = engine.add(request()), engine.add(request())
    engine.cancel(dropped)
    done = outputs(drain(engine))
    assert (done[finished].text, done[dropped].finish_reason) == ("ab", "cancelled")
    engine.cancel(finished)
    engine.cancel(12345)
    assert not engine.has_work


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("wrong", [1, 2, 3, 5, 97])
def test_speculation_changes_the_rounds_and_not_the_text(k, wrong):
    target, _, engine = speculate(spell(LONG), k=k, wrong=lambda position: position % wrong == 0)
    engine.add(request(max_tokens=100))
    output = outputs(drain(engine))[0]
    assert (output.text, output.finish_reason) == (LONG, "stop")
    rounds = target.calls.count("forward")
    histogram = output.metrics["acceptance_histogram"]
    # One more forward may have been dispatched before a stop was known; a stop id is known at once.
    assert sum(histogram) == rounds
    assert sum((place + 1) * count for place, count in enumerate(histogram)) == len(LONG)
    if wrong == 1:
        assert histogram == [len(LONG)]
    if wrong == 97:
        assert rounds == -(-len(LONG) // (k + 1))


@pytest.mark.parametrize("asks_first", [False, True])
def test_the_drafter_works_ahead_before_the_targets_forward_or_behind_it(asks_first):
    target, drafter, engine = speculate(spell(LONG), wrong=lambda position: position % 5 == 0)
    drafter.asks_first = asks_first
    drafter.speculate = lambda: target.calls.append("speculate")
    engine.add(request(max_tokens=100))
    assert outputs(drain(engine))[0].text == LONG
    both = ["speculate", "forward"] if asks_first else ["forward", "speculate"]
    rounds = both * target.calls.count("forward")
    assert target.calls == ["prefill", "speculate", *rounds]


def test_proposals_of_any_length_give_the_same_text():
    _, _, engine = speculate(spell(LONG), k=8, length=lambda position: position % 4)
    engine.add(request(max_tokens=100))
    assert outputs(drain(engine))[0].text == LONG


def test_a_draft_that_proposes_an_end_the_target_rejects_ends_nothing():
    def drafted(prompt, position):
        return EOS if position % 3 == 0 else spell(LONG)(prompt, position)

    target = FakeTarget(spell(LONG))
    engine = Engine(target, Letters, frozenset({EOS}), drafter=FakeDrafter(drafted), clock=Clock())
    engine.add(request(max_tokens=100))
    assert outputs(drain(engine))[0].text == LONG


def test_an_end_inside_an_accepted_block_leaks_nothing_and_counts_nothing():
    def script(prompt, position):
        return EOS if position - len(prompt) == 6 else ord("a")

    _, _, engine = speculate(script, k=4)
    engine.add(request(max_tokens=100))
    output = outputs(drain(engine))[0]
    assert (output.token_ids, output.finish_reason) == ([*ids("aaaaaa"), EOS], "stop")
    # The first token, a round of five, and one of which only the accepted end counts.
    assert output.metrics["acceptance_histogram"] == [1, 0, 0, 0, 1]
    assert output.metrics["acceptance_by_position"] == [(2, 2), (1, 1), (1, 1), (1, 1)]


def test_a_stop_string_inside_an_accepted_block_ends_text_and_counters_there():
    _, _, engine = speculate(spell(LONG), k=8)
    engine.add(request(max_tokens=100, stop="brown"))
    output = outputs(drain(engine))[0]
    assert output.text == "the quick "
    assert output.token_ids == ids("the quick ")
    assert output.metrics["acceptance_length"] == pytest.approx(9 / 1)


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_a_stop_string_and_an_end_in_one_block_say_what_single_tokens_say(k):
    """The stop string's last token begins a character, which is cut off with it."""
    tokens = [3, 3, 4, EOS]
    pieces = {3: b"ab", 4: b"STOP\xe2"}

    def script(prompt, position):
        return tokens[min(position - len(prompt), 3)]

    def text(drafter):
        def streams(_after, *, skip_special, visible_ids):
            assert skip_special
            assert not visible_ids
            return ByteStream(pieces.get, {EOS}, strip_space=False)

        engine = Engine(FakeTarget(script), streams, frozenset({EOS}), drafter=drafter)
        engine.add(request(max_tokens=9, stop="STOP"))
        output = outputs(drain(engine))[0]
        return output.text, output.token_ids, output.finish_reason

    assert text(FakeDrafter(script, k=k)) == text(None) == ("abab", [3, 3], "stop")


def test_speculation_stops_at_the_length_limit_and_at_the_context():
    _, drafter, engine = speculate(spell("x" * 99), k=8)
    engine.add(request(max_tokens=12))
    assert len(outputs(drain(engine))[0].token_ids) == 12
    # 1 by the prefill, 9, and of the 2 that are left one is the bonus token.
    assert drafter.limits == [8, 1]
    _, drafter, engine = speculate(spell("x" * 99), k=8, context=16)
    engine.add(request(max_tokens=99))
    output = outputs(drain(engine))[0]
    assert (len(output.token_ids), output.finish_reason) == (13, "length")
    assert drafter.limits == [8, 2]


def test_requests_of_different_pace_share_rounds_enter_and_leave():
    _, _, engine = speculate(spell(LONG), k=4, wrong=lambda position: position % 5 == 0, slots=3)
    first = [engine.add(request(range(65, 65 + n), max_tokens=4 + 5 * n)) for n in range(1, 8)]
    for _ in range(6):
        engine.step()
    engine.cancel(first[1])
    last = engine.add(request(max_tokens=100))
    done = outputs(drain(engine))
    assert done[last].text == LONG
    for n, request_id in enumerate(first[2:], start=3):
        assert done[request_id].text == LONG[: 4 + 5 * n]

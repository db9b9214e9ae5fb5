"""Followers make the leader's calls, in their order, with their arguments; others are noticed."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time

import numpy as np
import pytest

from ssd_jax.errors import DeviceError, InputError, SsdError
from ssd_jax.placement.hosts import comparing, gathering
from ssd_jax.placement.hosts import follower as followers
from ssd_jax.placement.hosts import leader as leaders
from ssd_jax.placement.hosts.follower import Follower, Replay
from ssd_jax.placement.hosts.leader import Leader
from ssd_jax.placement.hosts.start import STREAM, listen
from ssd_jax.roles.records import SlotOpening, draft_batch
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.tuned_drafter import TunedDrafter
from ssd_jax.speculation.tuner import SpeculationPlan
from ssd_jax.wire.frames import Frames
from ssd_jax.wire.handshake import RefusedError, enter
from ssd_jax.wire.host_messages import Call, Greeting, Refuse, SeenOutcome, decode, encode
from ssd_jax.wire.listener import Limits
from tests.placement.hosts.paired import HOSTS, SILENCE, SLOTS, K, Texts, decoding, joined
from tests.waiting import eventually
from tests.wire.ends import ended

LENGTHS = np.array([4, -1], np.int32)


def rounds(pair, *, mirrored=True):
    """A prompt and two rounds, each with its proposal, and one ahead; all outcomes."""
    params = SamplingParams(temperature=0.5, seed=2**63 + 5, logit_bias={3: 1.5})
    opening = SlotOpening(
        1, params, index=7, banned=[2], ban_before=9, pages=[3, 4], reused=2, bad_word_ids=[[1, 2]]
    )
    pair.target.open(opening)
    pair.target.prefill(1, [5, 6], 0)
    pair.target.set_pages(1, [3, 4, 9])
    if mirrored:
        pair.drafter.open(opening)
        pair.drafter.set_pages(1, [3, 4, 9])
        pair.drafter.prefill(1, [5, 6, 7], 0, last=True)
    found = [pair.target.score(1, [6, 7]).read(), pair.target.prefill_last(1, [7], 2).read()]
    batch = draft_batch(SLOTS, K + 1)._replace(limit=np.array([0, K], np.int32))
    for _ in range(2):
        drafted = (pair.drafter if mirrored else pair.here[1]).propose(batch)
        logits = pair.target.forward(np.array([1, 2], np.int32), LENGTHS, drafted)
        pending = pair.target.accept(logits, pair.drafter.proposal())
        found.append(pending.read())
    ahead = pair.target.accept(pair.target.forward(pending.bonus, LENGTHS))
    return [*found, ahead.read()]


@pytest.mark.parametrize("mirrored", [True, False])
def test_followers_make_the_same_calls(monkeypatch, mirrored):
    with decoding(monkeypatch, mirrored=mirrored) as pair:
        rounds(pair, mirrored=mirrored)
        eventually(lambda: len(pair.there[0].calls) == len(pair.here[0].calls))
        assert pair.there[0].calls == pair.here[0].calls
        assert pair.there[1].calls == (pair.here[1].calls if mirrored else [])
        assert not pair.left


def test_calls_go_on_while_all_load_programs(monkeypatch):
    """The leader waits for its followers, and then makes another engine."""
    with decoding(monkeypatch, mirrored=True) as pair:
        loaded = []
        thread = threading.Thread(
            target=pair.leader.load, args=("logprobs", lambda: loaded.append(True)), daemon=True
        )
        thread.start()
        rounds(pair)
        eventually(lambda: len(pair.there[0].calls) == len(pair.here[0].calls))
        assert loaded
        assert thread.is_alive()
        pair.may_load.set()
        thread.join(60)
        assert not thread.is_alive()
        assert pair.there[0].calls.pop() == ["load", "logprobs"]
        rounds(pair)
        assert pair.leader.new_engine("sd", K, lambda: None)[0] == 1
        eventually(lambda: len(pair.there[0].calls) == len(pair.here[0].calls))
        assert not pair.left


def test_a_host_that_cannot_load_programs_ends_all_with_the_reason(monkeypatch):
    with decoding(monkeypatch, mirrored=True) as pair:
        pair.may_load.set()
        monkeypatch.setattr(pair.there[0], "note", lambda *_: 1 / 0)
        with pytest.raises(SsdError, match=r"host 1 of 2 .* is lost: division by zero"):
            pair.leader.load("logprobs", lambda: None)


def many_rounds(pair):
    for _ in range(50):
        rounds(pair)


def without_first(method):
    """Makes all calls but the first of a method."""

    def fault(replay, monkeypatch):
        works, left = Replay._call, [True]

        def call(self, message):
            if message.method == method and left:
                left.clear()
                return None
            return works(self, message)

        monkeypatch.setattr(Replay, "_call", call)

    return fault


def dropping_a_message(replay, monkeypatch):
    works, count = Replay.make, [0]

    def make(self, call, frame):
        count[0] += 1
        return None if count[0] == 3 else works(self, call, frame)

    monkeypatch.setattr(Replay, "make", make)


def swapping_two(replay, monkeypatch):
    works, replaced = Replay.make, []

    def make(self, call, frame):
        if self.calls.count == 2 and not replaced:
            replaced.append((call, frame))
            return None
        found = works(self, call, frame)
        if replaced:
            works(self, *replaced.pop())
        return found

    monkeypatch.setattr(Replay, "make", make)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (dropping_a_message, "it has made others than the leader"),
        (swapping_two, "it has made others than the leader"),
        (without_first("open"), "its outcome of a round is another than the leader's"),
    ],
)
def test_a_follower_whose_calls_differ_is_noticed(monkeypatch, fault, words):
    fault(Replay, monkeypatch)
    with decoding(monkeypatch, mirrored=True) as pair:
        with pytest.raises(DeviceError, match=words) as raised:
            many_rounds(pair)
        assert "host 1 of 2" in str(raised.value)
        assert words in pair.wait_left()


@pytest.fixture
def behind(monkeypatch):
    """Has followers tell outcomes only once this is set."""
    telling = threading.Event()

    def digest_of(outcomes):
        telling.wait(60)
        return comparing.digest_of(outcomes)

    monkeypatch.setattr(followers, "digest_of", digest_of)
    return telling


def test_outcomes_of_a_host_that_is_behind_are_compared(monkeypatch, behind):
    with decoding(monkeypatch, mirrored=True) as pair:
        pair.there[0].note("on which outcomes depend")
        many_rounds(pair)
        assert not pair.left
        behind.set()
        assert "its outcome of a round is another than the leader's" in pair.wait_left()


def test_a_host_too_far_behind_to_be_compared_is_lost(monkeypatch, behind):
    monkeypatch.setattr(comparing, "MAX_OUTCOMES", 100)
    with decoding(monkeypatch, mirrored=True) as pair:
        with pytest.raises(DeviceError, match=r"host 1 of 2 .* more than 50 outcomes behind"):
            many_rounds(pair)
        behind.set()


def test_outcomes_that_the_leader_does_not_read_are_forgotten(monkeypatch):
    monkeypatch.setattr(comparing, "MAX_OUTCOMES", 100)
    with decoding(monkeypatch, mirrored=True) as pair:
        pair.target.open(SlotOpening(1, SamplingParams()))
        pendings = [pair.target.prefill_last(1, [7], 2) for _ in range(300)]
        eventually(lambda: pair.leader._outcomes._last_dropped > 100)
        for pending in pendings:
            pending.read()
        many_rounds(pair)
        eventually(pair.follower._outcomes.empty)
        assert len(pair.leader._outcomes._digests) <= 100
        assert not pair.left


@pytest.mark.parametrize(
    ("role", "method", "arguments"),
    [
        ("target", "__init__", []),
        ("target", "_call", ["open"]),
        ("engine", "open", []),
        ("engine", "end", [1]),
        ("other", "open", [SlotOpening(1, SamplingParams())]),
        ("target", "open", ["slot 1"]),
        ("target", "prefill", [-1, [5], 0]),
        ("target", "prefill", [1, [5], 0, True]),
        ("drafter", "propose", [[b"no array"]]),
    ],
)
def test_a_follower_makes_listed_calls_alone_with_arguments_of_their_types(role, method, arguments):
    frame = encode(Call(0, 0, role, method, arguments))
    with pytest.raises(OSError, match="it has sent no message"):
        decode(frame)


def test_hosts_take_bonus_tokens_and_logits_of_the_last_call_alone(monkeypatch):
    with decoding(monkeypatch, mirrored=True) as pair:
        pair.target.open(SlotOpening(1, SamplingParams()))
        pair.target.prefill_last(1, [7], 2)
        with pytest.raises(ValueError, match="bonus tokens of the last accept alone"):
            pair.target.forward(object(), LENGTHS)
        pair.target.forward(np.array([1, 2], np.int32), LENGTHS)
        with pytest.raises(ValueError, match="logits of the last forward alone"):
            pair.target.accept("other logits")


def test_an_outcome_of_any_number_of_calls_is_encoded():
    outcome = SeenOutcome(2**31, 5)
    assert decode(encode(outcome)) == outcome


def test_an_error_of_a_follower_ends_all_by_its_name(monkeypatch):
    with decoding(monkeypatch, mirrored=True) as pair:
        pair.there[0].prefill_last = None
        with pytest.raises(DeviceError, match=r"host 1 of 2 .* is lost: 'NoneType'"):
            many_rounds(pair)


def test_a_hanging_program_is_not_waited_for_when_a_host_is_lost(monkeypatch):
    with decoding(monkeypatch, mirrored=True) as pair:
        pair.here[0].forward = lambda *_: threading.Event().wait()
        threading.Timer(0.3, pair.follower._link.close).start()
        with pytest.raises(DeviceError, match=r"host 1 of 2 .* is lost: its connection was closed"):
            rounds(pair)


class Fewer:
    """A tuner that wants two tokens."""

    def plan(self, *, rows, steps):
        return SpeculationPlan(k=2)


@pytest.mark.parametrize("wrong", [False, True])
def test_followers_are_told_what_was_chosen(monkeypatch, wrong):
    """The fault: the leader's drafter is what chooses, behind what followers are told."""
    with decoding(monkeypatch, mirrored=True) as pair:
        drafter = TunedDrafter(pair.drafter, Fewer())
        if wrong:
            pair.drafter._drafter = TunedDrafter(pair.here[1], Fewer())
            drafter = pair.drafter
        drafter.open(SlotOpening(1, SamplingParams()))
        batch = draft_batch(SLOTS, K + 1)._replace(limit=np.array([0, K], np.int32))
        drafter.propose(batch)
        eventually(lambda: len(pair.there[1].calls) == 2)
        assert pair.here[1].calls[-1][3 + 2] == [0, 2]
        assert (pair.there[1].calls == pair.here[1].calls) is not wrong


def test_followers_give_up_what_was_only_measured(monkeypatch):
    with decoding(monkeypatch, mirrored=True) as pair:
        pair.target.close()
        with contextlib.suppress(DeviceError):
            pair.target.open(SlotOpening(1, SamplingParams()))
        assert "host 1 of 2" in (why := pair.wait_left())
        assert why.endswith("is lost: 0")  # there is no such engine


def test_unread_outcomes_do_not_make_a_host_lost(monkeypatch):
    with decoding(monkeypatch, mirrored=True) as pair:
        rounds(pair)
        pair.leader.close()
        eventually(lambda: pair.follower._ended)
        pair.follower._outcomes.put((99, pair.there[0].pending()))
        eventually(pair.follower._outcomes.empty)
        time.sleep(1)  # longer than `_REPORT_WAIT`
        assert not pair.left


def test_a_leader_that_takes_no_more_before_it_is_heard_to_end_is_not_lost(monkeypatch):
    """Its end of the connection may be gone while what it said last is on its way."""

    def gone(frame):
        if frame:  # no beat
            raise BrokenPipeError

    with decoding(monkeypatch, mirrored=True) as pair:
        monkeypatch.setattr(pair.follower._link, "send", gone)
        pair.follower._outcomes.put((99, pair.there[0].pending()))
        eventually(pair.follower._outcomes.empty)
        pair.leader.close()
        eventually(lambda: pair.follower._ended)
        time.sleep(1)  # longer than `_REPORT_WAIT`
        assert not pair.left


def test_hosts_that_tell_other_facts_end_with_one_message(monkeypatch):
    left: list[str] = []
    with joined(monkeypatch, left) as (leader, follower):
        message = (
            "hosts differ in jax: host 0 of 2 .* has 1, host 1 of 2 .* has 2; make them the same"
        )
        thread = threading.Thread(target=follower.agree, args=({"jax": 2},), daemon=True)
        thread.start()
        with pytest.raises(InputError, match=message) as raised:
            leader.agree({"jax": 1})
        eventually(lambda: left)
        assert left == [str(raised.value)]


def test_a_host_that_cannot_go_on_is_named_to_all(monkeypatch):
    left: list[str] = []
    with joined(monkeypatch, left) as (leader, follower):
        threading.Thread(
            target=follower.fail, args=(InputError("no such file"),), daemon=True
        ).start()
        with pytest.raises(InputError, match=r"host 1 of 2 \(.*\): no such file"):
            leader.agree({})


def test_a_leader_does_not_end_before_all_are_told_why(monkeypatch):
    """Its main thread hears of a failure while another thread still tells the followers."""
    left: list[str] = []
    with joined(monkeypatch, left) as (leader, follower):
        tell = leader._send_to

        def tell_late(index, frame):
            time.sleep(0.05)
            left.append("told")
            tell(index, frame)

        monkeypatch.setattr(leader, "_send_to", tell_late)
        error = InputError("no such model")
        threading.Thread(target=follower.fail, args=(error,), daemon=True).start()
        eventually(lambda: leader._state.failure is not None)
        threading.Thread(target=leader._at_exit, daemon=True).start()
        eventually(lambda: len(left) == 3)
    assert left[0] == "told"


def test_strangers_are_sent_away_and_the_follower_comes(monkeypatch, caplog):
    monkeypatch.setattr(gathering, "_LIMITS", Limits(seconds=1.5))
    monkeypatch.setattr(gathering, "_GREETING_SECONDS", 1.0)
    texts, made = Texts(), []
    thread = threading.Thread(target=lambda: made.append(Leader(texts.job(0), HOSTS, 60.0)))
    thread.start()
    host, port, token = texts.of(STREAM).get(timeout=60).split(" ")
    strangers = []
    for message in (b"GET / HTTP/1.1\r\n\r\n", b""):
        strangers.append(socket.create_connection((host, int(port))))
        strangers[-1].sendall(message)
    greetings = [
        encode(Refuse("no")),
        encode(Greeting(2, "me")),
        b"\xff" * 9,
        b"x" * 2**13,  # no greeting is so long
        None,  # says nothing
    ]
    links = []
    for known, greeting in [("guess", None), *((token, secret) for secret in greetings)]:
        links.append(Frames(socket.create_connection((host, int(port))), 60.0))
        with contextlib.suppress(RefusedError):
            enter(links[-1], known.encode(), 60.0)
            if greeting is not None:
                links[-1].send(greeting)
    for link in links:
        with pytest.raises(OSError, match=r"closed|reset"):
            link.receive()
    assert all(ended(stranger) for stranger in strangers)
    assert not made
    follower = Frames(socket.create_connection((host, int(port))), 60.0)
    enter(follower, token.encode(), 60.0)
    follower.send(encode(Greeting(1, "me")))
    thread.join(60)
    assert made
    made[0].close()
    for why in ("another protocol", "said nothing", "does not know the token", "waited for"):
        assert sum(why in line for line in caplog.messages) == 1, caplog.messages


@pytest.mark.more
def test_a_follower_is_kept_while_strangers_are_silent_and_others_come():
    """Each stranger may be silent for longer than the follower waits for a sign of life."""
    texts, timeout, left, made = Texts(), 2.0, [], []
    hosts = dataclasses.replace(HOSTS, count=3)
    thread = threading.Thread(
        target=lambda: made.append(
            Leader(texts.job(0, 3), hosts, timeout, leave=lambda *why: left.append(why))
        )
    )
    thread.start()
    host, port, _ = texts.of(STREAM).get(timeout=60).split(" ")
    with socket.create_connection((host, int(port))):
        first = Follower(texts.job(1, 3), hosts, timeout, leave=lambda *why: left.append(why))
        time.sleep(1.5 * timeout)
        second = Follower(texts.job(2, 3), hosts, timeout, leave=lambda *why: left.append(why))
        thread.join(60)
    assert made
    assert not left
    made[0].close()
    for peer in (first, second):
        peer.close()


def test_a_host_that_takes_nothing_holds_up_no_other_from_ending(monkeypatch):
    texts, timeout, left, made = Texts(), 4.0, {}, []
    hosts = dataclasses.replace(HOSTS, count=3)

    def leave(index):
        return lambda why, _status: left.setdefault(index, why)

    thread = threading.Thread(
        target=lambda: made.append(Leader(texts.job(0, 3), hosts, timeout, leave=leave(0)))
    )
    thread.start()
    both = [Follower(texts.job(i, 3), hosts, timeout, leave=leave(i)) for i in (1, 2)]
    thread.join(60)
    (leader,) = made
    leaders.atexit.unregister(leader._at_exit)
    with monkeypatch.context() as busy:
        busy.setattr(leader._gathering.hosts[1].link, "send", lambda *_: threading.Event().wait())
        threading.Thread(target=leader._lose_host, args=(1, "it was silent"), daemon=True).start()
        eventually(lambda: left.keys() >= {0, 2})
    assert left[0] == left[2]
    assert left[0].endswith("is lost: it was silent")
    for peer in both:
        peer.close()


@pytest.mark.parametrize("number", ["::1", "127.0.0.1"])
def test_a_leader_is_reached_by_each_kind_of_address_of_its_name(monkeypatch, number):
    found = socket.getaddrinfo
    try:
        listen(number, 0, "").socket.close()
    except OSError:
        pytest.skip(f"this machine has no {number}")

    def only(host, port, *about, **more):
        return found(number if host == "leader.example" else host, port, *about, **more)

    monkeypatch.setattr(socket, "getaddrinfo", only)
    texts, made = Texts(), []
    jobs = [dataclasses.replace(texts.job(i), address="leader.example:1") for i in (0, 1)]
    thread = threading.Thread(target=lambda: made.append(Leader(jobs[0], HOSTS, SILENCE)))
    thread.start()
    follower = Follower(jobs[1], HOSTS, SILENCE)
    thread.join(60)
    made[0].close()
    follower.close()


@pytest.mark.more
def test_followers_are_told_who_has_not_come():
    texts, left = Texts(), []
    hosts = dataclasses.replace(HOSTS, count=3, joining=1)
    thread = threading.Thread(
        target=Follower,
        args=(texts.job(1, 3), hosts, SILENCE),
        kwargs={"leave": lambda *why: left.append(why)},
    )
    thread.start()
    with pytest.raises(InputError, match=r"processes \[2\] have not come") as raised:
        Leader(texts.job(0, 3), hosts, SILENCE, leave=lambda *_: None)
    eventually(lambda: left)
    assert left[0] == (str(raised.value), InputError.exit_status)


def test_a_follower_that_is_lost_while_others_come_ends_the_start():
    texts = Texts()
    hosts = dataclasses.replace(HOSTS, count=3)

    def come_and_go():
        Follower(texts.job(1, 3), hosts, SILENCE, leave=lambda *_: None).close()

    threading.Thread(target=come_and_go).start()
    with pytest.raises(SsdError, match=r"host 1 of 3 .* is lost: its connection was closed"):
        Leader(texts.job(0, 3), hosts, SILENCE, leave=lambda *_: None)


def test_a_leader_that_is_closed_ends_the_wait_of_another_thread(monkeypatch):
    found: list[BaseException] = []

    def wait(leader):
        try:
            leader.agree({})
        except SsdError as error:
            found.append(error)

    with joined(monkeypatch, []) as (leader, _follower):
        thread = threading.Thread(target=wait, args=(leader,), daemon=True)
        thread.start()
        leader.close()
        thread.join(30)
        assert not thread.is_alive()
    assert "closed" in str(found[0])


def test_a_leader_that_cannot_make_an_engine_ends_all_with_the_reason(monkeypatch):
    def make():
        raise InputError("the draft cannot be read")

    left: list[str] = []
    with joined(monkeypatch, left) as (leader, _follower):
        with pytest.raises(InputError, match="the draft cannot be read"):
            leader.new_engine("sd", 2, make)
        with pytest.raises(DeviceError, match="the draft cannot be read"):
            leader.new_engine("ar", 0, lambda: None)

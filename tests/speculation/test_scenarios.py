"""Whatever comes together, every request says what plain decoding says: pages that run out, prompts
that begin alike, cancels, faults of roles, branches that are late, plans and modes that change."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.tuned_drafter import TunedDrafter
from ssd_jax.testing.fakes import Clock, FakeDrafter, Letters
from tests.fakes.branching import FakeBranchingDraft
from tests.fakes.instrument import At, instrument
from tests.fakes.paces import Moody
from tests.fakes.paged import SIZE, Paged
from tests.fakes.repeatable import RepeatableDrafter, RepeatableTarget
from tests.fakes.tuners import Restless
from tests.fakes.whimsical import Whimsical
from tests.speculation.watched import EOS, ssd

CONTEXT, BUDGET = 32, 8
WORDS = "now and again and then again, so it goes; "
TARGETS = ["prefill", "prefill_last", "forward", "accept", "read", "set_pages"]
BRANCHINGS = ["prefill", "promote", "draft", "tokens", "expand", "proposal", "branch_tokens"]


def script(prompt, position):
    """Repeats itself, and may end."""
    value = (7 * sum(prompt) + ord(WORDS[position % len(WORDS)])) % 97
    return EOS if value < 3 else 33 + value % 90


class OutOfOrderError(Exception):
    """What a role raises."""


@dataclasses.dataclass
class Scenario:
    """What comes together.

    Attributes:
      spare: pages of each group beyond those that one request may need.
      requests: each with the steps that it comes after the one before.
      cancels: by step, an index of `requests` and whether it ends silently.
      fault: a role, its call that raises, which one, and whether when it was done.
      gives_up: those that run are cancelled at the fault.
      wrong: the draft is at positions that this divides; 0 is never.
      rank: of the right bonus token, which the position is divided by; 0 is nowhere.
      late: branches of every so many-th expansion do not come; 0 is none.
      restless: seed of plans that change; None is one plan.
      planned: seed of modes that change; None is one mode.
    """

    mode: str
    slots: int
    groups: int
    k: int
    spare: int
    grain: int
    grows: bool
    requests: list[tuple[int, Request]]
    cancels: dict[int, tuple[int, bool]]
    fault: tuple[str, str, int, bool] | None
    gives_up: bool
    wrong: int
    rank: int
    late: int
    restless: int | None
    planned: int | None
    remote: bool
    fan_out: str
    backup: str
    pace: int | None

    @property
    def foreseen(self):
        """Whether the draft has a branch for every outcome."""
        scripted = self.wrong, self.rank, self.late, self.fault, self.fan_out
        return scripted == (0, 1, 0, None, "uniform")


@st.composite
def requests(draw):
    first, size, last = draw(
        st.tuples(st.integers(65, 66), st.integers(0, 17), st.integers(65, 69))
    )
    prompt = [first] * size + [last]
    most = draw(st.sampled_from([20, 99, 5, 99, 20, 2, 1]))
    places = st.sampled_from([None, None, None, 1, 4, 12])
    stop, stop_id = draw(places), draw(places)
    begin = len(prompt) + (stop or 0)
    word = Letters().push([script(prompt, begin), script(prompt, begin + 1)])
    params = SamplingParams(
        max_tokens=most,
        min_tokens=draw(st.just(0) | st.integers(0, min(most, 9))),
        stop=(word,) if stop is not None and word else (),
        stop_token_ids=() if stop_id is None else (script(prompt, len(prompt) + stop_id),),
        ignore_eos=draw(st.booleans()),
    )
    more = {
        "k": draw(st.sampled_from([None, None, None, 0, 1, 2])),
        "branches": draw(st.sampled_from([None, None, False])),
    }
    return draw(st.sampled_from([0, 0, 1, 4])), Request(prompt_ids=prompt, params=params, **more)


FAULTS = st.tuples(
    st.just("target"), st.sampled_from(TARGETS), st.integers(1, 25), st.booleans()
) | st.tuples(st.just("draft"), st.sampled_from(BRANCHINGS), st.integers(1, 15), st.just(False))
SHAPES = st.sampled_from([(3, 1), (2, 1), (4, 1), (4, 2), (1, 1)])
SCENARIOS = SHAPES.flatmap(
    lambda shape: st.builds(
        Scenario,
        mode=st.sampled_from(["ssd", "ssd", "ssd", "sd", "tuned", "ar"]),
        slots=st.just(shape[0]),
        groups=st.just(shape[1]),
        k=st.integers(1, 4),
        spare=st.sampled_from([0, 0, 1, 2, 5]),
        grain=st.sampled_from([SIZE, 0, 2 * SIZE]),
        grows=st.sampled_from([True, True, True, False]),
        requests=st.lists(requests(), min_size=4, max_size=9),
        cancels=st.dictionaries(
            st.integers(1, 30), st.tuples(st.integers(0, 6), st.booleans()), max_size=2
        ),
        fault=st.none() | FAULTS,
        gives_up=st.booleans(),
        wrong=st.sampled_from([0, 2, 3, 5]),
        rank=st.sampled_from([0, 1, 3, 9]),
        late=st.sampled_from([0, 0, 2, 3]),
        restless=st.none() | st.integers(0, 9),
        planned=st.none() | st.integers(0, 9),
        remote=st.booleans(),
        fan_out=st.sampled_from(["uniform", "geometric", "measured", "confidence"]),
        backup=st.sampled_from(["none", "ngram", "random", "draft", "auto"]),
        pace=st.none() | st.integers(0, 9),
    )
)


class RepeatablePaged(RepeatableTarget, Paged):
    """Has pages, and takes what it is told again."""

    def set_pages(self, slot, pages):
        if tuple(pages) != self.pages[slot]:
            super().set_pages(slot, pages)


class Late(FakeBranchingDraft):
    """Does not tell the branches of every so many-th expansion."""

    def __init__(self, *args, late, **kwargs):
        super().__init__(*args, **kwargs)
        self._late = late

    def branch_tokens(self, forwards, until=None):
        late = self._late and len(self.expansions) % self._late == 0
        return "late" if late else super().branch_tokens(1)


def made(case):
    """The engine, its pages, and roles that are told of them."""
    stock = PageStock(slots=case.slots, count=(CONTEXT // SIZE + case.spare) * case.groups,
                      size=SIZE, beyond=1 if case.mode == "ar" else case.k + 1, context=CONTEXT,
                      groups=case.groups, grain=case.grain, grows=case.grows)  # fmt: skip
    roles = []

    def faulty(kind, role):
        def make(*args, **kwargs):
            roles.append(kind(*args, **kwargs))
            who, call, at, after = case.fault or ("", "", 0, False)
            if who == role:
                instrument(roles[-1], fail={call: At(at, OutOfOrderError())}, after=after)
            return roles[-1]

        return make

    verifies = RepeatablePaged if case.fault else Paged  # which takes nothing twice
    wrong = lambda at: bool(case.wrong) and at % case.wrong == 0  # noqa: E731
    rank = lambda prompt, at: at % case.rank if case.rank else None  # noqa: E731
    ks = range(1, case.k + 1)
    tuner = None if case.restless is None else Restless(ks, [BUDGET], case.restless)
    if case.mode == "ssd":
        parts = ssd(script, slots=case.slots, context=CONTEXT, k=case.k, budget=BUDGET,
                    fan_out=case.fan_out, backup=case.backup, remote=case.remote, pages=stock,
                    pace=None if case.pace is None else Moody(case.pace), tuner=tuner,
                    target=faulty(verifies, "target"), draft=faulty(Late, "draft"), rank=rank,
                    wrong=wrong, late=case.late)  # fmt: skip
        return parts.engine, stock, roles
    target = faulty(verifies, "target")(script, slots=case.slots, context=CONTEXT)
    drafter = (RepeatableDrafter if case.fault else FakeDrafter)(
        script, slots=case.slots, k=case.k, wrong=wrong
    )
    drafter.asks_first = case.remote
    if case.mode == "tuned":
        drafter = TunedDrafter(drafter, tuner or Restless(ks, [BUDGET]))
    engine = Engine(target, Letters, frozenset({EOS}), clock=Clock(), pages=stock,
                    drafter=None if case.mode == "ar" else drafter)  # fmt: skip
    return engine, stock, roles


def plain(asked):
    """Tokens, text and reason of decoding one by one."""
    params, prompt, limit = asked.params, list(asked.prompt_ids), CONTEXT - len(asked.prompt_ids)
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    tokens, texts = [], [""]
    for at in range(len(prompt), len(prompt) + min(params.max_tokens, limit)):
        tokens.append(script(prompt, at))
        if tokens[-1] in ends and len(tokens) > params.min_tokens:
            return tokens, texts[-1], "stop"
        texts.append(texts[-1] + Letters().push(tokens[-1:]))
        least = len(texts[min(params.min_tokens, len(tokens))])
        for cut in [texts[-1].find(word, least) for word in params.stop]:
            if cut >= 0:
                length = max(sum(len(text) < cut for text in texts), params.min_tokens)
                return tokens[:length], texts[-1][:cut], "stop"
    return tokens, texts[-1], "length"


def run(case, engine, roles):
    """Events, requests by id, and the ids of those that end silently."""
    left, events, asked, silent, due = [*case.requests], [], {}, set(), 0
    for step in range(2000):
        while left and (step >= due + left[0][0] or not engine.has_work):
            _, arrival = left.pop(0)
            arrival = dataclasses.replace(arrival, k=arrival.k and min(arrival.k, engine.k))
            asked[engine.add(arrival)], due = arrival, step
        if not engine.has_work:
            return events, asked, silent
        number, silently = case.cancels.get(step, (-1, False))
        if silently and number in {state.request_id for state in engine._seats.all}:
            silent.add(number)
        for _ in range(2):  # the second means nothing
            engine.cancel(number, silent=silently)
        try:
            events += engine.step()
        except OutOfOrderError:
            for state in [*engine._running.values()] if case.gives_up else ():
                engine.cancel(state.request_id)
        else:
            assert all(role.pages == roles[0].pages for role in roles), "told of other pages"
    raise AssertionError("the engine does not come to an end")


def assert_plain(case, asked, events):
    """What one request has come to."""
    tokens, text, reason = plain(asked)
    *before, last = events
    output, metrics = last.output, last.output.metrics
    assert not any(event.output for event in before)
    assert [token for event in events for token in event.token_ids] == output.token_ids
    assert "".join(event.text for event in events) == output.text
    if output.finish_reason == "cancelled":
        # It may have the beginning of a stop string, which nobody will see the end of.
        begin = len(asked.prompt_ids)
        token_ids = [script(asked.prompt_ids, begin + n) for n in range(len(output.token_ids))]
        assert (output.token_ids, output.text) == (token_ids, Letters().push(token_ids))
    else:
        assert (output.token_ids, output.text, output.finish_reason) == (tokens, text, reason)
    histogram = metrics["acceptance_histogram"]
    if histogram is None:
        assert case.mode == "ar" or asked.k == 0 or len(output.token_ids) < 2
        return
    assert not (case.foreseen and "miss" in (metrics["miss_causes"] or {}))
    assert sum(n * count for n, count in enumerate(histogram, 1)) == len(output.token_ids) - 1
    right = case.wrong == 0 and (case.mode != "ssd" or case.backup not in ("ngram", "random"))
    assert not right or all(good == judged for good, judged in metrics["acceptance_by_position"])


def assert_left_as_it_was(case, engine, stock):
    assert engine._seats.offer() is None  # frees the slots
    pages = CONTEXT // SIZE + case.spare
    for index, group in enumerate(stock._groups):
        assert sorted([*group.free, *group.cached]) == [*range(index * pages, (index + 1) * pages)]
        assert not any(group.users.values())
        assert {*group.names} == {*group.cached}
        assert {page: name for name, page in group.by_name.items()} == group.names
    assert not stock._by_slot
    assert not engine._seats.all


def check(case):
    engine, stock, roles = made(case)
    if case.planned is not None and case.mode != "ar":
        engine._planner = Whimsical(case.planned)
    events, asked, silent = run(case, engine, roles)
    for number, request in asked.items():
        of_request = [event for event in events if event.request_id == number]
        if number in silent:
            assert not any(event.output for event in of_request)
        else:
            assert_plain(case, request, of_request)
    assert_left_as_it_was(case, engine, stock)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(case=SCENARIOS)
def test_every_request_says_what_plain_decoding_says(case):
    check(case)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(case=SCENARIOS)
def test_a_draft_that_is_always_right_never_misses_and_is_never_rejected(case):
    right = {"wrong": 0, "rank": 1, "late": 0, "fault": None, "fan_out": "uniform"}
    check(dataclasses.replace(case, mode="ssd", backup="draft", **right))


@pytest.mark.more
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(case=SCENARIOS)
def test_every_request_of_many_scenarios_says_what_plain_decoding_says(case):
    check(case)

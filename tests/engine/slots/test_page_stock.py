"""Which request has which pages: none writes another's, none waits for ever, all come back."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ssd_jax.engine.slots.page_stock import PageStock
from tests.engine.slots.flawed_stocks import Early, Uncounted

SIZE, BEYOND, CONTEXT = 4, 3, 40
WINDOW = 6


def stock(count, slots=4, groups=1, grain=0, kind=PageStock, window=None):
    return kind(
        slots=slots,
        count=count,
        size=SIZE,
        beyond=BEYOND,
        context=CONTEXT,
        groups=groups,
        grain=grain,
        window=window,
    )


@pytest.mark.parametrize(
    ("tokens", "pages"), [(1, 1), (2, 2), (5, 2), (6, 3), (36, 10), (40, 10), (10**9, 10)]
)
def test_a_request_gets_room_for_all_that_rounds_may_write(tokens, pages):
    """No more than its context has: nothing is written behind that."""
    assert stock(10).needed(tokens) == pages
    assert len(stock(10).take(0, tokens).pages) == pages


def test_groups_have_pages_of_their_own():
    both = stock(8, slots=4, groups=2)
    assert set(both.take(0, 13).pages) == {0, 1, 2, 3}
    assert both.take(1, 1) is None
    assert set(both.take(2, 13).pages) == {4, 5, 6, 7}
    both.give_back(0)
    both.give_back(1)  # has nothing
    assert both.take(1, 13) is not None


def enter(some, slot, prompt, output=1, filled=None):
    """Takes pages for a prompt; fills all of it, or as many positions."""
    taken = some.take(slot, len(prompt) + output, some.names(prompt))
    if taken is not None:
        some.fill(slot, len(prompt) if filled is None else filled)
    return taken


def test_the_beginning_of_a_prompt_is_reused_but_never_its_last_token():
    some, text = stock(24, grain=SIZE), [*range(12)]
    first = enter(some, 0, text)
    same = enter(some, 1, text)
    assert (first.reused, same.reused) == (0, 8)
    assert same.pages[:2] == first.pages[:2]
    assert not {*same.pages[2:]} & {*first.pages}
    assert enter(some, 2, [*text[:8], 99]).reused == 8
    assert enter(some, 3, [*text[:6], 99, 99, 99]).reused == 4
    for slot in range(4):
        some.give_back(slot)
    assert enter(some, 0, [*text, 12]).reused == 8, "the page of the last token is its own"
    assert enter(some, 1, [99, *text[1:]]).reused == 0
    assert enter(some, 2, [99, 99, 99, 99, *text[4:]]).reused == 0, "the same page elsewhere"


def test_only_filled_pages_are_reused_and_none_without_a_grain():
    some, text = stock(24, grain=SIZE), [*range(12)]
    enter(some, 0, text, filled=7)
    assert enter(some, 1, text, filled=0).reused == 4
    assert stock(24).names(text) == ()
    assert not stock(24).shares


def test_pages_are_reused_in_grains():
    some, text = stock(40, slots=5, grain=2 * SIZE), [*range(20)]
    assert len(some.names(text)) == 4
    enter(some, 0, text, filled=12)
    assert enter(some, 1, text, filled=0).reused == 8
    assert enter(some, 2, text[:8], filled=8).reused == 0
    assert enter(some, 3, text[:9]).reused == 8


def test_cached_pages_are_evicted_last_and_the_oldest_first():
    some = stock(7, slots=2, grain=SIZE)
    old, young = [1] * 9, [2] * 5
    enter(some, 0, old)  # four pages, two of them known
    enter(some, 1, young)  # three, one of them known
    some.give_back(0)
    some.give_back(1)
    taken = enter(some, 0, [3] * 5, output=4)  # three that nobody knows
    assert taken.reused == 0
    some.give_back(0)
    assert enter(some, 0, young).reused == 4
    some.give_back(0)
    assert enter(some, 0, [4], output=12).reused == 0  # four, the oldest known one among them
    some.give_back(0)
    assert enter(some, 0, old).reused == 4, "the end of a text goes before its beginning"


def test_groups_reuse_no_pages_of_each_other():
    both, text = stock(16, slots=4, groups=2, grain=SIZE), [*range(9)]
    enter(both, 0, text)
    assert enter(both, 2, text).reused == 0
    assert enter(both, 1, text).reused == 8


def test_a_text_that_grows_gets_more_pages_while_there_are_any():
    some = stock(6, slots=2)
    first, second = some.take(0, 5).pages, some.take(1, 1).pages
    assert some.grow(0, 5)
    assert some.pages(0) == first
    assert some.grow(0, 13)
    assert some.pages(0)[:2] == first
    assert not {*some.pages(0)} & {*second}
    assert not some.grow(1, 14)
    assert some.pages(1) == second
    some.give_back(0)
    assert some.grow(1, 14)


def test_pages_are_left_for_requests_that_run():
    some = stock(6, slots=2)
    assert some.take(0, 5, spare=4).pages
    assert some.take(1, 9, spare=2) is None
    assert some.take(1, 9, spare=1).pages


def test_pages_that_no_query_sees_are_for_others():
    some = stock(6, slots=2, window=WINDOW)
    pages = some.take(0, 20).pages
    some.release_hidden(0, SIZE + WINDOW - 2)
    assert some.used == 6, "the query sees the last position of the first page"
    some.release_hidden(0, SIZE + WINDOW - 1)
    assert some.used == 5
    assert some.take(1, 1).pages == pages[:1]
    some.give_back(0)
    assert some.used == 1
    everything = stock(6)
    everything.take(0, 20)
    everything.release_hidden(0, 20)
    assert everything.used == 6, "without a window all is seen"


def test_pages_of_a_prompt_are_reused_after_their_text_no_longer_sees_them():
    some, text = stock(12, grain=SIZE, window=WINDOW), [*range(17)]
    pages = enter(some, 0, text, filled=2 * SIZE).pages
    some.release_hidden(0, 30)
    assert some.used == len(pages) - 2, "others may yet reuse those that are not filled"
    some.fill(0, 17)
    some.release_hidden(0, 30)
    assert some.used == 0
    assert enter(some, 1, text).pages[:4] == pages[:4]


class Life:
    """Requests with prompts and pages.

    `written` is what devices would have in each page: the tokens up to its end, or None where a
    request has not filled it.
    """

    def __init__(self, kind=PageStock, pages_per_slot=8, window=None) -> None:
        self.stock = stock(
            2 * pages_per_slot, slots=6, groups=2, grain=SIZE, kind=kind, window=window
        )
        self.pages_per_slot, self.held, self.prompts, self.filled = pages_per_slot, {}, {}, {}
        self.written = dict.fromkeys(range(2 * pages_per_slot))
        self.window, self.released = window, {}

    @property
    def used(self):
        held = self.held.items()
        return {page for slot, pages in held for page in pages[self.released[slot] :]}

    def enter(self, slot, prompt, output=1):
        tokens = len(prompt) + output
        taken = self.stock.take(slot, tokens, self.stock.names(prompt))
        group = range(
            self.pages_per_slot * (slot // 3),
            self.pages_per_slot * (slot // 3) + self.pages_per_slot,
        )
        used = self.used & {*group}
        needed = self.stock.needed(tokens)
        if taken is None:
            assert needed > self.pages_per_slot - len(used)
            return
        pages, reused = taken
        count = reused // SIZE
        assert reused % SIZE == 0
        assert reused < len(prompt)
        assert {*pages} <= {*group}
        assert len({*pages}) == len(pages) == needed
        assert not {*pages[count:]} & used, "a page of its own is another's"
        for index in range(count):
            assert self.written[pages[index]] == prompt[: (index + 1) * SIZE], "another text's"
        for page in pages[count:]:
            self.written[page] = None
        self.held[slot], self.prompts[slot], self.filled[slot] = pages, prompt, reused
        self.released[slot] = 0

    def fill(self, slot, end=None):
        prompt = self.prompts[slot]
        end = len(prompt) if end is None else end
        for index in range(self.filled[slot] // SIZE, end // SIZE):
            self.written[self.held[slot][index]] = prompt[: (index + 1) * SIZE]
        self.stock.fill(slot, end)
        self.filled[slot] = end

    def grow(self, slot, tokens):
        had, needed = self.held[slot], self.stock.needed(tokens)
        used = self.used
        grown = self.stock.grow(slot, tokens)
        pages = self.held[slot] = self.stock.pages(slot)
        assert pages[: len(had)] == had
        more = {*pages[len(had) :]}
        assert len(pages) == len(had) + len(more)
        assert len(pages) == (max(needed, len(had)) if grown else len(had))
        assert not more & used, "a page of its own is another's"
        group = range(
            self.pages_per_slot * (slot // 3),
            self.pages_per_slot * (slot // 3) + self.pages_per_slot,
        )
        assert more <= {*group}
        if not grown:
            assert needed - len(had) > len({*group} - used)
            assert not more
        for page in more:
            self.written[page] = None

    def advance(self, slot, position):
        prompt, filled = self.prompts[slot], self.filled[slot]
        self.stock.release_hidden(slot, position if filled == len(prompt) else filled)
        if self.window is not None:
            position = position if filled == len(prompt) else filled
            end = max(position - self.window + 1, 0) // SIZE
            self.released[slot] = max(self.released[slot], min(end, len(self.held[slot])))
        assert self.stock.used == len(self.used)

    def leave(self, slot):
        del self.held[slot]
        self.stock.give_back(slot)
        assert self.stock.used == len(self.used)


class Requests(RuleBasedStateMachine):
    """Requests enter free slots, fill their pages and leave them, in any order. A few tokens make
    many prompts that begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Life()

    @initialize(window=st.sampled_from([None, WINDOW]))
    def begin(self, window):
        self.life = Life(window=window)

    @rule(
        slot=st.integers(0, 5),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20) | st.just([0] * 13),
        output=st.integers(1, 10),
    )
    def enter(self, slot, prompt, output):
        if slot not in self.life.held:
            self.life.enter(slot, prompt, output)

    @precondition(lambda self: self.life.held)
    @rule(data=st.data())
    def fill(self, data):
        slot = data.draw(st.sampled_from(sorted(self.life.held)))
        most = len(self.life.prompts[slot])
        self.life.fill(slot, data.draw(st.just(most) | st.integers(self.life.filled[slot], most)))

    @precondition(lambda self: self.life.held)
    @rule(data=st.data(), tokens=st.integers(1, 40))
    def grow(self, data, tokens):
        self.life.grow(data.draw(st.sampled_from(sorted(self.life.held))), tokens)

    @precondition(lambda self: self.life.held)
    @rule(data=st.data(), position=st.integers(0, 40))
    def advance(self, data, position):
        self.life.advance(data.draw(st.sampled_from(sorted(self.life.held))), position)

    @precondition(lambda self: self.life.held)
    @rule(data=st.data())
    def leave(self, data):
        self.life.leave(data.draw(st.sampled_from(sorted(self.life.held))))


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class Unchained(PageStock):
    """Knows a page by its own tokens alone."""

    def names(self, prompt):
        pages = range((len(prompt) - 1) // SIZE)
        return tuple(bytes(prompt[page * SIZE : (page + 1) * SIZE]) for page in pages)


class WithTheLast(PageStock):
    """Shares the page of a prompt's last token, which is written again."""

    def names(self, prompt):
        ends = range(SIZE, len(prompt) + SIZE, SIZE)
        return tuple(hashlib.sha256(bytes(prompt[:end])).digest() for end in ends)


class Forgetful(PageStock):
    """Gives pages to others and goes on to know them as what they were."""

    def take(self, slot, tokens, names=(), spare=0, *, reuses=True):
        before = dict(self._group(slot).by_name)
        taken = super().take(slot, tokens, names, spare, reuses=reuses)
        self._group(slot).by_name.update(before)
        self._group(slot).names.update({page: name for name, page in before.items()})
        return taken


class Taking(PageStock):
    """Lets a text grow into pages of others."""

    def grow(self, slot, tokens):
        held = self._by_slot[slot]
        more = [page for page in range(20) if page not in held.pages]
        held.pages = (*held.pages, *more[: max(self.needed(tokens) - len(held.pages), 0)])
        return True


def live(kind):
    """A life in which each of the faults above shows."""
    life = Life(kind, pages_per_slot=10)
    first, other = [0] * 4 + [1] * 4 + [0] * 4, [1] * 4 + [0] * 8
    life.enter(0, first)
    life.enter(1, first)
    life.leave(1)
    life.fill(0)
    life.enter(1, other)
    life.leave(1)
    life.enter(1, first)
    life.leave(0)
    life.enter(2, other, output=13)  # seven pages, of six that nobody has
    life.enter(0, other, output=9)
    life.grow(0, 28)
    life.grow(0, 40)
    life.fill(0)
    life.leave(0)
    life.leave(1)
    life.enter(0, [2] * 25, output=10)
    life.leave(0)
    life.enter(0, first)
    life.leave(0)
    life.enter(0, other)


def test_the_stock_passes_the_walk_that_planted_faults_fail():
    live(PageStock)


@pytest.mark.parametrize("flaw", [Early, Unchained, Uncounted, WithTheLast, Forgetful, Taking])
def test_planted_faults_of_a_stock_are_caught(flaw):
    with pytest.raises((AssertionError, KeyError)):
        live(flaw)

"""Which request has which pages: none has another's, none waits for ever, all come back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ssd_jax.engine.page_stock import PageStock
from ssd_jax.errors import InputError

SIZE, BEYOND, CONTEXT = 4, 3, 40


def stock(count, slots=4, groups=1):
    return PageStock(
        slots=slots, count=count, size=SIZE, beyond=BEYOND, context=CONTEXT, groups=groups
    )


@pytest.mark.parametrize(
    ("tokens", "pages"), [(1, 1), (2, 2), (5, 2), (6, 3), (36, 10), (40, 10), (10**9, 10)]
)
def test_a_request_gets_room_for_all_that_rounds_may_write(tokens, pages):
    """No more than its context has: nothing is written behind that."""
    assert stock(10).needed(tokens) == pages
    assert len(stock(10).take(0, tokens)) == pages


def test_a_request_that_no_stock_can_serve_is_refused_with_figures():
    small = stock(6, groups=2)
    small.check(6)
    with pytest.raises(InputError, match=r"of 7 tokens .* need 3 pages of 4 .* there are 2; lower"):
        stock(4, groups=2).check(7)


def test_groups_have_pages_of_their_own():
    both = stock(8, slots=4, groups=2)
    assert set(both.take(0, 13)) == {0, 1, 2, 3}
    assert both.take(1, 1) is None
    assert set(both.take(2, 13)) == {4, 5, 6, 7}
    both.give_back(0)
    both.give_back(1)  # has nothing
    assert both.take(1, 13) is not None


class Requests(RuleBasedStateMachine):
    """Requests enter free slots and leave them, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.stock, self.held = stock(24, slots=6, groups=2), {}

    @rule(slot=st.integers(0, 5), tokens=st.integers(1, 60))
    def enter(self, slot, tokens):
        if slot in self.held:
            return
        pages = self.stock.take(slot, tokens)
        group = range(12 * (slot // 3), 12 * (slot // 3) + 12)
        free = [p for p in group if not any(p in each for each in self.held.values())]
        assert (pages is None) == (self.stock.needed(tokens) > len(free))
        if pages is not None:
            assert set(pages) <= {*free}
            assert len({*pages}) == len(pages) == self.stock.needed(tokens)
            self.held[slot] = pages

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data):
        slot = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[slot]
        self.stock.give_back(slot)

    @invariant()
    def nobody_shares(self):
        pages = [page for each in self.held.values() for page in each]
        assert len({*pages}) == len(pages)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

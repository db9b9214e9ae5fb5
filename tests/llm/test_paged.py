"""Slots that share pages say what slots with room of their own say."""

from __future__ import annotations

import pytest

from ssd_jax import InputError, SamplingParams
from ssd_jax.devices.paged_role import PagedRole
from ssd_jax.engine.slots.page_stock import PageGrant, PageStock
from ssd_jax.kernels.handlers import why_missing
from tests.llm.paged import (
    ALONE,
    CONTEXT,
    ELSEWHERE,
    LONG,
    PAGE,
    elsewhere,
    opened,
    with_new_engines,
)
from tests.llm.runs import ids, outputs, requests
from tests.models.golden import ON_GPUS, ON_TPUS

FEW = str(7 * PAGE // 2)
"""Seven pages of the target alone."""


def asked(llm):
    """Requests of one page and of several, more than there are slots."""
    long = [
        llm.request(LONG, SamplingParams(max_tokens=most, ignore_eos=True), index)
        for index, most in ((7, 150), (8, 40), (9, 200))
    ]
    return [*requests(llm, "coupled"), *long]


@pytest.fixture(scope="module")
def few(pair):
    return opened(pair, kv_memory=FEW, **ALONE)


@pytest.fixture(scope="module")
def expected(pair):
    llm = opened(pair, **ALONE)
    return ids(outputs(llm, asked(llm), "ar"))


SLOW = pytest.mark.slow  # `test_preemption.py` has it for what CI runs, with fewer pages


@pytest.mark.more
@pytest.mark.parametrize(
    "there", [pytest.param({}, marks=SLOW), pytest.param(ON_TPUS, marks=SLOW), ON_GPUS]
)
def test_shared_pages_leave_the_text_of_every_mode_as_it_is(pair, expected, there):
    """With pages for one long request and two short ones at a time."""
    llm = opened(pair, there=there, kv_memory=str(7 * PAGE))
    assert llm.loaded.programs.paging == (128, 7)
    for mode in llm.modes:
        assert ids(outputs(llm, asked(llm), mode)) == expected, mode


@pytest.mark.more
@pytest.mark.parametrize("where", elsewhere("groups"))
def test_a_draft_elsewhere_has_the_same_pages(pair, expected, where):
    with opened(pair, kv_memory=str(9 * PAGE), **ELSEWHERE[where]) as llm:
        assert llm.loaded.programs.paging.total == (8 if where == "groups" else 9)
        assert ids(outputs(llm, asked(llm), "ssd")) == expected


@pytest.mark.parametrize(
    ("pages", "counts"),
    [
        ({"kv_memory": FEW}, {1, 2, 3, 4}),
        pytest.param({"page_size": 256}, {1, 2}, marks=pytest.mark.more),
    ],
    ids=["few", "bigger"],
)
def test_pages_come_back_from_requests_that_are_cancelled(pair, expected, pages, counts):
    llm = opened(pair, **pages, **ALONE)
    engine = llm.engine
    for request in asked(llm)[-3:]:
        engine.cancel(engine.add(request))
    first = [engine.add(request) for request in asked(llm)[:3]]
    for _ in range(4):
        engine.step()
    for future in first:
        engine.cancel(future)
    while engine.has_work:
        engine.step()
    found = outputs(llm, asked(llm), "ar")
    assert ids(found) == expected
    assert {output.metrics["kv_pages"] for output in found} == counts


def test_too_little_memory_for_a_sequence_is_refused_before_weights_load(pair):
    with pytest.raises(InputError, match=r"holds 3 pages of 128 .* context = 512 needs 4 .* raise"):
        opened(pair, kv_memory=str(3 * PAGE))
    for text in ("much", "-1", "4GB"):
        with pytest.raises(InputError, match=r"kv_memory = .* is not understood; .* such as 4GiB"):
            opened(pair, kv_memory=text)
    with pytest.raises(InputError, match="page_size = 100 is no multiple of 16; give one"):
        opened(pair, page_size=100)


@pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")
def test_pages_that_attention_cannot_read_are_refused(pair):
    with pytest.raises(
        InputError, match=r"page_size = 32 is no multiple of 64, .* `attention='xla'`"
    ):
        opened(pair, page_size=32)


@pytest.mark.more
@pytest.mark.parametrize(
    ("size", "attention"), [(16, "xla"), pytest.param(64, "auto", marks=pytest.mark.slow)]
)
def test_small_pages_leave_the_text_as_it_is(pair, expected, size, attention):
    llm = opened(pair, page_size=size, attention=attention)
    for mode in ("ar", "ssd"):
        assert ids(outputs(llm, asked(llm), mode)) == expected, mode


class Greedy(PageStock):
    """Gives the same pages to everybody."""

    def take(self, slot, tokens, names=(), spare=0, *, reuses=True):
        del tokens, names, spare, reuses
        return PageGrant(self.pages(slot), 0)

    def grow(self, slot, tokens):
        del slot, tokens
        return True

    def pages(self, slot):
        del slot
        return tuple(range(self.needed(CONTEXT)))

    def fill(self, slot, positions):
        """Nothing is known of them."""


def forgotten(self, slot, pages):
    if slot != 1:
        usual_pages(self, slot, pages)


def tail_of_another(self, slot, pages):
    usual_pages(self, slot, pages)
    self._host_table[slot, len(pages) - 1 :] = 0


usual_pages = PagedRole.set_pages


@pytest.mark.parametrize("fault", ["shared", "forgotten", "tail"])
def test_planted_faults_of_page_tables_are_caught(few, expected, fault, monkeypatch):
    if fault == "shared":
        monkeypatch.setattr("ssd_jax.loading.loaded.PageStock", Greedy)
    else:
        monkeypatch.setattr(
            PagedRole, "set_pages", forgotten if fault == "forgotten" else tail_of_another
        )
    llm = with_new_engines(few)
    assert ids(outputs(llm, asked(llm), "ar")) != expected

"""What SSD does when nothing was prepared, when it came too late, and when a call fails."""

import numpy as np
import pytest

from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.speculation.backup import NgramBackup
from tests.engine.letters import LONG, drain, outputs, request, spell
from tests.fakes.branching import FakeBranchingDraft, GrowingBranches
from tests.fakes.instrument import At, instrument
from tests.fakes.paces import Patient
from tests.fakes.paged import SIZE, Paged
from tests.speculation.watched import ssd


def test_where_nothing_was_prepared_the_row_is_cold():
    parts = ssd(spell(LONG), width=0, backup="draft")
    parts.engine.add(request())
    (output,) = outputs(drain(parts.engine)).values()
    assert output.text == LONG
    assert output.metrics["hit_rate"] == 0
    assert set(output.metrics["miss_causes"]) == {"cold"}


def test_a_request_that_goes_on_in_anothers_slot_is_cold_and_has_not_missed():
    stock = PageStock(slots=3, count=14, size=SIZE, beyond=4, context=64, grows=True)
    parts = ssd(spell(LONG), slots=3, pages=stock, target=Paged, backup="draft")
    for size in (40, 30, 30):
        parts.engine.add(request([70] * 6, max_tokens=size))
    found = [output.metrics for output in outputs(drain(parts.engine)).values()]
    assert sum(metrics["preemptions"] for metrics in found) > 1
    assert {cause for metrics in found for cause in metrics["miss_causes"]} == {"cold"}


CALLS = ["branch_tokens", "promote", "draft", "tokens", "expand", "proposal"]


def breaking(call, at):
    """Makes drafts whose call of this name raises when it is made for the `at`-th time."""
    broken = At(at, RuntimeError("the draft is out of order"))
    return lambda *args, **more: instrument(FakeBranchingDraft(*args, **more), fail={call: broken})


@pytest.mark.parametrize("sizes", [(9, 1), (9,)])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("call", ["prefill", *CALLS])
def test_an_error_of_the_draft_is_raised_by_the_step_and_later_requests_run_as_ever(
    call, at, sizes
):
    """So does an interrupt, which may come at any place."""
    settings = {"rank": lambda prompt, position: position % 9, "backup": "draft"}
    parts = ssd(spell(LONG), draft=breaking(call, at), **settings)
    failed = [parts.engine.add(request([65] * size, max_tokens=20)) for size in (1, 1, 9)]
    with pytest.raises(RuntimeError, match="out of order"):
        drain(parts.engine)
    for number in failed:
        parts.engine.cancel(number)
    later = [request(range(65, 65 + size), max_tokens=30) for size in sizes]
    numbers = [parts.engine.add(request) for request in later]
    done = outputs(drain(parts.engine))
    for number, single in zip(numbers, later, strict=True):
        alone = ssd(spell(LONG), **settings)
        alone.engine.add(single)
        (output,) = outputs(drain(alone.engine)).values()
        assert output.text == LONG[:30]
        for name in ("acceptance_histogram", "hit_rate", "miss_causes"):
            assert done[number].metrics[name] == output.metrics[name]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("at", [2, 3, 4])
@pytest.mark.parametrize("call", sorted({*CALLS} - {"draft"}))
def test_a_request_goes_on_where_an_error_of_the_draft_interrupted_it(
    call, at, remote, monkeypatch
):
    """What the draft did not take, it is told again; the backup knows the text in each round."""
    propose, lacks = NgramBackup.propose, []

    def noting(self, start, count):
        lacks.append(start + 1 - len(self._text))
        return propose(self, start, count)

    monkeypatch.setattr(NgramBackup, "propose", noting)
    rank = dict.fromkeys((6, 9, 14, 15), None)
    parts = ssd(
        spell(LONG),
        draft=breaking(call, at),
        backup="ngram",
        remote=remote,
        rank=lambda _, position: rank.get(position, 0),
    )
    for size in (1, 3):
        parts.engine.add(request([65] * size))
    with pytest.raises(RuntimeError, match="out of order"):
        drain(parts.engine)
    found = outputs(drain(parts.engine))
    assert [output.text for output in found.values()] == [LONG] * 2
    assert set(lacks) == {0}


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("at", [2, 3, 4])
@pytest.mark.parametrize("call", CALLS)
def test_after_an_interrupt_the_cache_hits_again(call, at, remote):
    """What is told twice is taken once, by cache, backup and draft."""
    settings = {"backup": "draft", "rank": lambda prompt, position: 0 if position % 5 else None}
    parts = ssd(spell(LONG), draft=breaking(call, at), remote=remote, **settings)
    for size in (1, 3):
        parts.engine.add(request([65] * size))
    with pytest.raises(RuntimeError, match="out of order"):
        drain(parts.engine)
    done = outputs(drain(parts.engine))
    assert len(done) == 2
    for output in done.values():
        assert output.text == LONG
        assert output.metrics["hit_rate"] > 0.3


@pytest.mark.parametrize("at", [2, 3, 4])
def test_after_a_draft_that_failed_branches_are_of_the_empty_record(at):
    """The step after it may decode nothing, and asks for branches all the same."""
    settings = {"backup": "draft", "rank": lambda prompt, position: 0 if position % 5 else None}
    parts = ssd(spell(LONG), draft=breaking("draft", at), **settings)
    parts.engine.add(request())
    with pytest.raises(RuntimeError, match="out of order"):
        drain(parts.engine)
    parts.controller.speculate()  # the scripted draft refuses branches behind another L
    assert parts.controller._states[0].length == 0


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_prompt_that_the_draft_did_not_take_is_told_again(at):
    parts = ssd(spell(LONG), draft=breaking("prefill", at), rank=lambda *_: 0)
    for size in (5, 9):
        parts.engine.add(request(range(65, 65 + size)))
    with pytest.raises(RuntimeError, match="out of order"):
        drain(parts.engine)
    for output in outputs(drain(parts.engine)).values():
        assert output.text == LONG
        assert output.metrics["hit_rate"] > 0.5


class Fickle(GrowingBranches):
    """Tells one token of each branch, and whom the branches are for: then all, for others."""

    def branch_tokens(self, forwards, until=None):
        found = super().branch_tokens(forwards)
        if forwards == 1:
            return found
        return found._replace(bonus=np.roll(found.bonus, 1, axis=1))


def test_a_row_that_has_missed_takes_its_backup_whatever_the_draft_says_while_others_wait():
    ranks = {"rank": lambda prompt, position: 0 if position % (2 + len(prompt)) else None}
    parts = ssd(spell(LONG), draft=Fickle, pace=Patient(), backup="draft", remote=True, **ranks)
    for size in (1, 3):
        parts.engine.add(request([65] * size))
    for output in outputs(drain(parts.engine)).values():
        assert output.text == LONG
    assert {*parts.controller.sources(0), *parts.controller.sources(1)} == {"hit", "miss"}

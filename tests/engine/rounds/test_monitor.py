"""What a monitor counts of rounds, and what it remembers."""

import threading
from collections import Counter

import pytest

from ssd_jax.engine.requests.metrics import RoundRecord
from ssd_jax.engine.rounds.monitor import RoundCounts, RoundMonitor
from ssd_jax.roles.activity import Busy


def record(proposed, accepted, source=None, batch=0):
    facts = {"proposed": proposed, "accepted": accepted, "source": source, "batch": batch}
    return RoundRecord(committed=accepted + 1, seconds=1.0, **facts)


def test_rounds_are_counted_by_what_their_rows_committed():
    monitor = RoundMonitor()
    monitor.prefill((0.0, 1.0), 12, 1)
    monitor.round((1.0, 2.0), [record(3, 2, "hit", 4), record(3, 0, "late", 4)], "ssd")
    monitor.round((2.0, 3.0), [record(0, 0)], "ar")
    counts, target, _ = monitor.view()
    assert counts == RoundCounts(
        rounds={"ssd": 1, "ar": 1},
        batches={4: 1},
        tokens=1 + 4 + 1,
        drafts=2,
        draft_tokens=6,
        accepted=2,
        accepted_at={0: 1, 1: 1},
        hits=1,
        misses={"late": 1},
    )
    assert [span.prompt for span in target] == [12, 0, 0]
    seen = target[1]
    assert (seen.rows, seen.tokens, seen.proposed, seen.accepted) == (2, 4, 6, 2)
    assert (seen.hits, seen.lookups, seen.misses) == (1, 2, ("late",))
    assert [span.mode for span in target[1:]] == ["ssd", "ar"]


def test_rounds_without_any_answer_of_the_draft_did_without_it():
    monitor = RoundMonitor()
    monitor.round((0.0, 1.0), [record(0, 0, "dead"), record(0, 0, "dead")], "ssd")
    monitor.round((1.0, 2.0), [record(0, 0, "dead"), record(0, 0, "miss")], "ssd")
    monitor.round((2.0, 3.0), [record(2, 0, "dead")], "ssd")  # a backup proposes
    assert monitor.view().counts.rounds == {"ar": 1, "ssd": 2}


def test_hidden_work_of_the_draft_is_summed():
    monitor = RoundMonitor()
    monitor.draft([Busy("expand", 0.0, 2.0), Busy("grow", 2.0, 3.0)], hidden=1.5)
    counts, _, draft = monitor.view()
    assert (counts.draft_seconds, counts.hidden_seconds) == (pytest.approx(3.0), 1.5)
    assert [span.kind for span in draft] == ["expand", "grow"]


def test_only_the_last_rounds_are_remembered():
    monitor = RoundMonitor()
    for number in range(1000):
        monitor.round((number, number + 1), [record(1, 1)], "ssd")
        monitor.draft([Busy("grow", number, number + 1)], hidden=0.0)
    counts, target, draft = monitor.view()
    assert counts.rounds.total() == 1000
    assert (len(target), len(draft)) == (64, 512)
    assert target[-1].end == 1000


def test_counts_of_engines_add_up():
    total = RoundCounts()
    for _ in range(2):
        misses, places = Counter({"late": 2}), Counter({0: 1})
        total.add(RoundCounts(drafts=1, misses=misses, accepted_at=places, draft_seconds=0.5))
    assert (total.drafts, total.misses, total.accepted_at) == (2, {"late": 4}, {0: 2})
    assert total.draft_seconds == 1.0


def test_another_thread_sees_whole_rounds():
    monitor, done = RoundMonitor(), threading.Event()

    def watch():
        while not done.is_set():
            counts = monitor.view().counts
            views.append(counts.tokens == 2 * counts.drafts == 2 * counts.accepted)

    views = []
    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(2000):
        monitor.round((0.0, 1.0), [record(2, 1)], "ssd")
    done.set()
    watcher.join()
    assert views
    assert all(views)

"""Figures of a request from the times of its committed tokens."""

import pytest

from ssd_jax.engine.request_metrics import REQUEST_KEYS
from ssd_jax.engine.requests.metrics import RequestTimes, RoundRecord, RowLookup
from ssd_jax.roles.activity import DraftCost


def times(*tokens, arrived=0.0):
    return RequestTimes(arrived=arrived, tokens=list(tokens))


def test_decode_speed_leaves_the_prefill_out():
    summary = times(10.0, 10.5, 11.0, 11.5, 12.0).summary()
    assert summary["ttft_ms"] == pytest.approx(10_000)
    assert summary["tokens_per_second"] == pytest.approx(2.0)
    assert summary["itl_p50_ms"] == pytest.approx(500)


def test_several_tokens_of_one_round_are_counted_one_by_one():
    summary = times(1.0, 2.0, 2.0, 2.0, 3.0, 3.0).summary()
    assert summary["tokens_per_second"] == pytest.approx(2.5)
    assert summary["round_ms"] == pytest.approx(1000)


def test_metrics_have_every_key_whatever_happened():
    for summary in (times().summary(), times(1.0).summary(), times(1.0, 2.0).summary()):
        assert tuple(summary) == REQUEST_KEYS
    assert times().summary()["ttft_ms"] is None
    assert times(1.0).summary()["tokens_per_second"] is None


def verified(committed, proposed=0, accepted=None, seconds=0.1):
    accepted = committed - 1 if accepted is None else accepted
    return RoundRecord(committed=committed, proposed=proposed, accepted=accepted, seconds=seconds)


def test_verification_time_is_the_median():
    measured = times(1.0, 2.0)
    for seconds in (0.1, 0.3, 0.2):
        measured.rounds.append(verified(1, seconds=seconds))
    assert measured.summary()["verify_ms"] == pytest.approx(200)


def test_a_verification_that_shares_its_device_with_the_draft_is_not_timed():
    measured = times(1.0, 2.0)
    measured.shared_device = True
    measured.rounds.append(verified(1))
    assert measured.summary()["verify_ms"] is None


def speculative(*rounds, tokens):
    measured = times(*range(1, tokens + 1))
    measured.speculative = True
    for round_ in rounds:
        measured.rounds.append(round_)
    return measured


def test_acceptance_counts_rounds_by_their_tokens_and_by_position():
    measured = speculative(
        verified(4, proposed=3), verified(1, proposed=3), verified(2, proposed=1), tokens=8
    )
    summary = measured.summary()
    assert summary["acceptance_length"] == pytest.approx(7 / 3)
    assert summary["acceptance_histogram"] == [1, 1, 0, 1]
    assert summary["acceptance_by_position"] == [(2, 3), (1, 1), (1, 1)]


def test_tokens_behind_the_end_do_not_count():
    measured = speculative(
        verified(4, proposed=3), verified(4, proposed=3), verified(2, proposed=3), tokens=11
    )
    measured.keep(7)  # the first token, one whole round, and two tokens of the second
    summary = measured.summary()
    assert summary["acceptance_histogram"] == [0, 1, 0, 1]
    assert summary["acceptance_by_position"] == [(2, 2), (2, 2), (1, 1)]
    assert len(measured.tokens) == 7


def test_without_a_drafter_there_is_no_acceptance():
    measured = times(1.0, 2.0)
    measured.rounds.append(verified(1))
    assert measured.summary()["acceptance_length"] is None


def test_rounds_are_counted_by_the_slots_that_they_ran():
    measured = times(*map(float, range(6)))
    for batch in (8, 1, 8, 0, 2):  # one of a target that says nothing of it
        measured.rounds.append(RoundRecord(committed=1, accepted=0, seconds=0.1, batch=batch))
    assert measured.summary()["batch_sizes"] == [(1, 1), (2, 1), (8, 2)]
    assert times(1.0).summary()["batch_sizes"] is None


def looked_up(*rounds):
    """Rounds of (source, committed tokens)."""
    found = [
        RoundRecord(committed=count, proposed=3, accepted=count - 1, source=source, seconds=0.1)
        for source, count in rounds
    ]
    return speculative(*found, tokens=1 + sum(count for _, count in rounds))


def test_hits_and_fallbacks_are_counted_by_cause_over_rounds_with_a_look_up():
    measured = looked_up(
        ("cold", 1), ("hit", 4), ("miss", 2), ("hit", 3), ("late", 1), ("miss", 3), (None, 1)
    )
    summary = measured.summary()
    assert summary["hit_rate"] == pytest.approx(2 / 6)
    assert summary["miss_causes"] == {"cold": 1, "miss": 2, "late": 1}
    assert summary["acceptance_length_on_hit"] == pytest.approx(7 / 2)
    assert summary["acceptance_length_on_miss"] == pytest.approx(7 / 4)
    assert summary["acceptance_length"] == pytest.approx(15 / 7)


def test_without_hits_or_without_fallbacks_their_length_does_not_apply():
    summary = looked_up(("miss", 2)).summary()
    assert (summary["hit_rate"], summary["acceptance_length_on_hit"]) == (0, None)
    summary = looked_up(("hit", 2)).summary()
    assert (summary["hit_rate"], summary["acceptance_length_on_miss"]) == (1, None)
    assert summary["miss_causes"] == {}


@pytest.mark.parametrize("sources", [(), (None, None)])
def test_figures_of_the_cache_do_not_apply_where_none_was_looked_up(sources):
    summary = looked_up(*((source, 2) for source in sources)).summary()
    for name in (
        "hit_rate",
        "acceptance_length_on_hit",
        "acceptance_length_on_miss",
        "miss_causes",
    ):
        assert summary[name] is None


def test_look_ups_after_the_end_do_not_count():
    measured = looked_up(("hit", 4), ("hit", 4), ("miss", 2), ("late", 2))
    measured.keep(7)  # the first token, one whole round, and two tokens of the second
    summary = measured.summary()
    assert (summary["hit_rate"], summary["miss_causes"]) == (1, {})
    assert summary["acceptance_length_on_hit"] == pytest.approx((4 + 2) / 2)
    measured.keep(1)
    assert measured.summary()["hit_rate"] is None


def test_what_the_draft_did_for_rounds_after_the_end_does_not_count():
    measured = speculative(tokens=11)
    for number, source in enumerate(("hit", "miss", "hit")):
        measured.rounds.append(
            RoundRecord(
                committed=4,
                proposed=3,
                accepted=3,
                source=source,
                seconds=0.1,
                lookup=RowLookup(number, 2, 0 if source == "hit" else None, 10),
                cost=DraftCost(2.0, 1.0 + number / 2, (1.0,), 100 * number),
            )
        )
    measured.keep(7)  # the first token, one whole round, and two tokens of the second
    summary = measured.summary()
    assert summary["hit_rate_by_k"] == [(1, 1), (0, 1)]
    assert summary["hit_rate_by_rank"] == [(1, 2), (0, 2)]
    assert summary["wasted_draft_tokens"] == 20
    assert summary["hidden_draft_share"] == pytest.approx(2.5 / 4)
    assert summary["hidden_draft_share_on_hit"] == pytest.approx(1 / 2)
    assert summary["bytes_per_round"] == pytest.approx(50)

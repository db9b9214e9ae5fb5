"""Figures of a request from the times of its committed tokens."""

import pytest

from ssd_jax.runtime.metrics import REQUEST_KEYS, RequestTimes


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


def test_every_key_is_there_whatever_happened():
    for summary in (times().summary(), times(1.0).summary(), times(1.0, 2.0).summary()):
        assert tuple(summary) == REQUEST_KEYS
    assert times().summary()["ttft_ms"] is None
    assert times(1.0).summary()["tokens_per_second"] is None


def test_verification_time_is_the_median():
    measured = times(1.0, 2.0)
    for seconds in (0.1, 0.3, 0.2):
        measured.verified(seconds)
    assert measured.summary()["verify_ms"] == pytest.approx(200)

"""What a response says of the speculation that made its texts."""

import pytest

from ssd_jax.engine.request_metrics import REQUEST_KEYS
from ssd_jax.server.speculation_report import speculation_report


def metrics(**values):
    return {**dict.fromkeys(REQUEST_KEYS), "mode": "ssd", **values}


def test_statistics_are_vllms_over_all_texts():
    """Rounds of one text accepted 0, 2 and 3 of 3; of the other 1 of 1, and 0 of 2."""
    first = metrics(acceptance_by_position=[(2, 3), (2, 2), (1, 2)], draft_tokens=9, hit_rate=1.0)
    second = metrics(acceptance_by_position=[(1, 2), (0, 0)], draft_tokens=3, hit_rate=0.5)
    assert speculation_report([first, second]) == {
        "mode": "ssd",
        "speculating": True,
        "reason": None,
        "hit_rate": 0.75,
        "speculative_decoding": {
            "mean_acceptance_length": 1 + 6 / 5,
            "draft_acceptance_rate": 6 / 12,
            "acceptance_histogram": [2, 1, 1, 1],
            "num_spec_steps": 5,
            "num_accepted_draft_tokens": 6,
            "num_draft_tokens": 12,
            "num_spec_tokens": 3,
        },
    }


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"mode": "ar"}, "the request was decoded in mode ar, without a draft"),
        ({"miss_causes": {"dead": 3, "cold": 1}}, "the draft worker is out of reach"),
        ({"miss_causes": {"late": 3}}, "no proposal came in time (late)"),
        ({"plain_rounds": 7}, "mode auto found it faster without the draft"),
        ({}, "the texts ended before a proposal could be verified"),
    ],
)
def test_a_text_without_proposals_says_why(values, reason):
    report = speculation_report([metrics(acceptance_by_position=[], **values)])
    assert (report["speculating"], report["reason"]) == (False, reason)
    assert report["speculative_decoding"] is None

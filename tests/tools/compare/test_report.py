"""The report: counts, shares, lines and the exit status."""

import io
import math

import pytest
from rich.console import Console

from ssd_jax.tools.compare.judges import Finding
from ssd_jax.tools.compare.pairs import pair_up
from ssd_jax.tools.compare.report import compare, comparison_table
from tests.tools.compare.builders import generation, refused


def report(a, b, *verdicts, **settings):
    """Compares outputs by index, forks being judged in order."""
    judged = iter(verdicts)

    def judge(pair):
        verdict = next(judged)
        margin = {"float": 0.0004, "wrong": math.inf}.get(verdict)
        return Finding(pair=pair, verdict=verdict, margin=margin, texts=("x", None))

    def index(outputs):
        return {i: output for i, output in enumerate(outputs) if output is not None}

    return compare(("sd", "ar"), pair_up(index(a), index(b)), judge, **settings)


def shown(comparison):
    stream = io.StringIO()
    Console(file=stream, width=100).print(comparison_table(comparison))
    return stream.getvalue()


SAME = generation(1, 2, 3)


def test_the_identical_share_is_counted_from_ids():
    found = report([SAME, SAME], [SAME, SAME])
    assert (found.identical, found.compared, found.exit_status) == (2, 2, 0)
    assert "2 of 2 prompts identical (100%)" in shown(found)
    found = report([SAME, SAME], [SAME, generation(1, 2, 4)], "wrong")
    assert (found.identical, found.compared, found.exit_status) == (1, 2, 1)
    assert "1 of 2 prompts identical (50%)" in shown(found)


def test_the_table_has_a_line_for_each_difference():
    found = report(
        [SAME, generation(1, 2, 3), generation(5), refused(3), SAME, generation(1, 2, 3, 4, 5, 6)],
        [
            SAME,
            generation(1, 9, 3),
            generation(5, 6, reason="stop"),
            SAME,
            None,
            generation(1, 2, 3, 4, 5, 7),
        ],
        "float",
        "unknown",
        "float",
        limit=1e-3,
    )
    lines = [line.split() for line in shown(found).splitlines()]
    assert ["1", "1", "2", '"x"', "9", "0.0004", "float"] in lines
    assert ["2", "1", "ends", "(length)", "6", "-", "unknown"] in lines
    assert ["3", "-", "refused", "-", "-", "refused"] in lines
    assert ["4", "-", "-", "no", "line", "-", "missing"] in lines
    assert "first difference: token 1 at the earliest, 1 in the median" in shown(found)


@pytest.mark.parametrize(
    ("verdicts", "missing", "status"),
    [
        (("float", "float"), False, 0),
        (("sampled", "float"), False, 0),
        (("float", "unknown"), False, 1),
        (("float", "wrong"), False, 1),
        (("float", "float"), True, 2),
        (("wrong", "float"), True, 1),
    ],
)
def test_the_exit_status_says_whether_every_difference_is_lawful(verdicts, missing, status):
    a, b = [SAME, SAME, SAME], [generation(0), generation(0), None if missing else SAME]
    assert report(a, b, *verdicts, limit=1e-3).exit_status == status


def test_a_prompt_that_both_refused_is_no_difference():
    found = report([SAME, refused(1)], [SAME, refused(1)])
    assert (found.compared, found.exit_status) == (1, 0)

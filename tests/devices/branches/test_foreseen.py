"""Branches of sampled rows begin with the bonus tokens that the noise of their round would draw.

Whatever the record is: a promoted branch, drafted just in time, or tokens of the host.
"""

import numpy as np
import pytest

from ssd_jax.testing import tiny
from tests.devices.branches import plain_draft
from tests.devices.branches.plain_draft import (
    allowed,
    assert_as_plain,
    assert_foreseen,
    assert_likeliest,
)
from tests.devices.branches.script import LOWERED, branches, compiled, length, record, scripted

pytestmark = pytest.mark.more  # tests/sampling/test_prediction.py has the law


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("foreseen") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def foreseeing(checkpoint):
    """Rounds of a draft that knows the noise, with Saguaro sampling."""
    draft = compiled(checkpoint, c=0.5, predict="noise")
    return draft, scripted(draft.rounds())


def check_bonus_tokens(draft, rounds):
    """Returns where the records of the sampled branches checked come from."""
    found = [(seen, slot, record(seen, slot)) for seen in rounds for slot in seen.texts]
    sources = set()
    for (seen, slot, one), run in zip(
        found, draft.plain([one.sequence for *_, one in found]), strict=True
    ):
        numbers = np.array([(number, k) for number, k, _ in seen.branches(slot)])
        for k in range(length(seen, slot) + 1):
            ids = seen.on_host.bonus[slot, numbers[numbers[:, 1] == k, 0]]
            logits = run.logits[len(one.text) - 1 + k]
            without = one.tokens[k] if k < len(one.tokens) else None
            if one.request.params.temperature == 0:
                scores = allowed(logits, one.request, one.sequence[: len(one.text) + k])
                if without is not None:
                    scores[without] = -np.inf
                assert_likeliest(ids, scores)
            else:
                assert_foreseen(ids, logits, one, k, without=without)
                sources.add((seen.sources[slot], k < len(one.tokens), len(ids) > 1))
    return sources


def test_bonus_tokens_are_those_that_the_noise_would_draw(foreseeing):
    sources = check_bonus_tokens(*foreseeing)
    for source in ("hit", "draft", "host"):
        assert {(source, True, True), (source, False, True)} <= sources


def test_foreseen_bonus_tokens_are_not_those_of_another_start(foreseeing):
    """So the test above tells the noise of one round from that of another."""
    draft, rounds = foreseeing
    with pytest.MonkeyPatch.context() as patch:
        noise = plain_draft._noise
        patch.setattr(
            plain_draft,
            "_noise",
            lambda one, at, ids: noise(one, (at[0] + 1, *at[1:]), ids),
        )
        with pytest.raises(AssertionError):
            check_bonus_tokens(draft, rounds)


def test_foreseeing_changes_no_record_or_branch(foreseeing):
    """The set that Saguaro sampling lowers is still chosen by law alone."""
    draft, rounds = foreseeing
    found = [one for seen in rounds for slot in seen.texts for *_, one in branches(seen, slot)]
    assert len(found) > 100
    for one, run in zip(found, draft.plain([one.sequence for one in found]), strict=True):
        assert_as_plain(one, run, lowered=LOWERED, c=draft.c)

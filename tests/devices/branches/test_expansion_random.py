"""Branches of any K and budget, over rounds with random outcomes, under both rules."""

import numpy as np
import pytest

from ssd_jax.speculation.fan_out import UniformFanOut
from ssd_jax.testing import tiny
from tests.devices.branches.plain_draft import assert_as_plain, assert_coupled
from tests.devices.branches.rounds import Outcome, Seen
from tests.devices.branches.script import HOSTED, REQUESTS, SLOTS, branches, compiled, record

pytestmark = pytest.mark.slow  # a model is compiled for each case


def random_outcome(rng: np.random.Generator, seen: Seen, slot: int, k: int) -> Outcome:
    prepared = [accepted for accepted, count in enumerate(seen.counts[slot]) if count]
    accepted = int(rng.choice(prepared))
    kind = rng.integers(5)
    if kind < 3:
        return Outcome(accepted, rank=int(rng.integers(9)))
    if kind == 3:
        return Outcome(accepted, drafted=int(rng.integers(1, k + 1)))
    return Outcome(accepted, hosted=HOSTED[: rng.integers(min(k, len(HOSTED)) + 1)])


@pytest.mark.parametrize(
    ("k", "budget", "rule", "longer"),
    [
        (1, 2, "ratio", False),
        (1, 3, "coupled", True),
        (2, 2, "coupled", False),
        (6, 8, "ratio", True),
        (8, 16, "coupled", False),
    ],
)
def test_branches_and_pages_are_those_of_a_plain_draft(tmp_path, k, budget, rule, longer):
    path = tiny.write_checkpoint(tmp_path / "qwen2", "qwen2")
    settings = {"k": k, "branches": budget, "rule": rule, "support": tiny.TOKENS}
    draft = compiled(path, quickly=False, **settings)
    rounds = draft.rounds(
        longer=longer, fan_out=lambda slot, length: UniformFanOut().counts(length, budget, "hit")
    )
    rng = np.random.default_rng(k)
    check = assert_coupled if rule == "coupled" else assert_as_plain
    seen = rounds.run(REQUESTS)
    for _ in range(60 // (k + 1)):
        seen = rounds.run({slot: random_outcome(rng, seen, slot, k) for slot in range(SLOTS)})
        for slot in range(SLOTS):
            one = record(seen, slot)
            found = branches(seen, slot)
            run, *runs = draft.plain([one.sequence, *(branch.sequence for *_, branch in found)])
            check(one, run)
            pages = seen.grown[:, slot, :, : len(one.sequence)]
            np.testing.assert_allclose(pages, run.kv, rtol=1e-3, atol=1e-5)
            for (at, _, branch), run in zip(found, runs, strict=True):
                assert len(branch.tokens) == k - (at == len(one.tokens) and not longer)
                check(branch, run)

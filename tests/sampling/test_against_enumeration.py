"""One round of the jitted code has exactly the outcomes, and the odds, of the rational round."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sampling import simulation
from tests.sampling.evidence import ALPHA, p_value
from tests.sampling.simulation import VOCAB, K, Scenario
from tests.selection import cases
from tests.speculation.enumeration import filters, rounds, toys
from tests.speculation.enumeration.chance import paths
from tests.speculation.enumeration.filters import Model

TARGET = toys.table(((5, 3, 2), (1, 0, 3), (2, 2, 1)))
DRAFTS = {
    "dense": toys.DENSE3,
    "zeros": toys.table(((1, 1, 4), (0, 3, 1), (4, 1, 0))),
}


def table(model: Model) -> np.ndarray:
    """A memoryless toy as the simulation wants it: the tokens it does not know are impossible."""
    rows = np.zeros((VOCAB, VOCAB))
    for token in range(3):
        rows[token, :3] = [float(p) for p in model((token,))]
    rows[3:, 0] = 1
    return rows


@pytest.mark.parametrize("rule", ["ratio", "block", "coupled"])
@pytest.mark.parametrize("support", cases([VOCAB, 2], VOCAB))
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_round_accepts_and_ends_as_often_as_in_rationals(draft, support, rule):
    model = DRAFTS[draft]
    game = rounds.Game(
        target=TARGET,
        draft=filters.then(model, lambda law: filters.support(law, support)),
        k=K,
        verify=getattr(rounds, rule),
    )
    exact: dict[tuple[int, ...], float] = {}
    for state, _, probability in paths(
        lambda chance: game.round(rounds.State(toys.PROMPT), chance), frozenset(), lambda _: True
    ):
        text = state.text[1:]
        exact[text] = exact.get(text, 0.0) + float(probability)

    scenario = Scenario(target=table(TARGET), draft=table(model), support=support, rule=rule)
    first = next(simulation.rounds(scenario, seed=5))
    texts, times = np.unique(simulation.emitted(first), axis=0, return_counts=True)
    seen = {tuple(int(t) for t in text if t >= 0): n for text, n in zip(texts, times, strict=True)}
    assert seen.keys() <= exact.keys()
    counts = np.array([seen.get(text, 0) for text in exact])
    assert p_value(counts, np.array(list(exact.values()))) > ALPHA

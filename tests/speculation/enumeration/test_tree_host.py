"""The product's engine, controller and cache with token trees: the target's law, and AR's text."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.requests.occurrences import Occurrences
from ssd_jax.speculation.cache import SpeculationCache
from ssd_jax.speculation.controller import Controller
from ssd_jax.speculation.sequence_state import RoundState
from tests.sampling.edits import Edit, edited
from tests.selection import cases
from tests.speculation.enumeration import toys
from tests.speculation.enumeration.chance import Chance, Key, paths
from tests.speculation.enumeration.filters import Model, Text, point
from tests.speculation.enumeration.host import outputs
from tests.speculation.enumeration.host_games import seconds
from tests.speculation.enumeration.laws import autoregressive
from tests.speculation.enumeration.rounds import Game, block, coupled, ratio
from tests.speculation.enumeration.toys import PROMPT
from tests.speculation.enumeration.tree_flaws import DRAFT, TARGET
from tests.speculation.enumeration.tree_host import TreeHost, always
from tests.speculation.enumeration.tree_roles import Drawing, by_proposal, by_q

TWO = Game(target=toys.TARGET2, draft=toys.DRAFT2, k=2)
THREE = Game(target=toys.TARGET3, draft=toys.DENSE3, k=2)


def behind_two(model: Model) -> Model:
    """Two tokens are certain, so that there is less to enumerate."""
    return lambda text: point(0, 3) if len(text) < 3 else model(text)


FLAT = Game(target=behind_two(TARGET), draft=behind_two(DRAFT), k=2)
ALL = 21
"""Branches for every token behind every row of the trees here."""


def by_start(start: int) -> tuple[int, ...]:
    """Another shape at every other start."""
    return ((0, 0, 1, 1), (0, 0, 2))[start % 2]


HITS, MISSES, BOTH = {"hit"}, {"cold"}, {"hit", "miss"}
SETTINGS = {
    "every outcome": (TreeHost(game=TWO, budget=ALL), 5, HITS),
    "no outcome": (TreeHost(game=TWO, width=0), 5, MISSES),
    "the likeliest outcomes": (TreeHost(game=TWO, width=1, budget=2), 5, BOTH),
    "n-grams after a miss": (TreeHost(game=TWO, width=1, budget=2, backup="ngram"), 5, BOTH),
    "shapes by start": (TreeHost(game=TWO, shape=by_start, width=1, budget=3), 5, BOTH),
    "depth three": (
        TreeHost(game=replace(TWO, k=3), nodes=6, shape=always(0, 0, 1, 1, 3, 3), budget=3),
        5,
        BOTH,
    ),
    "outcomes by q": (
        TreeHost(game=TWO, width=1, budget=3, drawing=lambda *a, **b: Drawing(*a, **b, by_noise=0)),
        5,
        BOTH,
    ),
    "outcomes by the q of what was drawn": (
        TreeHost(game=THREE, nodes=3, shape=always(0, 0, 1), width=1, budget=2, order=by_q),
        3,
        BOTH,
    ),
    "a slow draft": (TreeHost(game=TWO, forward=seconds(0.55), width=1, budget=3), 5, BOTH),
    "three ids": (TreeHost(game=THREE, budget=ALL), 3, HITS),
    "three ids, few outcomes": (TreeHost(game=THREE, width=1, budget=2), 3, BOTH),
    "three ids, three siblings": (
        TreeHost(game=THREE, nodes=6, shape=always(0, 0, 0, 1, 1, 2), budget=2),
        3,
        BOTH,
    ),
    "three ids and zeros": (
        TreeHost(game=replace(THREE, draft=toys.DRAFT3), budget=2, backup="ngram"),
        3,
        BOTH,
    ),
}
SLOW = {"three ids, three siblings", "three ids and zeros"}
RUNS = [(name, rule) for name in SETTINGS for rule in (coupled, ratio, block)]
BY_DEFAULT = [
    (name, rule)
    for name, rule in RUNS
    if name not in SLOW and (rule is not block or name in ("every outcome", "a slow draft"))
]


@dataclass
class Found:
    """What runs of a host showed.

    Attributes:
      law: of the text.
      seen: how often a proposal came from where, and how many tokens were accepted.
      differs: whether a text is not that of decoding one by one with the same noise.
      short: trees of which not a whole path was accepted.
    """

    law: dict[Text, Fraction]
    seen: Counter
    differs: bool = False
    short: int = 0


def run(host: TreeHost, length: int, stop: Text = ()) -> Found:
    """Every run of a request of so many tokens, which an id of `stop` ends."""
    found = Found(defaultdict(Fraction), Counter())

    def play(chance) -> Text:
        engine = host.engine(chance, Occurrences())
        (output,) = outputs(engine, [(0, 0)], length, stop)
        found.seen.update(output.metrics["miss_causes"] or {})
        found.seen["hit"] += bool(output.metrics["hit_rate"])
        text = tuple(output.token_ids)
        if host.game.verify is coupled:
            found.differs |= text != ended(one_by_one(host.game.target, length, chance), stop)
        for tree, accepted in engine._target.trees:
            found.short += accepted < tree.depth
        return text

    for text, _, mass in paths(play, frozenset(), lambda _key: True):
        found.law[text] += mass
    return found


def one_by_one(target: Model, length: int, chance: Chance) -> Text:
    """The text without proposals."""
    text = PROMPT
    for position in range(len(PROMPT), len(PROMPT) + length):
        text = (*text, chance.token(target(text), Key(None, position, "token", (0, 0))))
    return text[len(PROMPT) :]


def ended(text: Text, stop: Text) -> Text:
    """The text up to its first id of `stop`."""
    return text[: next((i + 1 for i, token in enumerate(text) if token in stop), len(text))]


def expected(host: TreeHost, length: int, stop: Text = ()) -> dict[Text, Fraction]:
    law: dict[Text, Fraction] = defaultdict(Fraction)
    for text, mass in autoregressive(host.game.target, PROMPT, length).items():
        law[ended(text, stop)] += mass
    return law


def of(name: str, rule) -> tuple[TreeHost, int]:
    host, length, _ = SETTINGS[name]
    return replace(host, game=replace(host.game, verify=rule)), length


@pytest.mark.parametrize(("name", "rule"), cases(RUNS, *BY_DEFAULT))
def test_the_host_keeps_the_law_with_trees(name, rule):
    host, length = of(name, rule)
    found = run(host, length)
    assert found.law == expected(host, length)
    assert {source for source in found.seen if isinstance(source, str)} >= SETTINGS[name][2]
    assert rule is not coupled or not found.differs


STOP = (1,)


@pytest.mark.parametrize("rule", [coupled, ratio])
def test_an_end_inside_one_path_ends_no_other(rule):
    host = TreeHost(game=replace(TWO, verify=rule), budget=ALL)
    found = run(host, 5, STOP)
    assert found.law == expected(host, 5, STOP)
    assert not found.differs


ANY_PATH = Edit(
    Engine,
    "_commit",
    "row_tokens, state.node = emitted[row][: accepted[row] + 1], nodes[row]",
    "row_tokens, state.node = emitted[row][: accepted[row] + 1], nodes[row]\n"
    "        if flight.drafted and 1 in map(int, flight.drafted.tokens[row]):\n"
    "            state.sequence.stop_ids = frozenset((0, 1))",
)
"""A text ends at the next token where any path of its tree has an end."""


@pytest.mark.parametrize("rule", [coupled, ratio])
def test_an_end_inside_a_path_that_ends_others_changes_the_law(rule):
    host = TreeHost(game=replace(TWO, verify=rule), budget=ALL)
    with edited([ANY_PATH]):
        found = run(host, 5, STOP)
    assert found.law != expected(host, 5, STOP)
    assert rule is not coupled or found.differs


PERFECT = Game(target=toys.TARGET3, draft=toys.TARGET3, k=2, verify=coupled)


@pytest.mark.parametrize(
    "shape",
    [always(0, 0, 1, 1), lambda start: (0, 0, 1, 1)[: 3 + start % 2]],
    ids=["one shape", "by start"],
)
def test_a_draft_that_is_the_target_hits_and_a_whole_path_is_accepted(shape):
    found = run(TreeHost(game=PERFECT, budget=ALL, shape=shape), 4)
    assert found.law == expected(TreeHost(game=PERFECT), 4)
    assert (found.short, found.seen["miss"], found.seen["cold"]) == (0, 0, 0)


COPY = "parents[slot, :length] = trees.parents[slot, winner, :length]"
LOST = {
    "a key of the cache without the node": Edit(SpeculationCache, "_find", " if node == k]", "]"),
    "a key of the cache with the depth in place of the node": Edit(
        Controller,
        "_look_up",
        "int(batch.node[slot]) if self._draft.nodes else counts[slot] - 1",
        "counts[slot] - 1",
    ),
    "the branch of another outcome promoted": Edit(
        SpeculationCache, "_find", "return of_k[rank], k", "return of_k[rank - 1], k"
    ),
    "a draft that takes the round to end at the tree's root": Edit(
        Controller, "_records_for", "node=batch.node if", "node=batch.node * 0 if"
    ),
    "parents of another branch": Edit(
        Controller, "_records_for", COPY, COPY.replace("winner", "winner - 1")
    ),
}
"""Faults that lose what is where, which the toy roles see."""


@pytest.mark.parametrize("rule", [coupled, ratio])
@pytest.mark.parametrize("fault", LOST.values(), ids=LOST)
def test_a_host_that_loses_what_is_where_is_noticed(fault, rule):
    host = TreeHost(game=replace(TWO, verify=rule), shape=by_start, budget=ALL)
    with edited([fault]), pytest.raises(AssertionError):
        run(host, 5)


UNLAWFUL = {
    "a wrong parent": Edit(
        Controller,
        "_records_for",
        COPY,
        COPY + "; parents[slot, 2:3] = 2",
    ),
    "tokens of another branch": Edit(
        Controller,
        "_records_for",
        "tokens[slot, :length] = this_round.branches.tokens[slot, winner, :length]",
        "tokens[slot, :length] = this_round.branches.tokens[slot, winner - 1, :length]",
    ),
    "a last node left out where it is a 0": Edit(
        RoundState,
        "count_won",
        "self.nodes[slot], length = within_depth(parents, limit)",
        "self.nodes[slot], length = within_depth(parents, limit); "
        "self.nodes[slot] -= branches.tokens[slot, winner, self.nodes[slot] - 1] == 0",
    ),
}
"""Faults that a rule which compares p with q does not forgive, and which keep coupled text."""


@pytest.mark.parametrize("fault", UNLAWFUL.values(), ids=UNLAWFUL)
def test_a_host_that_changes_what_was_drawn_changes_the_law_but_no_coupled_text(fault):
    host = TreeHost(game=FLAT, budget=ALL, strict=False)
    with edited([fault]):
        assert run(host, 4).law != expected(host, 4)
        assert not run(replace(host, game=replace(FLAT, verify=coupled)), 4).differs


@pytest.mark.parametrize("rule", [ratio, block])
def test_outcomes_chosen_by_what_their_branches_would_propose_change_the_law(rule):
    host = TreeHost(game=replace(TWO, verify=rule), shape=always(0, 1), budget=1, order=by_q)
    assert run(host, 4).law == expected(host, 4)
    host = replace(host, order=by_proposal)
    assert run(host, 4).law != expected(host, 4)
    assert not run(replace(host, game=replace(TWO, verify=coupled)), 4).differs

"""Whether --tree_nodes=auto takes the chain or a tree, by costs that are given."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from ssd_jax.config.config import Config
from ssd_jax.config.settings import AUTO_NODES
from ssd_jax.errors import InputError
from ssd_jax.loading.loaded import Roles
from ssd_jax.roles.drafting import TreeShape
from ssd_jax.roles.records import Drafted
from ssd_jax.speculation.rank_rates import Visit
from ssd_jax.tuning import trees
from ssd_jax.tuning.chooser import Chooser
from ssd_jax.tuning.cost_file import CostFile, KnownCosts
from ssd_jax.tuning.throughput import Costs, Guess
from ssd_jax.tuning.tree_choice import OTHER_BITS, choose, tree_round

K = 4
ROWS_COST = Costs(verify={0: 1.0, K: 1.8}, draft=0.05, rounds={1: 1.25, K: 2.0})
ROWS_ARE_FREE = Costs(verify={0: 1.0, K: 1.0}, draft=0.05, rounds={1: 1.05, K: 1.2})
TOKENS = {0: 3.2, 7: 3.6, 11: 3.8, 15: 4.0, 23: 4.2, 31: 4.3}


class Machine:
    """Rounds of trees take these times as long as those of the chain."""

    def __init__(self, factors):
        self.factors, self.measured = factors, []

    def __call__(self, nodes):
        self.measured.append(nodes)
        return self.factors[nodes]


def chosen(costs, factors, **options):
    machine = Machine(factors)
    return choose(costs, K, TOKENS, machine, **options), machine.measured


def test_where_rows_are_free_the_largest_tree_is_taken():
    choice, measured = chosen(ROWS_ARE_FREE, dict.fromkeys(AUTO_NODES, 1.0))
    assert (choice.nodes, measured) == (31, [31])
    assert choice.costs.trees == {31: 1.2}
    assert choice.line(K, 0.8) == (
        "tree_nodes auto takes a tree of 31: predicted tokens/s are 2.7 with the chain of k = 4; "
        "3.6 with a tree of 31 (an acceptance of 0.80)"
    )


def test_where_rows_cost_no_tree_is_loaded():
    choice, measured = chosen(ROWS_COST, {})
    assert (choice.nodes, measured) == (0, [])
    assert choice.line(K, 0.8).startswith(
        "tree_nodes auto takes the chain: predicted tokens/s are 1.6 with the chain of k = 4; "
        "1.4 with a tree of 7 at best"
    )


def test_where_a_step_of_the_hardware_is_too_high_a_tree_below_it_is_taken():
    """Tiles of 16 rows: 15 nodes and the pending token fill one."""
    steps = {7: 1.0, 11: 1.0, 15: 1.0, 23: 1.6, 31: 1.6}
    choice, measured = chosen(ROWS_ARE_FREE, steps)
    assert choice.nodes == 15
    assert measured == [31, 15]


def test_trees_that_turn_out_slow_leave_the_chain():
    choice, measured = chosen(ROWS_ARE_FREE, {n: 1 + n / 10 for n in AUTO_NODES})
    assert choice.nodes == 0
    assert len(measured) == len(set(measured))
    assert len(choice.rates) == 2


def test_a_gain_of_less_than_3_percent_is_not_taken():
    for factor, nodes in ((1.28, 31), (1.32, 0)):
        choice, _ = chosen(ROWS_ARE_FREE, {n: factor if n == 31 else 2.0 for n in AUTO_NODES})
        assert choice.nodes == nodes
        assert ("less than 3% more" in choice.line(K, 0.8)) == (not nodes)


def test_what_was_measured_before_is_not_measured_again():
    costs = dataclasses.replace(ROWS_ARE_FREE, trees={31: 1.2})
    choice, measured = chosen(costs, {})
    assert (choice.nodes, measured) == (31, [])


def test_trees_whose_rows_are_computed_otherwise_are_not_taken():
    choice, measured = chosen(ROWS_ARE_FREE, {31: None})
    assert (choice.nodes, measured, choice.reason) == (0, [31], OTHER_BITS)


def test_the_round_of_a_tree_is_guessed_from_those_that_are_known():
    assert tree_round(ROWS_COST, K, 14) == pytest.approx(2.0 + 10 * 0.8 / 4)
    costs = dataclasses.replace(ROWS_COST, trees={15: 3.1, 23: 3.5})
    assert tree_round(costs, K, 15) == 3.1
    assert tree_round(costs, K, 19) == pytest.approx((3.1 + 3.3) / 2)
    assert tree_round(costs, K, 31) == pytest.approx(3.9)
    assert tree_round(costs, K, 9) == pytest.approx((2.0 + 2.5) / 2)
    noisy = dataclasses.replace(ROWS_COST, trees={15: 3.1, 23: 3.0})
    assert tree_round(noisy, K, 31) == 3.0


CONFIG = Config(target="t", mode="sd", draft="d", k=K, tree_nodes="auto", verify="coupled")


def opened(known, tmp_path, config=CONFIG):
    file = CostFile(tmp_path, {"models": "a"})
    return Chooser(config, known, budgets=(), file=file), file


def read(file):
    return file.read(widths=(0, K), budgets=())


def test_measured_trees_and_counted_ranks_are_known_at_the_next_start(tmp_path):
    chooser, file = opened(KnownCosts(ROWS_ARE_FREE, Guess()), tmp_path)
    machine = Machine(dict.fromkeys(AUTO_NODES, 1.0))
    assert chooser.choose_tree(AUTO_NODES, machine) == 31
    assert read(file).costs.trees == {31: 1.2}
    rates = chooser.rank_rates(TreeShape(nodes=31, depth=K))
    for _ in range(500):
        rates.observe([Visit(2, [0, 1, 2], None)], hot=True)
    chooser.close()
    again = read(file)
    assert again.guess.acceptance < 0.05
    assert again.guess.judged == 500
    later, _ = opened(again, tmp_path)
    learned = later.rank_rates(TreeShape(nodes=31, depth=K)).by_class
    assert learned[2, :3].max() < 0.05
    later.choose_tree([31], machine)
    assert machine.measured == [31]
    later.close()
    assert read(file).guess == again.guess


@pytest.mark.parametrize(("verify", "stored"), [("coupled", True), ("ratio", False)])
def test_times_of_rounds_are_kept_only_where_no_text_depends_on_them(tmp_path, verify, stored):
    """A tree is chosen by times, and beside greedy rows there may be sampled ones."""
    config = dataclasses.replace(CONFIG, verify=verify)
    known = KnownCosts(dataclasses.replace(ROWS_ARE_FREE, trees={31: 1.2}), Guess())
    chooser, file = opened(known, tmp_path, config)
    assert chooser.choose_tree([31], Machine({})) == 31
    timer, drafted = chooser.timer("sd", K), Drafted(np.array([K]), None)
    for index in range(100):
        timer.read([1], drafted, 1.5 * index)
    chooser.close()
    found = read(file)
    assert (found is not None) == stored
    assert not stored or found.slowness == pytest.approx(1.25)


def test_counted_ranks_decide(tmp_path):
    """The target's token is the draft's first or none of its six: beside it no node is taken."""
    steep, _ = opened(KnownCosts(ROWS_ARE_FREE, Guess(acceptance=0.7)), tmp_path)
    rates = steep.rank_rates(TreeShape(nodes=31, depth=K))
    for gap_class in range(8):
        for _ in range(300):
            rates.observe([Visit(gap_class, range(6), None)] * 3, hot=False)
            rates.observe([Visit(gap_class, range(6), 0)] * 4, hot=False)
            rates.observe([Visit(gap_class, range(6), 0)] * 3, hot=False)
    steep.close()
    later, _ = opened(read(CostFile(tmp_path, {"models": "a"})), tmp_path)
    assert later._guess.acceptance == pytest.approx(0.7, abs=0.01)
    for chooser, nodes in ((steep, 31), (later, 0)):
        cheap = Machine(dict.fromkeys(AUTO_NODES, 1.2))
        assert chooser.choose_tree(AUTO_NODES, cheap) == nodes


def loaded_of(config, exact="distribution"):
    def give_up():
        raise AssertionError("no tree may be loaded")

    return SimpleNamespace(
        config=config,
        resolved=SimpleNamespace(ks=(K,), context=64, nodes=0),
        exact=exact,
        programs=SimpleNamespace(widths=(0, K)),
        inline=SimpleNamespace(parameters=give_up),
    )


@pytest.mark.parametrize("verify", ["ratio", "block"])
def test_requests_that_are_sampled_by_a_rule_with_fixed_shapes_have_the_chain(
    tmp_path, monkeypatch, verify
):
    config = dataclasses.replace(CONFIG, verify=verify)
    chooser, _ = opened(KnownCosts(ROWS_ARE_FREE, Guess()), tmp_path, config)
    loaded = loaded_of(config)
    monkeypatch.setattr(trees, "load_tree", lambda *_: pytest.fail("a tree was loaded"))
    assert trees.choose_tree(loaded, chooser, 0.7) is loaded
    assert chooser.line == (
        f"tree_nodes auto takes the chain: verify = '{verify}' counts no ranks for requests that "
        "are sampled by default"
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_chosen_tree_is_loaded_once(tmp_path, monkeypatch, temperature):
    chooser, _ = opened(KnownCosts(ROWS_ARE_FREE, Guess()), tmp_path)
    loaded, opened_trees = loaded_of(CONFIG), []

    def load_tree(_chain, nodes, _status):
        opened_trees.append(nodes)
        return f"a tree of {nodes}"

    monkeypatch.setattr(trees, "load_tree", load_tree)
    monkeypatch.setattr(trees, "measure_tree", lambda chain, tree: 1.0)
    assert trees.choose_tree(loaded, chooser, temperature) == "a tree of 31"
    assert opened_trees == [31]


def test_in_bitwise_mode_a_tree_must_have_the_bits_of_a_text(tmp_path, monkeypatch):
    chooser, _ = opened(KnownCosts(ROWS_ARE_FREE, Guess()), tmp_path)
    loaded = loaded_of(CONFIG, "bitwise")
    tree = SimpleNamespace(programs=None, parameters=None)
    monkeypatch.setattr(trees, "load_tree", lambda *_: tree)
    monkeypatch.setattr(trees, "tree_agrees", lambda *_: False)
    assert trees.choose_tree(loaded, chooser, 0.0) is loaded
    assert chooser.line.endswith(OTHER_BITS)


def test_trees_and_chain_are_timed_in_turns(monkeypatch):
    turns = []

    def rounds_of(name, _roles, _clock):
        def run():
            turns.append(name.config.name)
            return {"chain": 2.0, "tree": 3.0}[name.config.name]

        return SimpleNamespace(begin=lambda k: turns.append(k), run=run)

    def loaded(name):
        roles = Roles(None, None, lambda: turns.append("closed"))
        config = SimpleNamespace(speculated=K, name=name)
        return SimpleNamespace(config=config, roles=lambda mode, k: roles)

    monkeypatch.setattr(trees, "rounds_of", rounds_of)
    assert trees.measure_tree(loaded("chain"), loaded("tree"), clock=lambda: 0.0) == 1.5
    assert turns == [K, "chain", K, "tree"] * 3 + ["closed"] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "ssd"}, "tree_nodes = 'auto' in mode = 'ssd' would measure trees at the start"),
        ({"k": "auto"}, "tree_nodes = 'auto' needs a number for k"),
        ({"tree_nodes": "some"}, "tree_nodes = 'some' is impossible; give auto or 0 to 31"),
        ({"hosts": "10.0.0.1:4000,count=2"}, "is measured at the start, and with hosts"),
    ],
)
def test_a_choice_of_trees_that_is_not_possible_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **settings)

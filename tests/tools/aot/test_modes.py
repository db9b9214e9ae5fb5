"""AR, SD and SSD on a slice from given costs: memory, splits, rates, and the line that sums up."""

import dataclasses

import pytest

from ssd_jax.roles.drafting import TreeShape
from ssd_jax.speculation.fan_out import UniformFanOut
from ssd_jax.speculation.rank_rates import RankRates
from ssd_jax.speculation.tree_tokens import hit_rates, tree_tokens
from ssd_jax.speculation.tuner import SpeculationPlan
from ssd_jax.tools.aot.modes import ACCEPTANCES, Mode, losses, pays_from, splits, verdict
from ssd_jax.tuning import throughput
from ssd_jax.tuning.throughput import Costs, Guess
from tests.tools.aot.costs import (
    AR,
    BRANCHES,
    CHIP,
    DRAFT,
    GROWTH,
    SD,
    SIZES,
    SSD,
    TARGET,
    TREE_BRANCHES,
    TREES,
    part,
)

ALONE = Mode(name="ar", target=part("target", 1, TARGET))


def test_rates_are_those_of_the_one_estimator():
    fan_out = UniformFanOut()
    verify = {0: 8.5, 4: 10.0}
    seen = Guess(acceptance=0.8)
    plan = SpeculationPlan.of_branches(4, 16)
    drafted = (1.5 + 3 * 1.0) / 4
    assert AR.rate(0.8, SIZES, fan_out) == pytest.approx(2 / 8.5)
    costs = Costs(verify=verify, draft=drafted)
    assert SD.rate(0.8, SIZES, fan_out) == throughput.sd(costs, seen, plan, rows=2)
    step = (0.1 + 2.0 + 3 * 1.2) / 4
    costs = Costs(verify=verify, backup=drafted, step={16: step})
    rates = [throughput.ssd(costs, seen, plan, fan_out, waits=w, rows=2) for w in (True, False)]
    assert SSD.rate(0.8, SIZES, fan_out) == max(rates)
    assert SSD.costs(SIZES).contention == 0


def test_trees_take_their_own_programs_and_commit_what_a_tree_is_expected_to():
    nodes = 16
    sizes = dataclasses.replace(SIZES, nodes=nodes)
    target, draft = part("target", 8, TARGET | TREES), part("draft", 8, DRAFT | GROWTH)
    trees = Mode(name="sd", target=target, draft=draft, nodes=nodes)
    assert str(trees) == "sd 8, trees of 16"
    seconds = 9.5 + 1.25 + 1.75 + 3 * 1.1
    assert trees.costs(sizes).trees == {nodes: pytest.approx(seconds)}
    shape = TreeShape(nodes=nodes, depth=4)
    expected = tree_tokens(RankRates(shape).by_class, 0.8, shape)
    assert trees.rate(0.8, sizes, UniformFanOut()) == pytest.approx(2 * expected / seconds)
    chain = dataclasses.replace(trees, nodes=0)
    assert chain.rate(0.8, sizes, UniformFanOut()) == SD.rate(0.8, SIZES, UniformFanOut())


def _ssd_with_trees(draft_seconds, acceptance):
    """Tokens/s of two rows, the share of outcomes that branches have, and tokens of a tree."""
    sizes = dataclasses.replace(SIZES, nodes=16)
    mode = Mode(
        name="ssd",
        target=part("target", 4, TARGET | TREES),
        draft=part("draft", 4, DRAFT | GROWTH | TREE_BRANCHES | draft_seconds),
        nodes=16,
    )
    shape = TreeShape(nodes=16, depth=4, ancestors=4)
    rates = RankRates(shape).by_class
    return (
        mode.rate(acceptance, sizes, UniformFanOut()),
        hit_rates(rates, acceptance, shape, 16),
        tree_tokens(rates, acceptance, shape),
    )


def test_trees_of_ssd_wait_for_a_tree_after_a_miss_where_that_is_fast():
    found, (behind_tree, _), tokens = _ssd_with_trees({"grow_tree sampled": 0.1}, 0.8)
    backup = 1.75 + 3 * 0.1 + 0.2
    period = 9.5 + 1.25 + (1 - behind_tree**2) * backup
    assert found == pytest.approx(2 * tokens / period)


def test_trees_of_ssd_draw_one_token_after_a_miss_where_a_tree_takes_long():
    found, (behind_tree, behind_token), tokens = _ssd_with_trees({"begin_tree sampled": 99.0}, 0.8)
    share = behind_token / (1 - behind_tree + behind_token)
    alone = (1 - share) ** 2
    period = (1 - alone) * (9.5 + 1.25) + alone * 8.5
    assert found == pytest.approx(2 * (share * tokens + 1 - share) / period)


def test_trees_of_ssd_have_fewer_depths_where_the_draft_takes_longer_than_the_target():
    found, *_ = _ssd_with_trees({"grow_branches sampled": 99.0}, 0.8)
    shape = TreeShape(nodes=16, depth=1, ancestors=4)
    rates = RankRates(shape).by_class
    missed = 1 - hit_rates(rates, 0.8, shape, 16)[0] ** 2
    period = 9.5 + 1.25 + missed * (1.75 + 0.2)
    assert found == pytest.approx(2 * tree_tokens(rates, 0.8, shape) / period)


def test_one_token_takes_a_forward_of_the_branches_more():
    names = {name.replace("4", "1"): seconds for name, seconds in (DRAFT | BRANCHES).items()}
    target = {name.replace(" 4", " 1"): seconds for name, seconds in TARGET.items()}
    mode = Mode(name="ssd", target=part("target", 4, target), draft=part("draft", 4, names))
    costs = mode.costs(dataclasses.replace(SIZES, k=1))
    assert costs.step == {16: pytest.approx((0.1 + 2.0 + 1.2) / 2)}
    assert costs.backup == pytest.approx(1.5)


def test_memory_is_shared_by_models_on_the_same_devices_and_by_no_others():
    target = part("target", 8, TARGET, other_buffers=30, code=1)
    draft = part("draft", 8, DRAFT, other_buffers=50, code=2)
    ((both, _),) = Mode(name="sd", target=target, draft=draft).needs(CHIP)
    code = len(TARGET) + 2 * len(DRAFT)
    assert both.parts == {"weights": 200, "pages": 20, "running": 50, "code": code}
    assert both.total == 270 + code
    apart = Mode(name="ssd", target=target, draft=draft).needs(CHIP)
    assert [need.total for need, _ in apart] == [140 + len(TARGET), 160 + 2 * len(DRAFT)]


def test_a_pair_that_does_not_fit_is_named_with_sizes():
    assert SD.refused(CHIP) is None
    large = part("target", 8, TARGET, weights=1 << 31)
    assert Mode(name="ar", target=large).refused(CHIP) == (
        "ar 8: target takes 2.0 GiB of a device, which has 0.00"
    )
    said = part("draft", 1, {}, refused="too large")
    assert Mode(name="ssd", target=AR.target, draft=said).refused(CHIP) == "draft on 1: too large"


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(1, []), (2, [(1, 1)]), (4, [(2, 2), (2, 1)]), (5, [(4, 1)]), (8, [(4, 4), (4, 1)])],
)
def test_splits_leave_the_target_a_power_of_two(count, sizes):
    found = splits(count)
    assert [(len(target), len(draft)) for target, draft in found] == sizes
    for target, draft in found:
        assert not {*target} & {*draft}
        assert {*target, *draft} <= {*range(count)}
    given = ((0, 1, 2), (3,))
    assert splits(4, given) == [given]


def test_the_verdict_names_the_split_that_pays_and_where():
    rates = [[10.0] * 4, [20.0] * 4, [19.0, 22.0, 25.0, 30.0]]
    assert verdict([AR, SD, SSD], rates, "8 v6e") == (
        "SSD pays on 8 v6e at acceptances of 0.7, 0.8, 0.9: 1.50 times sd 8 at an acceptance of "
        "0.9, with the target on 4 devices, draft on 4 devices"
    )


def test_the_verdict_says_what_is_faster_where_ssd_does_not_pay():
    rates = [[10.0] * 4, [20.0] * 4, [9.0, 10.0, 11.0, 12.0]]
    said = verdict([AR, SD, SSD], rates, "8 v6e")
    assert said.startswith("SSD does not pay on 8 v6e: at best 0.60 times sd 8")
    assert said.endswith("; take sd")
    assert verdict([AR, SD, SSD], [rates[1], rates[0], rates[2]], "8 v6e").endswith("; take ar")


def test_where_speculation_loses_is_said():
    """As with experts, of which more rows use more. A round takes 4.5 more than `verify`, and AR's
    8.5."""

    def found(forward, *names):
        target = part("target", 8, TARGET | {"forward 4": forward})
        modes = [Mode(name="ar", target=target), dataclasses.replace(SD, target=target)]
        modes.append(dataclasses.replace(SSD, target=dataclasses.replace(target, devices=(0,))))
        fitting = [mode for mode in modes if mode.name in names]
        return losses(fitting, SIZES, UniformFanOut())

    assert found(9.0, "ar", "sd") is None
    dear = "AR is faster than SD and SSD below an acceptance of 0.70: verifying 4 tokens takes 2.24"
    assert found(18.0, "ar", "sd") == f"{dear} times as long as a forward of one"
    of_both = found(18.0, "ar", "sd", "ssd")
    assert of_both is None or float(of_both.split(" of ")[1].split(":")[0]) <= 0.70
    never = "AR is faster than SD and SSD at every acceptance: verifying 4 tokens takes 6.00"
    assert found(50.0, "ar", "sd", "ssd") == f"{never} times as long as a forward of one"
    assert found(50.0, "ar") is found(50.0, "sd", "ssd") is None


def test_the_least_acceptance_is_that_of_the_fastest_mode():
    fan_out = UniformFanOut()
    (of_sd, of_ssd), of_both = (
        [pays_from([AR, mode], SIZES, fan_out) for mode in (SD, SSD)],
        pays_from([AR, SD, SSD], SIZES, fan_out),
    )
    assert of_both == min(of_sd, of_ssd)
    assert SD.rate(of_sd, SIZES, fan_out) >= AR.rate(0, SIZES, fan_out)
    assert SD.rate(of_sd - 0.01, SIZES, fan_out) < AR.rate(0, SIZES, fan_out)


def test_the_verdict_of_what_does_not_fit():
    assert "take two or more" in verdict([ALONE], [[1.0] * 4], "1 v5e")
    assert "no split of it holds both" in verdict([AR], [[1.0] * 4], "8 v5e")
    assert "all that fits" in verdict([SSD], [[1.0] * 4], "8 v5e")
    assert verdict([], [], "8 v5e").startswith("nothing fits 8 v5e")


def test_ssd_pays_where_drafting_is_long_and_has_devices_of_its_own():
    """On the same costs for both groups of devices, at every acceptance."""
    rates = [[mode.rate(a, SIZES, UniformFanOut()) for a in ACCEPTANCES] for mode in (AR, SD, SSD)]
    assert all(ssd > sd > ar for ar, sd, ssd in zip(*rates, strict=True))

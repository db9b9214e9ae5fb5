"""What is generated is a function of the settings and the prompts alone."""

from collections import Counter

import pytest

from ssd_jax.errors import InputError
from ssd_jax.tools.distill.generate import plan_shards
from ssd_jax.tools.distill.prompt_ids import PromptIds
from ssd_jax.tools.distill.settings import GenerateSettings, MagpieSettings

PROMPTS = [PromptIds(set="a", index=i, ids=[0] * (i + 1)) for i in range(7)]


def plan(prompts=PROMPTS, **changes):
    settings = {"max_tokens": 10, "slots": 2, "shard_tokens": 45, "temperatures": (0.0, 0.5, 1.0)}
    return plan_shards(prompts, GenerateSettings(**settings | changes))


def flat(shards):
    return [completion for shard in shards for completion in shard]


def test_each_prompt_is_completed_once_by_default():
    completions = flat(plan())
    assert sorted(one.prompt for one in completions) == list(range(7))
    assert [one.index for one in completions] == list(range(7))


def temperatures_of_prompts(completions):
    taken = {}
    for one in completions:
        taken.setdefault(one.prompt, []).append(one.temperature)
    return taken


def test_more_completions_go_through_all_prompts_again():
    completions = flat(plan(completions=21))
    assert set(Counter(one.prompt for one in completions).values()) == {3}
    orders = [[one.prompt for one in completions[i : i + 7]] for i in (0, 7, 14)]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("seed", range(3))
def test_each_prompt_goes_through_the_temperatures_in_turn(seed):
    completions = flat(plan(completions=21, seed=seed))
    turns = {(0.0, 0.5, 1.0), (0.5, 1.0, 0.0), (1.0, 0.0, 0.5)}
    assert {*map(tuple, temperatures_of_prompts(completions).values())} == turns


@pytest.mark.parametrize("temperatures", [(0.0, 0.5, 1.0), (0.0, 0.0, 1.0), (0.0, 1.0)])
def test_no_text_is_generated_twice(temperatures):
    completions = flat(plan(completions=60, temperatures=temperatures))
    assert [one.index for one in completions] == list(range(60))
    for taken in temperatures_of_prompts(completions).values():
        assert taken.count(0.0) == 1
        assert len(taken) > 3


def test_a_prompt_that_is_there_several_times_is_completed_greedily_once():
    prompts = [PromptIds(set="a", index=0, ids=[1])] * 5 + PROMPTS[1:3]
    completions = flat(plan(prompts))
    assert [one.index for one in completions] == list(range(7))
    copies = [one.temperature for one in completions if one.prompt < 5]
    assert copies.count(0.0) == 1
    with pytest.raises(InputError, match=r"completions = 7 is more than the 3 prompts"):
        plan(prompts, temperatures=(0.0,))


def test_more_than_can_differ_is_refused():
    assert len(flat(plan(completions=7, temperatures=(0.0,)))) == 7
    with pytest.raises(InputError, match=r"completions = 8 is more than the 7 .*lower it to 7"):
        plan(completions=8, temperatures=(0.0,))


def test_errors_name_the_section_that_has_the_setting():
    settings = MagpieSettings(shard_tokens=10)
    with pytest.raises(InputError, match=r"magpie\.shard_tokens = 10 .* lower magpie\.slots"):
        plan_shards([PromptIds(set="magpie", index=0, ids=[1])], settings, "magpie")


def test_a_shard_never_exceeds_its_size():
    for shard in plan(completions=50):
        assert sum(len(PROMPTS[one.prompt].ids) + 10 for one in shard) <= 45
    assert [len(shard) for shard in plan(slots=1, shard_tokens=17)] == [1] * 7
    assert len(plan(shard_tokens=10**6)) == 1


def test_the_order_is_that_of_the_seed():
    # Golden: a plan that changes with a version would mix two plans in one directory.
    assert [one.prompt for one in flat(plan(seed=0))] == [4, 2, 6, 0, 5, 1, 3]
    again = flat(plan(seed=0, completions=10))[7:]
    assert [(one.prompt, one.temperature) for one in again] == [(1, 0.0), (3, 0.5), (4, 0.5)]
    assert flat(plan(seed=0)) == flat(plan(seed=0))
    assert flat(plan(seed=1)) != flat(plan(seed=0))

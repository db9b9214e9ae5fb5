"""Whatever a draft predicts, and whoever comes and goes, SSD writes what plain decoding writes."""

import functools

import pytest

from tests.engine.letters import LONG, drain, make, outputs, request, spell
from tests.selection import cases
from tests.speculation.traffic import PREDICTORS, results, script
from tests.speculation.watched import ssd

CONTEXT = 28


SHAPES = ["uniform", "geometric", "measured", "confidence", "last", "first and last"]


def fan_out(name, k, budget):
    only_last, first_and_last = [0] * k + [budget], [budget - 1, *[0] * (k - 1), 1]
    lists = {"last": only_last, "first and last": first_and_last}
    return ",".join(map(str, lists[name])) if name in lists else name


@functools.cache
def plain(slots):
    """What decoding token by token writes."""
    _, engine = make(script, slots=slots, context=CONTEXT)
    return results(engine)


def test_plain_decoding_ends_the_requests_in_every_way():
    reasons = [reason for _, _, reason in plain(4)]
    assert (reasons.count("stop"), reasons.count("length")) == (2, 6)
    assert [len(token_ids) for token_ids, _, _ in plain(1)] == [9, 14, 26, 2, 18, 7, 1, 20]


@pytest.mark.parametrize(("slots", "ks"), cases([(1, (1, 3)), (4, (2, 4))], (4, (2, 4))))
@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backup", cases(["none", "ngram", "random", "draft"], "none", "draft"))
def test_text_is_that_of_plain_decoding(backup, shape, predictor, slots, ks):
    for k in ks:
        parts = ssd(
            script,
            slots=slots,
            context=CONTEXT,
            k=k,
            draft_k=max(ks),
            budget=6,
            fan_out=fan_out(shape, k, 6),
            backup=backup,
            longer=k == 3,
            rank=PREDICTORS[predictor],
            wrong=lambda position: position % 5 == 0,
        )
        assert results(parts.engine) == plain(slots)


def test_the_predictor_changes_the_rounds():
    """So the comparison above is one of different runs."""
    rounds = {}
    for name, rank in PREDICTORS.items():
        parts = ssd(script, slots=4, context=CONTEXT, backup="draft", rank=rank)
        results(parts.engine)
        found = [
            found for _, drafted in parts.controller.rounds for found in drafted.sources.values()
        ]
        rounds[name] = found.count("hit") / len(found)
    assert rounds["right"] == 1
    assert rounds["wrong"] == 0
    assert 0.1 < rounds["shuffled"] < 0.9


def misses(*letters):
    """A predictor that knows nothing of prompts that begin with these letters."""
    return lambda prompt, position: None if chr(prompt[0]) in letters else 0


def figures(output):
    names = ("acceptance_histogram", "hit_rate", "miss_causes")
    return output.text, [output.metrics[name] for name in names]


@pytest.mark.parametrize("backup", ["none", "random", "draft"])
def test_a_row_that_misses_leaves_the_hits_of_others_alone(backup):
    settings = {"backup": backup, "rank": misses("B", "D")}
    asked = [request([65 + row], index=row, max_tokens=30 + row) for row in range(4)]
    parts = ssd(spell(LONG), slots=4, **settings)
    together = {parts.engine.add(request): request for request in asked}
    done = outputs(drain(parts.engine))
    for number, single in together.items():
        alone = ssd(spell(LONG), slots=4, **settings)
        alone.engine.add(single)
        (output,) = outputs(drain(alone.engine)).values()
        assert figures(done[number]) == figures(output)
    assert [done[number].metrics["hit_rate"] for number in together] == [1, 0, 1, 0]
    assert {slot for waiting in parts.draft.drafted for slot in waiting} == (
        {1, 3} if backup == "draft" else set()
    )
    mixed = [drafted for rows, drafted in parts.controller.rounds if len(rows) == 4]
    assert len(mixed) > 5


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("size", [1, 6])
def test_a_cancelled_request_leaves_nothing_to_the_next_one_in_its_slot(steps, size):
    """Cancelled as it waits, in its prompt, before its first proposal, and later."""
    settings = {"backup": "draft", "rank": misses("B"), "k": 4}
    running, dropped, late = (request([65] * 3, max_tokens=40), request([66] * size), request([67]))
    parts = ssd(spell(LONG), **settings)
    first, second = parts.engine.add(running), parts.engine.add(dropped)
    events = [event for _ in range(steps) for event in parts.engine.step()]
    parts.engine.cancel(second)
    third = parts.engine.add(late)
    done = outputs(events + drain(parts.engine))
    assert done[second].finish_reason == "cancelled"
    assert LONG.startswith(done[second].text)
    assert len(parts.target.opened) == (2 if steps == 0 else 3)
    assert parts.target.opened[-1].slot == 1
    for number, single in ((first, running), (third, late)):
        alone = ssd(spell(LONG), **settings)
        alone.engine.add(single)
        (output,) = outputs(drain(alone.engine)).values()
        assert figures(done[number]) == figures(output)
        assert done[number].metrics["hit_rate"] == 1


@pytest.mark.parametrize("backup", ["none", "draft"])
def test_a_slot_is_used_again_in_the_round_after_its_request_has_ended(backup):
    parts = ssd(spell(LONG), slots=1, backup=backup, rank=misses("B"))
    numbers = [parts.engine.add(request([65 + n % 2], max_tokens=1 + n)) for n in range(9)]
    done = outputs(drain(parts.engine))
    assert [done[number].text for number in numbers] == [LONG[: 1 + n] for n in range(9)]
    assert [done[number].metrics["hit_rate"] for number in numbers[2:]] == [1, 0, 1, 0, 1, 0, 1]


def test_a_request_is_not_changed_by_what_others_taught_a_policy():
    """Fan-out learns from its own sequence alone: hits, and with them L and keys, stay the same."""
    rank = lambda prompt, position: (position * 7) % 5  # noqa: E731
    parts = ssd(spell(LONG), fan_out="geometric", backup="draft", rank=rank, slots=1)
    for number in range(4):
        parts.engine.add(request([65 + number], max_tokens=40))
    found = list(outputs(drain(parts.engine)).values())
    assert len(found) == 4
    for output in found:
        assert output.metrics["acceptance_histogram"] == found[0].metrics["acceptance_histogram"]
        assert 0 < output.metrics["hit_rate"] < 1

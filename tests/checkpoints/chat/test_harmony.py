"""Harmony texts: which words are reasoning, which are the answer, and to whom others go."""

from itertools import groupby, pairwise
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_jax.checkpoints.chat import harmony
from ssd_jax.checkpoints.chat.harmony import MARKS, HarmonyReader, mark_ids, writes_harmony

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    '{"x": 1}<|call|>'
)


def read(text, cuts=()):
    """Channel, recipient and text of each message of a text that comes in pieces."""
    reader, places = HarmonyReader(), [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    pieces = [p for begin, end in pairwise(places) for p in reader.push(text[begin:end])]
    numbers, count = [], 0
    for piece in [*pieces, *reader.finish()]:
        count += piece.is_first
        numbers.append((count, piece))
    return [
        (first.channel, first.recipient, first.text + "".join(p.text for _, p in rest))
        for _, ((_, first), *rest) in groupby(numbers, key=lambda pair: pair[0])
    ]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("", []),
        (f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.", [("analysis", None, "Hm."), ("final", None, "Yes.")]),
        (f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.<|return|>", 2),
        (f"{ANALYSIS}Hm.<|end|>{CALL}", [("analysis", None, "Hm."),
                                          ("commentary", "functions.f", '{"x": 1}')]),
        (
            " to=functions.f<|channel|>commentary json<|message|>{}",
            [("commentary", "functions.f", "{}")],
        ),
        (f"{ANALYSIS}Hm", [("analysis", None, "Hm")]),
        (f"{ANALYSIS}", [("analysis", None, "")]),
        (f"{ANALYSIS}Hm.<|end|><|start|>assistant<|chan", [("analysis", None, "Hm.")]),
        ("<|channel|>ana", []),
        ('{"a": "b"}', [("final", None, '{"a": "b"}')]),  # under a grammar
        ("1 < 2 <|", [("final", None, "1 < 2 <|")]),
        (f"<|channel|>final<|message|>a <b <|en {FINAL}c", [("final", None, "a <b <|en "),
                                                             ("final", None, "c")]),
        ("<|channel|>commentary<|message|>I look.<|end|>" + CALL, [
            ("commentary", None, "I look."), ("commentary", "functions.f", '{"x": 1}')]),
    ],
)  # fmt: skip
def test_messages_of_a_text(text, messages):
    found = read(text)
    assert (len(found) if isinstance(messages, int) else found) == messages
    assert read(text, range(len(text))) == found


FRAGMENTS = [*MARKS, "<|", "<|channel|>final", "assistant", "to=functions.f ", "z", " ", ANALYSIS]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
quick = settings(deadline=None, max_examples=150, derandomize=True, database=None)


@quick
@given(text=texts, cuts=st.lists(st.integers(0, 300), max_size=8))
def test_a_streamed_text_is_the_whole_one(text, cuts):
    assert read(text, cuts) == read(text)


def test_text_is_held_back_only_while_it_may_begin_a_mark():
    reader = HarmonyReader()
    assert reader.push("<|channel|>final<|mess") == []
    assert [p.text for p in reader.push("age|>one <")] == ["", "one "]
    assert reader.push("|e") == []
    assert [p.text for p in reader.push("xit")] == ["<|exit"]


def test_a_reader_that_holds_nothing_back_is_caught():
    text = f"{ANALYSIS}Hm.<|end|>{FINAL}Yes."
    with mock.patch.object(harmony, "_held", return_value=0):
        assert read(text, range(len(text))) != read(text)


def test_templates_with_channels_have_marks_that_texts_show():
    template = "{{ '<|start|>assistant<|channel|>final<|message|>' }}"
    assert writes_harmony(template)
    assert mark_ids(template, {"<|end|>": 7, "<|message|>": 8, "<|x|>": 9}) == {7, 8}
    for other in (None, "<|im_start|>", "<|message|>"):
        assert not writes_harmony(other)
        assert mark_ids(other, {"<|end|>": 7}) == frozenset()

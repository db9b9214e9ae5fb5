"""Calls in texts: which text is one, what comes of it and when, and that nothing is lost."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_jax.server.tool_calls import json_parser
from ssd_jax.server.tool_calls.call_reader import CallReader
from ssd_jax.server.tool_calls.json_parser import JsonCallParser
from ssd_jax.server.tool_calls.protocols import Arguments, CallBegin, Content
from tests.server.tool_calls.parsing import parse, parser

F = '{"name": "f", "arguments": {"x": [1, "}<"]}}'
G = '{"name": "g", "parameters": {}}'
X = '{"x": [1, "}<"]}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{F}\n</tool_call>", "", [("f", X)]),
        (f"<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>\n", "", [("f", X), ("g", "{}")]),
        (f"Let me see.\n<tool_call>\n{F}\n</tool_call>", "Let me see.", [("f", X)]),
        (f"<tool_call>{F}</tool_call>\nDone.\n", "Done.", [("f", X)]),
        (f"a <tool_call>{F}</tool_call> b", "a  b", [("f", X)]),
        (f"<tool_call>{F}", "", [("f", X)]),
        (f"<tool_call>{F[:-1]}</tool_call>", "", [("f", X)]),
        (f"<tool_call>{F}<tool_call>{G}", "", [("f", X), ("g", "{}")]),
        (f"<tool_call><tool_call>{F}</tool_call>", "<tool_call>", [("f", X)]),
        (f"<tool_call> hm <tool_call>{F}</tool_call>", "<tool_call> hm", [("f", X)]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>',
            "",
            [("f", '{"x": 1}')],
        ),
        (
            '<tool_call>{"type": "function", "id": 1, "name": "\\u0066", "arguments": {}, "id": 2}',
            "",
            [("f", "{}")],
        ),
        ('<tool_call>{"name": "f", "arguments": {"x": tru', "", [("f", '{"x": tru')]),
        (
            '<tool_call>{"name": "f", "arguments": {"x": True}}</tool_call> b',
            "b",
            [("f", '{"x": True}}')],
        ),
        (f"<tool_call>{F}</tool_c", "</tool_c", [("f", X)]),
    ],
)
def test_calls_of_hermes(text, content, calls):
    assert parse(parser("hermes"), text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (G, "", [("g", "{}")]),
        (f"\n{F}\n", "", [("f", X)]),
        (f"<|python_tag|>{F}", "", [("f", X)]),
        (f"{F}; {G}", "", [("f", X), ("g", "{}")]),
        (f"{F}\n{G};", ";", [("f", X), ("g", "{}")]),
        (f"See: <|python_tag|>{F}", "See:", [("f", X)]),
        (f"{F} {{", "{", [("f", X)]),
        ('{"name": "f", "parameters": {"x": .5}} b', "", [("f", '{"x": .5}} b')]),
    ],
)
def test_calls_of_llama(text, content, calls):
    assert parse(parser("llama3_json"), text) == (content, calls)


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "plain text \n",
        "1 < 2 and <tool_cal",
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>call f</tool_call>",
        "<tool_call>{'name': 'f'}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {\'x\': 1}}</tool_call>',
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": ',
        '<tool_call>{"nam',
        f"<tool_call>[{F}]</tool_call>",
        '<|python_tag|>brave_search.call(query="f")',
        '<|python_tag|>{"x": 1}',
        '{"x": {"name": "f", "parameters": {}}} \n',
        '{"name": "h", "parameters": {}}',
        '{"name": "f", "parameters": ',
    ],
)
def test_what_is_no_call_is_content_to_the_letter(form, text):
    assert parse(parser(form), text) == (text, [])


def test_a_text_that_only_mentions_an_object_is_no_call_of_llama():
    text = f"Such as {G}"
    assert parse(parser("llama3_json"), text) == (text, [])


def test_text_is_held_back_only_while_it_may_begin_a_call():
    calls = parser("hermes")
    assert calls.push("one two") == [Content("one two")]
    assert calls.push(" <") == calls.push("tool_cal") == []
    assert calls.push("m") == [Content(" <tool_calm")]
    calls = parser("llama3_json")
    assert calls.push(' {"nam') == calls.push('e": "f", "p') == []
    assert calls.push('": 1') == [Content(' {"name": "f", "p": 1')]
    assert calls.push('}, {"name') == [Content('}, {"name')]


def test_the_name_comes_first_and_arguments_as_they_come():
    calls = parser("hermes")
    assert calls.push('<tool_call>\n{"name": "f", "argumen') == []
    assert calls.push('ts": {') == []  # perhaps no JSON follows
    assert calls.push('"x') == [CallBegin("f"), Arguments('{"x')]
    assert calls.push('": "a') == [Arguments('": "a')]
    assert calls.push('"}') == [Arguments('"}')]
    assert calls.push("}\n</tool_call>") == []
    assert calls.finish() == []


def test_without_parallel_calls_what_follows_the_first_is_left_out():
    for form, text in [
        ("hermes", f"a <tool_call>{F}</tool_call><tool_call>{G}</tool_call> b"),
        ("llama3_json", f"a <|python_tag|>{F}; {G} b"),
    ]:
        for cuts in ([], range(200)):
            assert parse(parser(form, parallel=False), text, cuts) == ("a", [("f", X)])


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<tool", "</", "; "),
    *(
        '{"name": "f", "arguments": ',
        '{"name": "h", "arguments": ',
        '{"arguments": ',
        '"name": "g"',
    ),
    *('{"z": "z"}', '{"z": [1, {"z": null', "{}", "}", "]", '"', "\\", ",", "'", "\x01"),
    *(" ", "\n", "z", "z ", "é", F, G),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
cut_places = st.lists(st.integers(0, 500), max_size=12)
quick = settings(deadline=None, max_examples=150, derandomize=True, database=None)
forms = st.sampled_from(["hermes", "llama3_json"])


@quick
@given(form=forms, text=texts, cuts=cut_places, parallel=st.booleans())
def test_a_streamed_text_is_the_whole_one(form, text, cuts, parallel):
    expected = parse(parser(form, parallel=parallel), text)
    assert parse(parser(form, parallel=parallel), text, cuts) == expected
    assert parse(parser(form, parallel=parallel), text, range(500)) == expected


@quick
@given(form=forms, text=texts)
def test_no_word_is_lost(form, text):
    content, calls = parse(parser(form), text)
    shown = content + "".join(arguments for _, arguments in calls)
    assert shown.count("z") == text.count("z")
    if not calls:
        assert content == text


def check_pieces():
    """Two calls and words around them, in pieces of one character, and cut at every place."""
    text = f"a <tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call> b <tool"
    expected = ("a \n b <tool", [("f", X), ("g", "{}")])
    for cuts in [range(500), *([place] for place in range(len(text)))]:
        assert parse(parser("hermes"), text, cuts) == expected


def test_every_piece_counts():
    check_pieces()


CALL_READER_READ = CallReader.read


def _read_without_last_arguments(self, text):
    count, deltas = CALL_READER_READ(self, text)
    return count, [*deltas[:-1]] if self.status == "call" else deltas


MUTANTS = {
    "held text lost at the end": (JsonCallParser, "finish", lambda self: []),
    "last piece of arguments dropped": (CallReader, "read", _read_without_last_arguments),
    "marks across pieces missed": (json_parser, "_overlap", lambda text, mark: 0),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_faults_are_caught(mutant):
    with mock.patch.object(*MUTANTS[mutant]), pytest.raises(AssertionError):
        check_pieces()

from __future__ import annotations

import gzip
import json

import pytest

from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import BadLine, PromptLine, prompt_line, read_json_lines

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def parse(tmp_path, text: str) -> list:
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    return read_json_lines(path, prompt_line)


def test_prompts_and_messages_come_in_line_order(tmp_path):
    lines = [{"prompt": "a", "x": 1}, {"messages": MESSAGES}, {"prompt_token_ids": [5]}]
    assert parse(tmp_path, "\n".join(map(json.dumps, lines))) == [
        PromptLine(prompt="a", others={"x": 1}),
        PromptLine(messages=MESSAGES),
        PromptLine(token_ids=[5]),
    ]


def test_every_key_of_a_message_and_what_the_template_is_told_come_along(tmp_path):
    answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "name": "Ann"}
    result = {"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "1"}
    line = {"messages": [*MESSAGES, answer, result], "tools": [{"name": "f"}]}
    (found,) = parse(tmp_path, json.dumps(line))
    assert found.content == line


def test_the_mark_of_a_chat_is_no_key_for_the_template(tmp_path):
    line = {"messages": [{"role": "assistant", "content": "a", "stopped": True}]}
    (found,) = parse(tmp_path, json.dumps(line))
    assert found.content == [{"role": "assistant", "content": "a"}]


def test_blank_lines_are_skipped_but_counted_in_line_numbers(tmp_path):
    good, bad = parse(tmp_path, '\n  \r\n{"prompt": "a"}\r\n\n{\n')
    assert good == PromptLine(prompt="a")
    assert bad.where == f"{tmp_path / 'p.jsonl'}:5"


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path):
    text = "a\u2028b\x85c"
    assert parse(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False)) == [
        PromptLine(prompt=text)
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    assert parse(tmp_path, '\ufeff{"prompt": "a"}') == [PromptLine(prompt="a")]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[1]", "must be a JSON object, not a list"),
        ("3", "must be a JSON object, not a number"),
        ("{}", "none, but no keys"),
        ('{"text": "a"}', 'none, but "text"'),
        ('{"prompt": "a", "messages": []}', 'has "prompt" and "messages"'),
        ('{"prompt": 3}', '"prompt" must be a string, not a number'),
        ('{"prompt": null}', '"prompt" must be a string, not null'),
        ('{"prompt": ["a"]}', '"prompt" must be a string, not a list'),
        ('{"prompt": "\\ud800"}', "unpaired surrogate (\\ud800)"),
        ('{"prompt": "a", "tools": []}', '"tools" is for "messages", not for "prompt"'),
        ('{"prompt_token_ids": [true]}', '"prompt_token_ids" must be a list of integers'),
        ('{"prompt_token_ids": []}', "non-empty list, not an empty list"),
        ('{"messages": [{"role": "user", "content": null}]}', 'messages[0]["content"] must be'),
        ('{"messages": []}', "non-empty list, not an empty list"),
        ('{"messages": "Hi"}', "non-empty list, not a string"),
        ('{"messages": ["Hi"]}', "messages[0] must be"),
        ('{"messages": [{"role": "user"}]}', 'messages[0] has no "content"'),
        ('{"messages": [{"content": "Hi"}]}', 'messages[0] has no "role"'),
        ('{"messages": [{"role": 1, "content": "Hi"}]}', 'messages[0]["role"] must be a string'),
        ('{"messages": [{"role": "user", "content": [true]}]}', 'messages[0]["content"] must be'),
        ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
        ('{"prompt": "a", "n": ' + "9" * 5000 + "}", "integer"),
    ],
)
def test_a_bad_line_says_where_and_why_and_the_others_stay(tmp_path, line, error):
    before, bad, after = parse(tmp_path, f'{{"prompt": "a"}}\n{line}\n{{"prompt": "b"}}')
    assert (before, after) == (PromptLine(prompt="a"), PromptLine(prompt="b"))
    assert isinstance(bad, BadLine)
    assert bad.where == f"{tmp_path / 'p.jsonl'}:2"
    assert error in bad.error


def test_a_gzipped_file_is_read(tmp_path):
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    assert read_json_lines(path, prompt_line) == [PromptLine(prompt="a")]


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}', "p.jsonl:2: not UTF-8"),
        ("p.jsonl.gz", b"plain", "cannot be read"),
        ("p.jsonl.gz", gzip.compress(b"{}" * 100, mtime=0)[:-12], "cannot be read"),
    ],
)
def test_a_file_that_is_no_text_is_refused_whole(tmp_path, name, data, error):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=error):
        read_json_lines(tmp_path / name, prompt_line)


def test_a_file_that_cannot_be_opened_is_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_json_lines(tmp_path / "absent.jsonl", prompt_line)
    with pytest.raises(InputError, match="is a directory; give a regular file"):
        read_json_lines(tmp_path, prompt_line)

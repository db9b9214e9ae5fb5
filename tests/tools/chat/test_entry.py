"""Entries: which lines belong together, what is a command, what is a message."""

import io

import pytest

from ssd_jax.errors import InputError
from ssd_jax.tools.chat.entry import COMMANDS, Command, entries, is_open, parse


@pytest.mark.parametrize(
    ("raw", "meaning"),
    [
        ("hello", "hello"),
        ("  hello  ", "hello"),
        ("", ""),
        ("one\\\ntwo", "one\ntwo"),
        ("one\ntwo", "one\ntwo"),
        ('"""one\n  two"""', "one\n  two"),
        ('"""\none \\\ntwo\n"""', "one \\\ntwo"),
        ('"""/help"""', "/help"),
        (" /help", "/help"),
        ("/usr/bin:\nis a directory", "/usr/bin:\nis a directory"),
        ("/help", Command(name="help")),
        ("/MODE  sd ", Command(name="mode", argument="sd")),
        ("/save! a file.jsonl", Command(name="save", argument="a file.jsonl", forced=True)),
        ("/quit", Command(name="exit")),
        ("/?", Command(name="help")),
    ],
)
def test_an_entry_is_a_command_or_a_message(raw, meaning):
    assert not is_open(raw)
    assert parse(raw) == meaning


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("/stat", "did you mean /stats?"),
        ("/zzzzzz", "/help lists the commands"),
        ("/", "unknown command /"),
        ("/usr/bin is what", "put a space before it"),
        ("/reset all", "/reset takes nothing after it, not 'all'"),
        ("/reset!", "/reset has no form with !"),
    ],
)
def test_a_command_that_is_not_one_is_refused_with_a_remedy(raw, message):
    with pytest.raises(InputError, match="/") as caught:
        parse(raw)
    assert message in str(caught.value)


def test_every_command_is_written_as_it_is_called():
    for name, spec in COMMANDS.items():
        word, *rest = spec.usage.split(" ")
        assert word == f"/{name}"
        assert bool(rest) == spec.takes


def parsed(text):
    return [parse(raw) for raw in entries(io.StringIO(text))]


def test_lines_are_joined_by_a_backslash_or_by_quotes():
    text = 'one\ntwo\\\nthree\r\n"""\nfour\n\nfive\n"""\nsix'
    assert parsed(text) == ["one", "two\nthree", "four\n\nfive", "six"]


def test_the_end_of_the_input_ends_an_open_entry():
    assert parsed("one\\\n") == ["one"]
    assert parsed('"""one\ntwo') == ["one\ntwo"]


def test_a_byte_order_mark_is_no_part_of_the_first_entry():
    assert list(entries(["\ufeff/help\n", "\ufeffb\n"])) == ["/help", "\ufeffb"]

"""The conversation, what of it fits, and its file."""

import gzip
import json
import os

import pytest

from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import PromptLine, prompt_line, read_json_lines
from ssd_jax.tools.chat import conversation as files
from ssd_jax.tools.chat.conversation import Conversation
from tests.system.full_disk import files_of_at_most

TALK = (
    Conversation(system="be brief")
    .with_message("user", "a?")
    .with_message("assistant", "a", stopped=True)
    .with_message("user", "b\u2028?")
    .with_message("assistant", "b")
)


def test_a_prompt_has_the_system_message_and_the_messages_that_are_sent():
    assert [m["content"] for m in TALK.prompt()] == ["be brief", "a?", "a", "b\u2028?", "b"]
    assert [m["content"] for m in TALK.prompt(2)] == ["be brief", "b\u2028?", "b"]
    assert TALK.prompt()[2] == {"role": "assistant", "content": "a"}


def test_the_last_answer_can_be_taken_back():
    assert TALK.without_answer().messages == TALK.messages[:3]
    assert TALK.without_answer().without_answer() == TALK.without_answer()
    with pytest.raises(InputError, match="type one first"):
        Conversation().without_answer()


@pytest.mark.parametrize(
    ("room", "start", "first"), [(9, 0, 0), (5, 0, 0), (4, 0, 2), (2, 0, 4), (0, 0, 4), (9, 2, 2)]
)
def test_whole_turns_are_left_out_from_the_oldest(room, start, first):
    asked = TALK.with_message(
        "user", "c?"
    )  # five messages: size is the number of those that are sent
    assert asked.first_that_fits(lambda begin: 5 - begin, room, start) == first


@pytest.mark.parametrize("name", ["talk.jsonl", "talk.jsonl.gz"])
def test_a_saved_conversation_is_a_prompt_file_and_loads_as_it_was(tmp_path, name):
    path = tmp_path / name
    files.save(TALK, path)
    (prompt,) = read_json_lines(path, prompt_line)
    assert isinstance(prompt, PromptLine)
    assert prompt.messages == TALK.prompt()
    assert files.load(path) == TALK
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")


def test_what_a_file_says_of_a_message_stays_with_it(tmp_path):
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    messages = [{"role": "user", "content": "a?", "name": "Ann"}, message]
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": messages, "id": 1}))
    talk = files.load(path)
    assert talk.prompt() == messages
    files.save(talk, path, replace=True)
    assert files.load(path) == talk


def test_what_a_chat_would_leave_out_of_a_file_is_named(tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}], "seed": 1}))
    with pytest.raises(InputError, match='a chat takes no "seed" from a file'):
        files.load(path)


def test_a_file_is_replaced_only_when_told_so(tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text("precious")
    with pytest.raises(InputError, match=r"exists and was left as it is.*/save! "):
        files.save(TALK, path)
    assert path.read_text() == "precious"
    files.save(TALK, path, replace=True)
    assert files.load(path) == TALK


@pytest.mark.parametrize("replace", [True, False])
def test_a_full_disk_leaves_what_was_there(tmp_path, replace):
    path = tmp_path / "talk.jsonl"
    if replace:
        files.save(TALK, path)
    longer = TALK.with_message("user", "x" * 4096)
    with files_of_at_most(1024), pytest.raises(InputError, match="not saved: File too large"):
        files.save(longer, path, replace=replace)
    assert list(tmp_path.iterdir()) == [path] * replace
    assert not replace or files.load(path) == TALK


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no/talk.jsonl: not saved: No such file"):
        files.save(TALK, tmp_path / "no" / "talk.jsonl")
    with pytest.raises(InputError, match=r"not saved: File name too long; give another name"):
        files.save(TALK, tmp_path / ("x" * 300))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for replace in (False, True):
        with pytest.raises(InputError, match=r"fifo is no file; give another name"):
            files.save(TALK, fifo, replace=replace)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has 0 conversations"),
        ('{"prompt": "x"}', 'needs "messages"'),
        ('{"messages": []}', "must be a non-empty list"),
        ('{"messages": [{"role": "user", "content": "x"}]}\n' * 2, "has 2 conversations"),
        ("hello", "talk.jsonl:1: not JSON"),
    ],
)
def test_a_file_without_one_conversation_is_refused(tmp_path, content, message):
    path = tmp_path / "talk.jsonl"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        files.load(path)
    assert message in str(caught.value)


def test_a_compressed_file_is_one_line_of_json(tmp_path):
    files.save(TALK, tmp_path / "talk.gz")
    (line,) = gzip.decompress((tmp_path / "talk.gz").read_bytes()).decode().strip().split("\n")
    assert json.loads(line)["messages"][2]["stopped"] is True

"""`ssd-jax chat`, in a terminal and with lines from a pipe."""

import io
import json
import re
import sys

import pytest

from ssd_jax.cli.main import main
from ssd_jax.testing import tiny
from tests.cli.terminal import Terminal

COMMON = ("--dtype=float32", "--ignore_eos", "--history=off")
ENDLESS = 50_000
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """A model with room for an answer that no test waits out."""
    directory = tmp_path_factory.mktemp("tiny") / "talkative"
    return tiny.write_checkpoint(directory, max_position_embeddings=2 * ENDLESS)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def terminal(talkative, compiled, tmp_path):
    opened = []

    def chat(*arguments, **environment):
        command = ("-m", "ssd_jax", "chat", f"--target={talkative}", "--dtype=float32")
        found = Terminal(
            *command,
            "--ignore_eos",
            f"--context={2 * ENDLESS}",
            f"--compile_cache={compiled}",
            f"--history={tmp_path / 'history'}",
            *arguments,
            **environment,
        )
        opened.append(found)
        return found

    yield chat
    for found in opened:
        found.close()


@pytest.mark.more
def test_ctrl_c_stops_the_answer_and_not_the_program(terminal, tmp_path):
    chat = terminal(f"--max_tokens={ENDLESS}", TERM="dumb")
    assert "talkative, mode ar, context 100000 tokens" in chat.wait_for("> ")
    chat.type("hello\r")
    chat.wait_for("hello\r\n")
    chat.wait_for_more(100)  # of the answer
    chat.type(CTRL_C)
    chat.wait_for("stopped]")
    path = tmp_path / "talk.jsonl"
    chat.wait_for("> ")
    chat.type(f"/save {path}\r")
    chat.wait_for("(2 messages)")
    asked, answer = json.loads(path.read_text())["messages"]
    assert asked["content"] == "hello"
    assert answer["stopped"] is True
    chat.wait_for("> ")
    chat.type(CTRL_D)
    assert chat.ended() == 0
    assert "Traceback" not in chat.seen
    assert "\x1b" not in chat.seen  # a simple terminal gets no escape sequence


@pytest.mark.more
def test_the_prompt_has_editing_history_and_a_way_out(terminal, tmp_path):
    chat = terminal("--max_tokens=4", TERM="xterm-256color", NO_COLOR="1")
    chat.wait_for("leaves")
    chat.wait_for("> ")
    chat.type("/sta\t\r")  # tab completes
    chat.wait_for("no figures before the first answer")
    chat.wait_for("> ")
    chat.type("half a messa")
    chat.wait_for("half a messa")
    chat.type(CTRL_C)  # clears
    chat.wait_for("> ")
    chat.type('"""\rseveral\rlines"""\r')
    chat.wait_for("[4 tokens")
    chat.wait_for("> ")
    chat.type(f"{4 * UP}\r")  # through the three lines of the last one
    chat.wait_for("session, ar")
    chat.wait_for("> ")
    chat.type("\x1b[200~pasted\nwhole\x1b[201~\r")
    chat.wait_for("[4 tokens")
    chat.wait_for("> ")
    chat.type(CTRL_C)
    chat.wait_for("Ctrl-C again leaves")
    chat.wait_for("> ")
    chat.type(CTRL_C)
    assert chat.ended() == 0
    assert "Traceback" not in chat.seen
    assert "half" not in chat.seen.split("half a messa")[1]
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", chat.seen)
    history = tmp_path / "history"
    entries = [json.loads(line) for line in history.read_text().splitlines()]
    assert entries == ["/stats ", '"""\nseveral\nlines"""', "/stats ", "pasted\nwhole"]
    assert history.stat().st_mode & 0o077 == 0


@pytest.fixture
def piped(tiny_checkpoint, capsys, monkeypatch):
    def chat(data, *arguments, target=tiny_checkpoint):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        small = ("--context=100", "--max_tokens=4", "--compile_cache=off", *COMMON)
        status = main(["chat", f"--target={target}", *small, *arguments])
        return status, *capsys.readouterr()

    return chat


@pytest.mark.more
def test_lines_of_a_pipe_are_answered_in_turn(piped):
    status, out, err = piped(b"hello\n\nagain\n/stats\n", "--system=be brief")
    assert status == 0
    assert err.count("[4 tokens, ") == 2
    assert "session, ar" in err
    assert "> " not in out + err
    assert "/help" not in err
    first, _, _ = out.partition("\n")
    assert out
    assert first == piped(b"hello\n", "--system=be brief")[1].partition("\n")[0]
    assert first != piped(b"hello\n")[1].partition("\n")[0]  # the system message is sent


def test_what_cannot_be_done_in_a_pipe_is_named_and_the_rest_still_answered(piped):
    status, out, err = piped(b"/foo\n" + b"\xff\nhello\n/exit\nnever read\n")
    assert status == 2
    assert "unknown command /foo" in err
    assert "lone surrogate" in err
    assert err.count("[4 tokens, ") == 1
    assert out


@pytest.fixture
def never_loaded(monkeypatch):
    def load(llm):
        pytest.fail("weights were loaded")

    monkeypatch.setattr("ssd_jax.cli.chat.load", load)


@pytest.mark.usefixtures("never_loaded")
def test_a_model_without_a_chat_template_is_refused(piped, tmp_path):
    base = tiny.write_checkpoint(tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    status, _, err = piped(b"hello\n", target=base)
    assert status == 2
    assert "has no chat template" in err
    assert "ssd-jax generate" in err


@pytest.mark.usefixtures("never_loaded")
def test_a_system_message_that_the_template_refuses_is_named(piped, tmp_path):
    model = tiny.write_checkpoint(tmp_path / "gemma")
    (model / "chat_template.jinja").write_text("{{ raise_exception('no system messages') }}")
    status, _, err = piped(b"hello\n", "--system=x", target=model)
    assert status == 2
    assert "no system messages" in err

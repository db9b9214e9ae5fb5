"""The session on a tiny model: what entries do, and what is said about it."""

import dataclasses
import io
import itertools
import json
import threading

import pytest
from rich.console import Console

from ssd_jax.engine.engine import Engine
from ssd_jax.errors import DeviceError
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.fakes import FakeTarget
from ssd_jax.tools.chat.screen import Screen
from ssd_jax.tools.chat.session import ChatSession
from tests.fakes.instrument import At, instrument

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, ignore_eos=True, temperature=2.0, seed=5)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint):
    return LLM(str(tiny_checkpoint), dtype="float32", context=128, mode="sd", draft="ngram", k="2")


class Chat:
    """A session whose screen can be read."""

    def __init__(self, llm, params=GREEDY, **settings):
        self.words, self.rest = io.StringIO(), io.StringIO()
        console = Console(file=self.rest, width=200)
        self.session = ChatSession(llm, params, Screen(self.words, console), **settings)

    def __call__(self, *entries):
        """What is said, beside the answers, about these entries."""
        before = len(self.rest.getvalue())
        for entry in entries:
            assert self.session.take(entry)
        return self.rest.getvalue()[before:]

    @property
    def talk(self):
        return self.session.conversation.prompt()


@pytest.fixture
def chat(llm):
    return Chat(llm)


def test_an_answer_is_shown_and_kept(chat, llm):
    shown = chat("hello")
    asked = [{"role": "user", "content": "hello"}]
    (alone,) = llm.generate([asked], GREEDY)
    assert chat.talk == [*asked, {"role": "assistant", "content": alone.text}]
    assert chat.words.getvalue().rstrip("\n") == alone.text.rstrip("\n")
    assert shown.startswith("[8 tokens, ")
    assert "acceptance length" in shown


def test_the_model_sees_what_was_said_before(chat, llm):
    chat("one", "two")
    (alone,) = llm.generate([chat.talk[:3]], GREEDY)
    assert chat.talk[3]["content"] == alone.text


def test_an_empty_entry_does_nothing(chat):
    assert chat("", "   ") == ""
    assert chat.talk == []


def test_each_answer_has_its_own_randomness_and_a_session_the_same(llm):
    first, second = Chat(llm, SAMPLED), Chat(llm, SAMPLED)
    answers = []
    for entries in (("hello",), ("/reset", "hello"), ("/retry",)):
        for chat in (first, second):
            chat(*entries)
        assert first.talk == second.talk
        answers.append(first.talk[-1]["content"])
    assert len(set(answers)) == 3


def test_retry_replaces_the_answer(chat):
    assert "type one first" in chat("/retry")
    chat("hello")
    talk = chat.talk
    chat("/retry")
    assert chat.talk == talk  # greedy


def test_modes_are_switched_and_give_the_same_greedy_text(chat):
    assert "mode sd; available: ar, sd" in chat("/mode")
    chat("hello")
    text = chat.talk[-1]["content"]
    assert chat("/mode ar") == "mode ar\n"
    assert "acceptance" not in chat("/retry")
    assert chat.talk[-1]["content"] == text
    table = chat("/stats")
    assert "last answer (ar)" in table
    assert "session, sd" in table


def test_a_mode_that_is_not_there_comes_with_the_way_to_it(tiny_checkpoint, chat):
    plain = Chat(LLM(str(tiny_checkpoint), dtype="float32", context=64, load=False))
    assert "start ssd-jax chat with --mode=sd --draft=ngram" in plain("/mode")
    assert "mode sd was not prepared; start ssd-jax chat with" in plain("/mode sd")
    assert "mode = 'fast' is unknown; one of" in chat("/mode fast")
    assert "available here: ar, sd" in chat("/mode fast")
    assert chat.session.refused == 2


def test_reset_forgets_all_but_the_system_message(chat):
    chat("/system be brief", "hello")
    assert chat.talk[0] == {"role": "system", "content": "be brief"}
    assert len(chat.talk) == 3
    assert chat("/reset") == "2 messages forgotten\n"
    assert chat.talk == [{"role": "system", "content": "be brief"}]
    assert chat("/system") == "system message: be brief\n"
    chat("/system -")
    assert chat.talk == []
    assert "there is none" in chat("/system")


def test_a_full_context_leaves_out_the_oldest_turns_and_says_so(chat):
    assert "is full" not in chat("/system s", "one " * 6)
    shown = chat("two " * 15)
    assert "the context of 128 tokens is full" in shown
    assert "the first 2 messages" in shown
    assert len(chat.talk) == 5  # nothing is lost
    assert "is full" not in chat("/reset", "one " * 6)


def test_a_message_that_can_never_fit_is_refused_and_not_kept(chat):
    chat("hello")
    talk = chat.talk
    shown = chat("long " * 40)
    assert "shorten the prompt or raise --context" in shown
    assert "no longer sees" not in shown
    assert chat.talk == talk
    assert chat.session.refused == 1


def test_a_conversation_is_saved_and_gone_on_with(chat, llm, tmp_path):
    path = tmp_path / "talk.jsonl"
    assert "nothing to save" in chat(f"/save {path}")
    chat("/system be brief", "hello")
    assert f"saved {path} (2 messages)" in chat(f"/save {path}").replace("\n", "")
    assert json.loads(path.read_text())["messages"] == chat.talk
    assert "exists and was left as it is" in chat(f"/save {path}")
    assert "replaced" in chat(f"/save! {path}")
    for command in ("/save", "/save!"):
        assert "File name too long; give another" in chat(f"{command} {'x' * 300}")
    other = Chat(llm)
    assert "2 messages and its system message" in other(f"/load {path}")
    assert other.talk == chat.talk
    assert "/load needs the name" in other("/load")


def test_loading_does_not_lose_what_was_said(chat, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    chat("one")
    assert "would be lost" in chat(f"/load {path}")
    assert chat.talk[0]["content"] == "one"
    assert "the last waits for an answer: /retry" in chat(
        f"/save {tmp_path / 'x'}", f"/load {path}"
    )
    chat("/retry")
    assert [message["role"] for message in chat.talk] == ["user", "assistant"]


def test_a_conversation_is_saved_under_a_name_of_the_time(chat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat("hello", "/save")
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("chat-")
    assert json.loads(path.read_text())["messages"] == chat.talk


def pressed(*, after):
    """Ctrl-C, found pressed after some looks at it."""
    looks = itertools.count()
    return lambda: next(looks) >= after


def test_a_stopped_answer_is_kept_as_far_as_it_came(llm):
    params = dataclasses.replace(GREEDY, max_tokens=100)
    chat = Chat(llm, params, should_stop=pressed(after=4))
    assert chat("hello").rstrip().endswith(", stopped]")
    (answer,) = llm.generate([chat.talk[:1]], params)
    (message,) = chat.session.conversation.messages[1:]
    assert message.stopped
    assert answer.text.startswith(message.content)
    assert 0 < len(message.content) < len(answer.text)


def test_an_answer_stopped_before_its_first_word_leaves_no_trace(llm):
    chat = Chat(llm, should_stop=pressed(after=0))
    assert "the conversation is as it was" in chat("hello")
    assert chat.talk == []
    assert "no figures" in chat("/stats")


def test_a_long_question_that_was_stopped_leaves_the_model_what_it_saw(llm):
    stops = []
    chat = Chat(llm, should_stop=lambda: bool(stops))
    chat("one " * 6)
    stops.append(True)
    assert "no longer sees the first 2 messages" in chat("two " * 16)
    stops.clear()
    assert "is full" not in chat("x")
    (answer,) = llm.generate([chat.talk[:3]], GREEDY)
    assert chat.talk[3]["content"] == answer.text


@pytest.fixture
def scripted(llm, monkeypatch):
    """Gives the model a target that says some text."""

    def say(text, fail=None):
        tokens = llm.tokenizer.encode(text)
        script = lambda prompt, position: tokens[(position - len(prompt)) % len(tokens)]  # noqa: E731
        decoder = llm.tokenizer.open_stream
        target = instrument(FakeTarget(script, context=128, max_chunk=128), fail=fail)
        engine = Engine(target, decoder, frozenset())
        monkeypatch.setitem(llm._engines, 2, engine)

    return say


def test_an_answer_stopped_inside_a_character_is_kept_without_it(scripted, llm):
    """And so are its ids; a character that means "unknown" is one like others."""
    text = "né → 🎉\ufffd ✓"
    seen, turns = set(), threading.Semaphore(0)
    scripted(text, fail={"forward": lambda *_: turns.acquire(timeout=30)})
    for after in range(len(text.encode()) + 4):
        press = pressed(after=after)

        def stop(press=press):
            """Asked between events: each round waits for that."""
            stops = press()
            turns.release(100 if stops else 1)
            return stops

        chat = Chat(llm, SamplingParams(max_tokens=100), should_stop=stop)
        chat("hello")
        while turns.acquire(blocking=False):
            pass
        if chat.talk:
            (answer,) = chat.session._answers
            content = chat.talk[-1]["content"]
            assert answer.stopped
            assert (2 * text).startswith(content)
            assert (
                llm.tokenizer.decode(answer.output.token_ids, skip_special_tokens=True) == content
            )
            assert chat.words.getvalue().rstrip("\n") == content
            seen.add(content)
    assert seen >= {text[:size] for size in range(1, len(text) + 1)}


def test_an_answer_that_ends_by_an_error_says_so_and_the_next_one_why(scripted, llm):
    broken = At(3, DeviceError("out of memory"))
    scripted("four words of text", fail={"forward": broken})
    chat = Chat(llm)
    assert "ended by an error]" in chat("hello")
    assert chat.talk[-1]["content"] == "fo"  # the round that failed came before the last was read
    with pytest.raises(DeviceError, match="open the model again"):
        chat("again")


ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."


@pytest.fixture
def reasoning(llm, scripted, monkeypatch):
    """A session whose model writes in harmony's channels, and the most tokens that it may write."""

    def chat(tokens):
        scripted(ANSWER)
        return Chat(llm, SamplingParams(max_tokens=tokens))

    template = llm.tokenizer.chat_template + "{# <|channel|><|message|> #}"
    monkeypatch.setattr(llm.tokenizer, "get_chat_template", lambda *_: template)
    return chat


def test_reasoning_is_shown_apart_and_not_kept(reasoning):
    chat = reasoning(len(ANSWER))
    shown = chat("hello")
    assert chat.words.getvalue() == "Yes.\n"
    assert shown.startswith("Hm.\n[")
    assert chat.talk[-1] == {"role": "assistant", "content": "Yes."}


def test_an_answer_that_ends_in_its_reasoning_is_dropped(reasoning):
    chat = reasoning(ANSWER.index("Hm.") + 2)
    assert chat("hello").startswith("Hm\n[ended before the first word; the conversation is as it")
    assert chat.words.getvalue() == ""
    assert chat.talk == []


def test_exit_ends_the_session(chat):
    assert not chat.session.take("/exit")


def test_help_names_every_command(chat):
    shown = chat("/help")
    for name in ("/mode", "/stats", "/save", "/load", "/system", "/retry", "/reset", "/exit"):
        assert name in shown

"""A chat template is a stranger's program: it gets a process with limits, and no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ssd_jax.checkpoints.chat import template as chat_template
from ssd_jax.checkpoints.chat.template import ChatTemplate
from ssd_jax.errors import InputError
from tests.fuzz.hostile import TEMPLATES

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SWITCH = (
    "{% if messages[0].content == 'hang' %}" + ENDLESS + "{% endif %}<{{ messages[0].content }}>"
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.3)


def made(source):
    return ChatTemplate(source, special_tokens={}, where="the model")


def say(template, content):
    return template.render([{"role": "user", "content": content}], add_generation_prompt=False)


def process(template):
    return template._child._process


def test_an_endless_template_is_ended_and_the_next_conversation_is_rendered():
    template = made(SWITCH)
    assert say(template, "a") == "<a>"
    first = process(template)
    with pytest.raises(InputError, match=r"of the model failed: it took more than 0.3 s or 256 MB"):
        say(template, "hang")
    assert first.poll() is not None
    assert say(template, "b") == "<b>"


@pytest.mark.parametrize("source", TEMPLATES[::5])  # the fuzzer takes all
def test_hostile_templates_end_in_one_line(source):
    words = ""
    try:
        say(made(source), "x")
    except InputError as error:
        words = str(error)
    assert "\n" not in words
    assert len(words) < 1000


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit memory")
@pytest.mark.parametrize("length", [1, 1 << 21])  # the longer request is more than a socket holds
def test_a_template_process_that_hangs_is_ended_and_another_renders(monkeypatch, length):
    template = made("<{{ messages[0].content }}>")
    assert say(template, "a") == "<a>"
    stopped = process(template)
    monkeypatch.setattr(chat_template, "_MAX_WALL_SECONDS", 0.2)
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.raises(InputError, match="it took more than"):
        say(template, "b" * length)
    monkeypatch.undo()
    assert stopped.poll() is not None
    assert say(template, "c") == "<c>"


def test_memory_of_the_template_process_is_limited(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 20.0)
    with pytest.raises(InputError, match="it took too much memory"):
        say(made("{{ 'a' * 300000000 }}"), "x")


def test_a_text_that_no_model_takes_is_refused(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_TEXT", 1 << 20)
    assert len(say(made("{{ 'a' * 1000000 }}"), "x")) == 1_000_000
    with pytest.raises(InputError, match="it wrote more than 1 MB"):
        say(made("{{ 'a' * 2000000 }}"), "x")


def test_threads_get_the_answers_to_their_own_questions():
    template = made("<{{ messages[0].content }}>")
    with ThreadPoolExecutor(4) as pool:
        contents = [str(number) for number in range(200)]
        assert list(pool.map(lambda content: say(template, content), contents)) == [
            f"<{content}>" for content in contents
        ]


def test_after_an_interrupt_the_answer_is_to_the_next_question(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 20.0)
    template = made(SWITCH)
    say(template, "a")

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            say(template, "hang")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert say(template, "b") == "<b>"


def test_the_process_ends_with_the_template():
    template = made("x")
    say(template, "a")
    child = process(template)
    del template
    assert child.poll() is not None


def test_the_process_ends_when_the_template_is_closed_and_another_starts():
    template = made("x")
    template.close()
    say(template, "a")
    child = process(template)
    template.close()
    assert child.poll() is not None
    assert say(template, "a") == "x"


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().split()[2] != "Z"


@pytest.mark.parametrize("content", ["a", "hang"])
def test_no_template_process_outlives_a_killed_program(content):
    program = f"""
        import threading
        from ssd_jax.checkpoints.chat.template import ChatTemplate
        template = ChatTemplate({SWITCH!r}, special_tokens={{}}, where="m")
        render = lambda content: template.render(
            [{{"role": "user", "content": content}}], add_generation_prompt=False)
        render("a")
        print(template._child._process.pid, flush=True)
        render({content!r})
        threading.Event().wait()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.communicate()
    for _ in range(2400):  # an endless template uses up its seconds first
        if not alive(child):
            return
        time.sleep(0.05)
    pytest.fail("the process is still there")


def test_threads_may_render_until_the_program_has_ended():
    program = """
        import atexit
        from ssd_jax.checkpoints.chat.template import ChatTemplate
        template = ChatTemplate("<{{ messages[0].content }}>", special_tokens={}, where="m")
        render = lambda content: template.render(
            [{"role": "user", "content": content}], add_generation_prompt=False)
        atexit.register(lambda: print(render("b"), template._child._process.pid))
        render("a")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    text, child = ended.stdout.split()
    assert text == "<b>"
    deadline = time.monotonic() + 120
    while alive(int(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(child))


def test_a_fork_gets_a_process_of_its_own():
    program = """
        import os
        from ssd_jax.checkpoints.chat.template import ChatTemplate
        template = ChatTemplate("<{{ messages[0].content }}>", special_tokens={}, where="m")
        render = lambda content: template.render(
            [{"role": "user", "content": content}], add_generation_prompt=False)
        assert render("a") == "<a>"
        template._child._lock.acquire()  # as another thread may have it
        if os.fork() == 0:
            assert render("b") == "<b>"
            os._exit(0)
        assert os.wait()[1] == 0
        template._child._lock.release()
        assert render("c") == "<c>"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


def test_templates_run_in_their_process_alone():
    program = """
        import sys
        from ssd_jax.checkpoints.chat.template import ChatTemplate
        ChatTemplate("x", special_tokens={}, where="m").render(
            [{"role": "user", "content": "a"}], add_generation_prompt=False)
        assert "jinja2" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


def test_a_process_that_does_not_start_is_a_failure(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(Exception, match="/no/python: No such file"):
        say(made("x"), "a")


def test_messages_that_are_no_json_are_refused():
    message = {"role": "user", "content": "a", "lock": threading.Lock()}
    with pytest.raises(InputError, match="messages and tools must be plain JSON values"):
        made("x").render([message], add_generation_prompt=False)


def test_an_interrupt_of_the_start_leaves_no_process(monkeypatch):
    template, started = made(SWITCH), []

    def interrupted(_self, _request, _seconds):
        started.append(process(template))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat_template._Child, "_exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            say(template, "a")
    assert started[0].poll() is not None
    assert say(template, "b") == "<b>"

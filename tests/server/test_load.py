"""A model behind HTTP, whose draft is a process: clients leave at random, and a draft dies."""

import contextlib
import os
import random
import re
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import jax
import pytest

from ssd_jax import LLM, SamplingParams
from tests.checkpoints import tiny_pair
from tests.llm.paged import SHAPE
from tests.llm.runs import PROMPTS
from tests.server import models
from tests.server.http_calls import call, post, raw, request_text, stream
from tests.waiting import eventually

pytestmark = pytest.mark.more
REQUESTS = 500
LEAVING = 20
"""Clients that leave, at a time."""
ASKED = [
    {"prompt": PROMPTS[0], "seed": 1, "max_tokens": 40},
    {"prompt": PROMPTS[1], "temperature": 0.0, "max_tokens": 60},
    {"prompt": PROMPTS[4], "temperature": 0.7, "top_p": 0.9, "seed": 2, "max_tokens": 30},
    {"prompt": PROMPTS[6], "temperature": 0.0, "frequency_penalty": 0.3, "max_tokens": 50},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Four slots that share pages of 128 positions; the draft's worker is a process."""
    pair = tiny_pair.write(tmp_path_factory.mktemp("load"), "qwen3", **SHAPE)
    with (
        LLM(
            pair[0],
            mode="ssd",
            draft=pair[1],
            draft_placement="process",
            verify="coupled",
            control_tokens="plain",
            context=512,
            kv_memory="4MiB",
            slots=4,
            k=3,
            budget=8,
            dtype="float32",
            compile_cache=jax.config.jax_compilation_cache_dir,  # both processes compile once
        ) as llm,
        models.served(llm, queue=REQUESTS, max_body=8 << 20) as server,
    ):
        assert llm.paging is not None
        yield server


@pytest.fixture(scope="module")
def expected(server):
    """What each of `ASKED` says without a draft."""
    return [said_alone(server, fields) for fields in ASKED]


def said_alone(server, fields):
    settings = {"temperature": 1.0, **fields}
    ids = server.llm.tokenizer.encode(settings.pop("prompt"))
    params = SamplingParams(ignore_eos=True, **settings)
    return server.llm.generate([ids], params, mode="ar")[0].text


def body(number, **more):
    return {"model": "tiny", "ignore_eos": True, **ASKED[number], **more}


class Neighbours:
    """Clients that stay, and compare what they get."""

    def __init__(self, server, expected):
        self._server, self._expected = server, expected
        self._ended = threading.Event()
        self.texts, self.failures = 0, []

    def _ask(self, number):
        turn = number
        while not self._ended.is_set():
            asked = turn % len(ASKED)
            try:
                assert self._text(asked, turn % 2) == self._expected[asked]
                self.texts += 1
            except BaseException as error:
                self.failures.append(error)
                return
            turn += 1

    def _text(self, asked, streams):
        if streams:
            events = stream(self._server.port, "/v1/completions", body(asked))
            return "".join(event["choices"][0]["text"] for event in events)
        status, answer = post(self._server.port, "/v1/completions", body(asked))
        assert status == 200, answer
        return answer["choices"][0]["text"]

    @contextlib.contextmanager
    def beside(self, count=2):
        """While the context lasts, so many of them ask."""
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()
        assert not self.failures, self.failures
        assert self.texts >= count


def asks_and_leaves(port, chance):
    """A request of some kind, left before, while or after it is answered."""
    fields = {"n": chance.choice([1, 1, 2]), "stream": chance.random() < 0.7}
    if chance.random() < 0.3:
        fields["logprobs"] = 5
    data = request_text(body(chance.randrange(len(ASKED)), max_tokens=200, **fields))
    if chance.random() < 0.1:
        data = data[: chance.randrange(len(data))]
    with raw(port, data) as connection:
        connection.settimeout(0.4 * chance.random() ** 2 + 0.001)
        with contextlib.suppress(TimeoutError):
            for _ in range(chance.randrange(5)):
                connection.recv(chance.randrange(1, 5000))
        if chance.random() < 0.5:  # a reset in place of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def leaves_many_times(port, seed):
    chance = random.Random(seed)
    for _ in range(REQUESTS // LEAVING):
        asks_and_leaves(port, chance)


def open_files():
    return len([*Path("/proc/self/fd").iterdir()])


def threads_of_requests():
    """All but those of the pool of the event loop, which grows to its size."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


def nothing_is_left(server):
    """Whether no request, text or page is left; pages are given back when slots are looked at."""
    engine = server.llm.engine
    if engine.has_work or server.state.admission.texts or server.llm._rounds._callers:
        return False
    engine._seats._free()
    return not any(group.users.total() for group in engine._seats._pages._groups)


def test_clients_that_leave_at_random_moments_leave_nothing_and_change_no_text(server, expected):
    leaves_many_times(server.port, 99)  # once, so that what grows once has grown
    eventually(lambda: nothing_is_left(server), seconds=20)
    threads, files = threads_of_requests(), open_files()
    leaving = [
        threading.Thread(target=leaves_many_times, args=(server.port, seed))
        for seed in range(LEAVING)
    ]
    with Neighbours(server, expected).beside():
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()
    eventually(lambda: nothing_is_left(server), seconds=20)
    eventually(lambda: threads_of_requests() <= threads and open_files() <= files, seconds=20)
    (group,) = server.llm.engine._seats._pages._groups
    assert len(group.free) + len(group.cached) == server.llm.paging.total


def test_a_client_that_reads_late_holds_no_slot_and_gets_its_text(server, expected):
    fields = {"stream": True, "logprobs": 20}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request_text(body(1, **fields)))
        eventually(lambda: server.llm.engine.has_work, seconds=20)
        eventually(lambda: not server.llm.engine.has_work, seconds=20)
        with Neighbours(server, expected).beside():
            time.sleep(0.5)
        data = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    events = [line[6:] for line in data.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"


def test_no_request_fails_where_the_drafts_worker_is_killed_under_load(server, expected):
    supervisor, killed = server.llm.loaded.worker.supervisor, None
    with Neighbours(server, expected).beside(count=6):
        for _ in range(2):
            eventually(lambda killed=killed: supervisor.pid not in (None, killed))
            time.sleep(0.5)
            killed = supervisor.pid
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: not speculating(server))
    eventually(lambda: supervisor.pid not in (None, killed))
    eventually(lambda: nothing_is_left(server), seconds=20)
    eventually(lambda: post(server.port, "/v1/completions", body(0)) and speculating(server))


def speculating(server):
    _, _, page = call(server.port, "GET", "/metrics")
    (value,) = re.findall(r"^ssd_jax:speculating\{.*\} (.*)$", page, re.MULTILINE)
    return float(value) == 1


def test_prompts_of_a_million_tokens_are_refused_while_others_are_answered(server, expected):
    requests = [
        {"prompt": [65] * 10**6},
        {"prompt": "a" * 10**6},
        {"prompt": [[65] * 10**5] * 5},
    ]
    with Neighbours(server, expected).beside():
        for fields in requests:
            status, answer = post(server.port, "/v1/completions", {"model": "tiny", **fields})
            assert (status, answer["error"]["param"]) == (400, "prompt"), answer
    content = [{"role": "user", "content": "a" * 10**6}]
    status, answer = post(
        server.port, "/v1/chat/completions", {"model": "tiny", "messages": content}
    )
    assert (status, answer["error"]["param"]) == (400, "messages"), answer

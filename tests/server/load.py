"""A model behind HTTP, whose draft is a process, and its clients: who stay, leave or read late."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import struct
import threading
from pathlib import Path

from ssd_jax import LLM, SamplingParams
from tests.llm.runs import PROMPTS
from tests.server import models
from tests.server.http_calls import call, post, raw, request_text, stream

ASKED = [
    {"prompt": PROMPTS[0], "seed": 1, "max_tokens": 40},
    {"prompt": PROMPTS[1], "temperature": 0.0, "max_tokens": 60},
    {"prompt": PROMPTS[4], "temperature": 0.7, "top_p": 0.9, "seed": 2, "max_tokens": 30},
    {"prompt": PROMPTS[6], "temperature": 0.0, "frequency_penalty": 0.3, "max_tokens": 50},
]


@contextlib.contextmanager
def opened(pair, *, compile_cache, queue):
    """A server of four slots that share pages of 128 positions."""
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
            compile_cache=compile_cache,
        ) as llm,
        models.served(llm, queue=queue, max_body=8 << 20) as server,
    ):
        assert llm.paging is not None
        yield server


def answer_alone(server, fields):
    settings = {"temperature": 1.0, **fields}
    ids = server.llm.tokenizer.encode(settings.pop("prompt"))
    settings.pop("priority", None)
    params = SamplingParams(**{"ignore_eos": True, **settings})
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
        while True:
            asked = turn % len(ASKED)
            try:
                assert self._text(asked, turn % 2) == self._expected[asked]
                self.texts += 1
            except BaseException as error:
                self.failures.append(error)
                return
            if self._ended.is_set():
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


def leaves_many_times(port, seed, times):
    chance = random.Random(seed)
    for _ in range(times):
        asks_and_leaves(port, chance)


@contextlib.contextmanager
def late_reader(port, asked):
    """A connection that asks, takes some thousand bytes at a time, and none until it is read."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", port))
        connection.sendall(request_text(asked))
        yield connection


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


def speculating(server):
    """Whether the server says that its last rounds verified what the draft proposed."""
    _, _, page = call(server.port, "GET", "/metrics")
    (value,) = re.findall(r"^ssd_jax:speculating\{.*\} (.*)$", page, re.MULTILINE)
    return float(value) == 1

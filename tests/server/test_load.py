"""A model behind HTTP, whose draft is a process: clients leave at random, and a draft dies."""

import os
import signal
import threading
import time

import jax
import pytest

from tests.checkpoints import tiny_pair
from tests.llm.paged import SHAPE
from tests.server import load
from tests.server.http_calls import events_of, post
from tests.waiting import eventually

pytestmark = pytest.mark.more
LEAVING, TIMES = 20, 25
"""Clients that leave, at a time, and how often each does."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pair = tiny_pair.write(tmp_path_factory.mktemp("load"), "qwen3", **SHAPE)
    cache = jax.config.jax_compilation_cache_dir  # both processes compile once
    with load.opened(pair, compile_cache=cache, queue=LEAVING * TIMES) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server):
    """What each of `load.ASKED` says without a draft."""
    return [load.answer_alone(server, fields) for fields in load.ASKED]


def test_clients_that_leave_at_random_moments_leave_nothing_and_change_no_text(server, expected):
    load.leaves_many_times(server.port, 99, TIMES)  # once, so that what grows once has grown
    eventually(lambda: load.nothing_is_left(server))
    threads, files = load.threads_of_requests(), load.open_files()
    leaving = [
        threading.Thread(target=load.leaves_many_times, args=(server.port, seed, TIMES))
        for seed in range(LEAVING)
    ]
    with load.Neighbours(server, expected).beside():
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()
    eventually(lambda: load.nothing_is_left(server))
    eventually(lambda: load.threads_of_requests() <= threads and load.open_files() <= files)
    (group,) = server.llm.engine._seats._pages._groups
    assert len(group.free) + len(group.cached) == server.llm.paging.total


def test_a_client_that_reads_late_holds_no_slot_and_gets_its_text(server, expected):
    fields = {"stream": True, "logprobs": 20}
    with load.late_reader(server.port, load.body(1, **fields)) as connection:
        eventually(lambda: server.llm.engine.has_work)
        eventually(lambda: not server.llm.engine.has_work)
        with load.Neighbours(server, expected).beside():
            time.sleep(0.5)
        data = b"".join(iter(lambda: connection.recv(4096), b""))
    assert "".join(event["choices"][0]["text"] for event in events_of(data)) == expected[1]


def test_no_request_fails_where_the_drafts_worker_is_killed_under_load(server, expected):
    supervisor, killed = server.llm.loaded.worker.supervisor, None
    with load.Neighbours(server, expected).beside(count=6):
        for _ in range(2):
            eventually(lambda killed=killed: supervisor.pid not in (None, killed))
            time.sleep(0.5)
            killed = supervisor.pid
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: not load.speculating(server))
    eventually(lambda: supervisor.pid not in (None, killed))
    eventually(lambda: load.nothing_is_left(server))
    eventually(
        lambda: post(server.port, "/v1/completions", load.body(0)) and load.speculating(server)
    )


def test_prompts_of_a_million_tokens_are_refused_while_others_are_answered(server, expected):
    requests = [
        {"prompt": [65] * 10**6},
        {"prompt": "a" * 10**6},
        {"prompt": [[65] * 10**5] * 5},
    ]
    with load.Neighbours(server, expected).beside():
        for fields in requests:
            status, answer = post(server.port, "/v1/completions", {"model": "tiny", **fields})
            assert (status, answer["error"]["param"]) == (400, "prompt"), answer
    content = [{"role": "user", "content": "a" * 10**6}]
    status, answer = post(
        server.port, "/v1/chat/completions", {"model": "tiny", "messages": content}
    )
    assert (status, answer["error"]["param"]) == (400, "messages"), answer

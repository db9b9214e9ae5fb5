"""A tiny pair behind a server, and the same requests through Python."""

from __future__ import annotations

import contextlib

from ssd_jax import LLM, SamplingParams
from ssd_jax.server.lifecycle import HttpServer, listen
from ssd_jax.server.options import ServerOptions
from ssd_jax.server.state import new_state

MODES = {"off": "ar", "sd": "sd", "ssd": "ssd"}
DEFAULTS = SamplingParams(max_tokens=None, seed=None, temperature=1.0)


def opened(pair):
    """The pair in mode ssd, as `ssd-jax serve` opens it."""
    return LLM(
        pair[0],
        mode="ssd",
        draft=pair[1],
        draft_placement="inline",
        verify="coupled",
        control_tokens="plain",
        context=320,
        slots=4,
        k=3,
        budget=8,
        dtype="float32",
        compile_cache="off",
    )


@contextlib.contextmanager
def served(llm, *, queue=16, max_body=1 << 20):
    """A server for a model named "tiny"."""
    options = ServerOptions(model="tiny", queue=queue, max_body=max_body)
    state = new_state(llm, DEFAULTS, options)
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(state, listener)
        server.start()
        server.state, server.llm = state, llm
        state.loaded = True
        try:
            yield server
        finally:
            server.stop()

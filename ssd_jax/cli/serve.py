"""`ssd-jax serve`: answer OpenAI's interface over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import queue
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from ssd_jax.cli import settings
from ssd_jax.cli.loading import load, open_llm, short
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.open_files import allow_most_files
from ssd_jax.wire.address import Address

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM
    from ssd_jax.server.options import ServerOptions
    from ssd_jax.server.state import ServerState

_REPORTS = ("logprobs", "prompt_logprobs", "seed")
"""Settings of `SamplingParams` that only a request can ask for."""
_PACKAGES = ("openai", "prometheus_client", "pydantic", "starlette", "uvicorn")
_SECONDS = 0.2  # until a signal is noticed
_FLAGS: settings.FlagSpecs = {
    "host": ("str", "127.0.0.1", "address to listen on; 0.0.0.0 is all of this machine"),
    "port": ("int", 8000, "port to listen on; 0 is any free port"),
    "served_model_name": "name of the model in requests; default: the target",
    "tool_parser": "how the model writes tool calls: openai, hermes or llama3_json; default: as "
    "its chat template says",
    "max_queue": ("int", 256, "texts that may wait for a slot; further requests get status 429"),
    "max_body": ("int", 8 << 20, "most bytes of a request's body"),
    "request_timeout": (
        "float",
        None,
        "most seconds that a request may take; default: any number",
    ),
    "limit_concurrency": (
        "int or none",
        1024,
        "connections at a time; requests on further ones get status 503; none is any number",
    ),
    "api_key_file": "file with the keys that clients may send, one a line; only its owner may read "
    "it. Without one everybody may ask",
    "ssl_certfile": "PEM file of a certificate; turns TLS on",
    "ssl_keyfile": "PEM file of its private key",
    "allowed_origins": (
        "list",
        [],
        "origins of web pages that may ask from a browser, such as https://example.org; * is any",
    ),
    "access_log": "file that gets a line of JSON for each request, without prompts and texts; - is "
    "standard output",
    "access_log_texts": ("bool", False, "whether these lines have prompts and texts, too"),
    "drain_seconds": ("int", 30, "seconds that requests have to end after SIGTERM or Ctrl-C"),
}
_DEFAULTS = {
    "verify": "coupled",
    "control_tokens": "plain",
    "temperature": 1.0,
    "max_tokens": None,
    "seed": None,
}
"""Where the server differs from other commands: as OpenAI's interface has it, and so that a seed
repeats a text whatever runs beside it."""


def run(arguments: Sequence[str]) -> int:
    """Serves until SIGTERM or an interrupt; returns the exit status."""
    values = settings.new_flags(_FLAGS, **_DEFAULTS)
    options = settings.parse(values, "serve", arguments, hidden=_REPORTS)
    settings.at_least(
        options, port=0, max_queue=0, max_body=1, limit_concurrency=1, drain_seconds=0
    )
    if options["port"] > 65535:
        raise InputError(f"port = {options['port']} is out of range; give 0 to 65535")
    seconds = options["request_timeout"]
    if seconds is not None and not 0 < seconds < math.inf:
        raise InputError(f"request_timeout = {seconds:g} is out of range; give seconds above 0")
    for name in _REPORTS:
        if options[name] is not None:
            raise InputError(f"{name} is for a request; leave out --{name}")
    config, params = settings.config_of(options), settings.params_of(options)
    _require_packages()
    server_options = _server_options(options, config.target)

    from ssd_jax.server.lifecycle import listen
    from ssd_jax.server.state import new_state

    allow_most_files()
    with listen(options["host"], options["port"]) as listener, open_llm(config) as llm:
        state = new_state(llm, _defaults(llm, params, values), server_options)
        return _serve(llm, state, options, listener)


def _server_options(options: Mapping[str, Any], target: str) -> ServerOptions:
    """The settings of the server, with the files that they name read or tried."""
    from ssd_jax.server.options import (
        ServerOptions,
        check_access_log,
        check_origins,
        read_keys,
        read_tls,
    )
    from ssd_jax.server.tool_calls.forms import form_named

    return ServerOptions(
        model=options["served_model_name"] or short(target),
        tool_parser=form_named(options["tool_parser"]),
        queue=options["max_queue"],
        max_body=options["max_body"],
        most_connections=options["limit_concurrency"],
        request_timeout=options["request_timeout"],
        keys=read_keys(options["api_key_file"]),
        origins=check_origins(options["allowed_origins"]),
        access_log=check_access_log(options["access_log"], logs_texts=options["access_log_texts"]),
        logs_texts=options["access_log_texts"],
        tls=read_tls(options["ssl_certfile"], options["ssl_keyfile"]),
    )


def _serve(
    llm: LLM, state: ServerState, options: Mapping[str, Any], listener: socket.socket
) -> int:
    from ssd_jax.server.lifecycle import HttpServer

    server = HttpServer(state, listener)
    with _Signals() as signals:
        server.start()
        try:
            load(llm)
            signals.loaded = state.loaded = True
            where = f"{server.scheme}://{options['host']}:{server.port}"
            print(
                f"serving {state.model} at {where} (mode {llm.mode})", file=sys.stderr, flush=True
            )
            if not state.options.keys and not Address(options["host"], server.port).loopback:
                print(
                    "whoever reaches it may use it; --api_key_file asks for keys", file=sys.stderr
                )
            status = signals.wait()
            if not server.drain(options["drain_seconds"]):
                llm.close()  # ends with an error what still runs
        finally:
            server.stop()
    return status


class _Signals:
    """SIGTERM and Ctrl-C: the first asks the server to end, the next one ends the process.

    While the model loads, SIGTERM ends the process, and Ctrl-C does what it does in all commands.

    Attributes:
      loaded: whether the model has loaded.
    """

    def __init__(self) -> None:
        self.loaded = False
        self._ends: queue.SimpleQueue[int] = queue.SimpleQueue()  # takes items from handlers
        self._stopping = False

    def __enter__(self) -> _Signals:
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._handlers = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def wait(self) -> int:
        """Waits for the first; returns the exit status that it stands for."""
        while True:  # a signal that another thread receives does not wake this one
            with contextlib.suppress(queue.Empty):
                return self._ends.get(timeout=_SECONDS)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        status = 0 if number == signal.SIGTERM else 128 + number
        if not self.loaded and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._stopping or not self.loaded:
            from ssd_jax.system.leaving import leave

            leave("", status)
        self._stopping = True
        self._ends.put(status)


def _defaults(llm: LLM, params: SamplingParams, values: settings.Flags) -> SamplingParams:
    """The parameters of requests that give none: flags, then the checkpoint's if they are taken."""
    from ssd_jax.llm.prompting import given_settings  # bad flags must not wait for JAX

    checkpoint = given_settings(llm.get_default_sampling_params())
    return dataclasses.replace(
        params, **{name: value for name, value in checkpoint.items() if not values[name].present}
    )


def _require_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"serve needs {', '.join(missing)}: install the extra, pip install 'ssd-jax[serve]'"
        )

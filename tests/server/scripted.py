"""A server whose engine follows a script: events without a model."""

from __future__ import annotations

import asyncio
import contextlib

from ssd_jax.engine.origin import Origin, TextSpan
from ssd_jax.engine.request import CompletionOutput, Request, RequestOutput, TokenEvent
from ssd_jax.engine.request_metrics import REQUEST_KEYS
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.server.activity import EngineActivity
from ssd_jax.server.admission import Admission
from ssd_jax.server.lifecycle import HttpServer, listen
from ssd_jax.server.metrics import Metrics
from ssd_jax.server.options import ServerOptions
from ssd_jax.server.state import ServerState


class Letters:
    """A tokenizer: the id of a character is its code."""

    size = 0x110000
    bos_token, eos_token, chat_template = "<bos>", "<eos>", None
    eos_ids, added_tokens = frozenset(), {}

    @property
    def has_chat_template(self):
        return self.chat_template is not None

    def get_chat_template(self, tools=None):
        if isinstance(self.chat_template, str):
            return self.chat_template
        return self.chat_template["default" if tools is None else "tool_use"]

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def token_bytes(self, token_id, after=None):
        del after
        return chr(token_id).encode()


class ScriptedEngine:
    """Says "a" until it may say no more, and 50 times where nothing limits it.

    Attributes:
      most: how often it says that where nothing limits it.
      pieces: what it says in place of "a"s, each as one token.
      running: requests that have not ended.
      held: whether no tokens come.
      error: what the next token raises.
      seen: what `activity` says.
      asked: all requests that have begun.
    """

    slots, context, failure = 2, 100, None
    mode = "ar"

    def __init__(self):
        self.tokenizer = Letters()
        self.defaults = SamplingParams(max_tokens=None, seed=None)
        self.running = 0
        self.most = 50
        self.pieces = None
        self.held = False
        self.error = None
        self.seen = None
        self.asked = []
        self.intervals = []

    def activity(self):
        return self.seen or EngineActivity(mode=self.mode, running=min(self.running, self.slots))

    def mode_of(self, speculation, k=None):
        if k:
            raise InputError(f"k = {k} is out of range; this server proposes 0 to 0 tokens")
        if speculation in ("sd", "ssd"):
            raise InputError(f"speculation = {speculation!r} was not prepared; one of off, auto")
        return None

    async def prompt_ids(self, prompt, *, add_special_tokens=True):
        del add_special_tokens
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    async def encode_chat(self, prompt):
        return self.tokenizer.encode(prompt["messages"][-1]["content"])

    async def requests(self, prompts, params, **settings):
        made = []
        for index, prompt in enumerate(prompts):
            ids = prompt.get("prompt_token_ids") or await self.encode_chat(prompt)
            if len(ids) >= self.context:
                raise InputError(f"the prompt has {len(ids)} tokens; the context is {self.context}")
            made.append(Request(prompt_ids=ids, params=params, index=index, **settings))
        return [text for request in made for text in request.split(len(prompts))]

    async def events(self, requests, mode, interval):
        del mode
        self.asked += requests
        self.intervals.append(interval)
        self.running += len(requests)
        try:
            for request in requests:
                for number in range(self._count(request)):
                    while self.held:
                        await asyncio.sleep(0.005)
                    if self.error is not None:
                        raise self.error
                    yield self._event(request, number)
                    await asyncio.sleep(0)
        finally:
            self.running -= len(requests)

    def _count(self, request):
        return min(len(self.pieces or ()) or self.most, request.params.most_tokens)

    def _piece(self, number):
        return self.pieces[number] if self.pieces else "a"

    def _event(self, request, number):
        count, output = self._count(request), None
        if number == count - 1:
            text = CompletionOutput(
                prompt_index=request.index,
                seed=0,
                token_ids=[97] * count,
                text="".join(map(self._piece, range(count))),
                finish_reason="stop" if request.params.max_tokens is None else "length",
                metrics=dict.fromkeys(REQUEST_KEYS),
            )
            output = RequestOutput(
                request_id=request.index,
                prompt=None,
                prompt_token_ids=list(request.prompt_ids),
                outputs=[text],
            )
        return TokenEvent(
            request_id=request.index,
            prompt_index=request.index,
            token_ids=[97],
            text=self._piece(number),
            spans=[TextSpan(self._piece(number), Origin.TARGET)],
            output=output,
        )


@contextlib.contextmanager
def served(engine, *, loaded=True, **options):
    """A server for an engine, on a free port of this machine."""
    settings = ServerOptions(**{"model": "m", "queue": 4, "max_body": 100_000, **options})
    admission = Admission(engine.slots, settings.queue)
    state = ServerState(
        options=settings,
        engine=engine,
        admission=admission,
        metrics=Metrics(admission, settings.model, engine.activity),
        loaded=loaded,
    )
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(state, listener)
        server.start()
        server.state, server.listener = state, listener
        try:
            yield server
        finally:
            server.stop()

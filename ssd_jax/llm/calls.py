"""The calls of an `LLM`: prompts in, texts or events out, in threads or in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request, RequestOutput, TokenEvent, joined
from ssd_jax.engine.requests.sequence import require_one_text
from ssd_jax.engine.round_thread import WHOLE_TEXT_INTERVAL, TaskCaller, ThreadCaller
from ssd_jax.errors import InputError
from ssd_jax.llm.prompting import Params, Prompt, as_conversations
from ssd_jax.llm.requests import Requests
from ssd_jax.options.fields import check_keywords
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.files import shown

_BATCH = 100
"""Most requests that are queued before an event loop goes on with its other tasks."""


class Calls(Requests, ABC):
    """The calls of an open model, which share its engines."""

    @property
    @abstractmethod
    def mode(self) -> str:
        """The mode of calls that name none."""

    @abstractmethod
    def engine_of(self, mode: str | None, k: int | None = None) -> Engine:
        """The engine of a mode and K; None takes the configured one."""

    @check_keywords()
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        n: int | None = None,
        mode: str | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes one or several prompts; outputs are in prompt order.

        The randomness of each text is keyed by its index, which is p for prompt p, so a batch and
        single calls with the same `Request.index` give the same text. (Unless `verify` is coupled,
        where a draft's speed decides how long it is waited for, sampled texts only have the same
        distribution; there a repeated seed and index get noise of their own.)

        Args:
          prompts: one, or any iterable of prompts.
          sampling_params: for all prompts, or one for each. With `SamplingParams.n` an output has
            several texts.
          n: number of texts of each prompt, with an output for each, side by side.
          mode: one of `modes`; None is the configured one.
          use_tqdm: as in vLLM, but there is no progress bar: `stream` gives tokens as they come.
        """
        if use_tqdm:
            raise InputError(
                f"use_tqdm = {use_tqdm!r}: there is no progress bar; leave it out, or use stream"
            )
        groups = self._prepare(prompts, sampling_params, n)
        if not groups:
            return []
        return _group_outputs(groups, self.run([text for texts in groups for text in texts], mode))

    @check_keywords({"chat_template_content_format": "templates get the text of all parts"})
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        *,
        n: int | None = None,
        mode: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answers one or several conversations; outputs are in their order.

        It is `generate` for prompts of the form {"messages": ..., "tools": ..., ...}, which
        `stream` and `generate_async` take, too.

        Args:
          messages: a conversation, a list of {"role", "content"}, or a list of conversations.
          sampling_params, n, mode, use_tqdm: see `generate`.
          tools: JSON schemas of functions that the assistant may call.
          chat_template: name of one of the checkpoint's templates, or Jinja source to use in place
            of them; None takes `tool_use` where tools are given and there is one, else `default`.
          chat_template_kwargs: further variables of the template.
          add_generation_prompt: begin the assistant's turn, also behind a last message of the
            assistant; None does so unless the last message is continued.
          continue_final_message: go on within the last message.
        """
        fields = {
            "tools": tools,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        prompts = [
            {"messages": conversation, **fields} for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, n=n, mode=mode, use_tqdm=use_tqdm)

    @check_keywords()
    async def generate_async(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        n: int | None = None,
        mode: str | None = None,
    ) -> list[RequestOutput]:
        """`generate` for an event loop.

        Requests of several tasks are decoded in one batch; a task that is cancelled cancels its
        requests.
        """
        groups = await asyncio.to_thread(self._prepare, prompts, sampling_params, n)
        if not groups:
            return []
        requests = [text for texts in groups for text in texts]
        events = self.run_async(requests, mode, interval=WHOLE_TEXT_INTERVAL)
        return _group_outputs(groups, [event async for event in events if event.output is not None])

    @check_keywords()
    async def stream_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        mode: str | None = None,
    ) -> AsyncGenerator[TokenEvent]:
        """`stream` for an event loop; `aclose` cancels it."""
        request = await asyncio.to_thread(self.request, prompt, sampling_params)
        require_one_text(request)
        async with contextlib.aclosing(self.run_async([request], mode)) as events:
            async for event in events:
                yield event

    @check_keywords()
    async def run_async(
        self, requests: Sequence[Request], mode: str | None = None, *, interval: float = 0.0
    ) -> AsyncGenerator[TokenEvent]:
        """`run` for an event loop; `aclose` cancels the requests that have not ended.

        Args:
          interval: seconds that new tokens may wait for others, which costs the rounds less than
            waking the loop for each; the first and the last never wait.
        """
        engine, requests = await asyncio.to_thread(self._prepared, requests, mode)
        caller = TaskCaller(engine, interval)
        try:
            for first in range(0, len(requests), _BATCH):
                self._rounds.add(caller, requests[first : first + _BATCH])
                await asyncio.sleep(0)
            while caller.open:
                yield await caller.next()
        finally:
            self._rounds.leave(caller)
        caller.check()

    def _prepared(
        self, requests: Sequence[Request], mode: str | None, k: int | None = None
    ) -> tuple[Engine, Sequence[Request]]:
        """`engine_of`, with all programs that requests need, and the requests for it: none is
        queued before."""
        engine = self.engine_of(mode, k)
        for request in requests:
            engine.prepare(request.params)
        if mode == "ar":
            requests = [dataclasses.replace(request, k=0) for request in requests]
        elif mode in ("sd", "ssd"):  # by name: what mode auto finds faster does not count
            branches = (mode == "ssd") if engine.branches else None
            requests = [
                dataclasses.replace(
                    request, k=engine.k if request.k is None else request.k, branches=branches
                )
                for request in requests
            ]
        return engine, requests

    @check_keywords()
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        mode: str | None = None,
    ) -> Generator[TokenEvent]:
        """Completes one prompt with one text, yielding events as tokens come.

        Closing or deleting the generator cancels its request. A generator that only a `for` loop
        holds is deleted when the loop is left.
        """
        request = self.request(prompt, sampling_params)
        require_one_text(request)
        return self.run([request], mode)

    @check_keywords()
    def run(
        self, requests: Sequence[Request], mode: str | None = None, k: int | None = None
    ) -> Generator[TokenEvent]:
        """Events of these requests until all have ended; see `stream` for leaving early.

        `mode` and `k` choose an engine; see `engine_of`. They are decoded from the first event on,
        whether or not the others are taken. An interrupt (Ctrl-C) is raised at once; it cancels
        these requests and no others.

        Raises:
          InputError: not a list of requests, one for several texts, or a mode or K that was not
            prepared.
          DeviceError: a device has failed; the requests have ended with the reason "error".
          SsdError: the model is closed, or another thread has closed it meanwhile.
        """
        if not isinstance(requests, Sequence) or not all(isinstance(r, Request) for r in requests):
            raise InputError(f"requests = {shown(requests)}: give a list of what `request` makes")
        with self.started(requests, mode, k) as caller:
            while caller.open:
                yield caller.next()
        caller.check()

    @contextlib.contextmanager
    def started(
        self, requests: Sequence[Request], mode: str | None = None, k: int | None = None
    ) -> Iterator[ThreadCaller]:
        """A context in which the requests of `run` are decoded, for a thread that takes their
        events; those that are open where it is left are cancelled."""
        engine, requests = self._prepared(requests, mode, k)
        caller = ThreadCaller(engine)
        try:
            self._rounds.add(caller, requests)
            yield caller
        finally:
            self._rounds.leave(caller)

    def stop(self, caller: ThreadCaller) -> None:
        """Ends the caller's open requests with what they have; their last events are to come."""
        self._rounds.stop(caller)


def _group_outputs(
    groups: Sequence[Sequence[Request]], events: Iterable[TokenEvent]
) -> list[RequestOutput]:
    """An output for each group of requests, with their texts, in the order of the groups."""
    outputs = {event.prompt_index: event.output for event in events if event.output is not None}
    return [joined([outputs[request.index] for request in requests]) for requests in groups]

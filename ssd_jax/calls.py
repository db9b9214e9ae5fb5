"""What is asked of an `LLM`: prompts in, texts or events out, in threads or in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence

from ssd_jax.checkpoints.tokenizer import Tokenizer
from ssd_jax.config import Config
from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request, RequestOutput, TokenEvent
from ssd_jax.engine.sharing import Caller, Sharing
from ssd_jax.prompting import Params, Prompt, RequestMaker
from ssd_jax.sampling.params import SamplingParams


class Calls(ABC):
    """The calls of a model that is open, whose engines they share.

    Attributes:
      config: its settings.
      context: most tokens of a sequence.
      tokenizer: the target's.
    """

    config: Config
    context: int
    tokenizer: Tokenizer
    _default_params: SamplingParams
    _sharing: Sharing

    @property
    @abstractmethod
    def mode(self) -> str:
        """The mode of calls that name none."""

    @abstractmethod
    def engine_of(self, mode: str, k: int | None = None) -> Engine:
        """The engine of a mode and K; None is the configured K."""

    @functools.cached_property
    def _maker(self) -> RequestMaker:
        return RequestMaker(
            tokenizer=self.tokenizer,
            context=self.context,
            logprobs=self.config.logprobs,
            chat_template=self.config.chat_template,
            defaults=self._default_params,
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """How requests are sampled that come without parameters; see `Config.generation_config`."""
        return self._default_params

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; text goes through the chat template where that is on.

        Raises:
          InputError: messages without a chat template, or malformed ones.
        """
        return self._maker.encode(prompt)

    def request(
        self, prompt: Prompt, params: SamplingParams | None = None, index: int = 0
    ) -> Request:
        """A checked request for `Engine.add`; see `RequestMaker.request`."""
        return self._maker.request(prompt, params, index)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params = None,
        *,
        n: int = 1,
        mode: str | None = None,
    ) -> list[RequestOutput]:
        """Completes one prompt or several; outputs are in prompt order.

        The randomness of each is keyed by its index, that of prompt p being p, so a batch and
        single calls with the same `Request.index` give the same text. (Sampled under the ratio rule
        it has the same law only, where a draft's speed decides how long it is waited for; there a
        seed and index that come again get noise of their own.)

        Args:
          prompts: one, or any iterable of them.
          params: of all prompts, or one for each.
          n: texts of each prompt, which come one after the other.
          mode: one of `modes`; None is the configured one.
        """
        requests = self._maker.requests(prompts, params, n)
        return _in_order(requests, self.run(requests, mode)) if requests else []

    async def generate_async(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params = None,
        *,
        n: int = 1,
        mode: str | None = None,
    ) -> list[RequestOutput]:
        """`generate` for an event loop: what several tasks ask for is decoded in one batch, and a
        task that is cancelled cancels what it asked for."""
        requests = await asyncio.to_thread(self._maker.requests, prompts, params, n)
        if not requests:
            return []
        events = self._run_async(requests, mode)
        return _in_order(requests, [event async for event in events if event.output is not None])

    async def stream_async(
        self, prompt: Prompt, params: SamplingParams | None = None, *, mode: str | None = None
    ) -> AsyncIterator[TokenEvent]:
        """`stream` for an event loop; leaving the loop cancels it."""
        request = await asyncio.to_thread(self.request, prompt, params)
        async with contextlib.aclosing(self._run_async([request], mode)) as events:
            async for event in events:
                yield event

    async def _run_async(
        self, requests: Sequence[Request], mode: str | None
    ) -> AsyncGenerator[TokenEvent]:
        """`run` for an event loop. A thread that waits for an event when this is cancelled ends
        with the round."""
        caller = Caller(await asyncio.to_thread(lambda: self.engine_of(mode or self.mode)))
        try:
            self._sharing.add(caller, requests)
            while caller.open:
                yield await asyncio.to_thread(self._sharing.next, caller)
        finally:
            self._sharing.leave(caller)
        caller.check()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, mode: str | None = None
    ) -> Iterator[TokenEvent]:
        """Completes one prompt, yielding events as tokens come; leaving the loop cancels it."""
        return self.run([self.request(prompt, params)], mode)

    def run(
        self, requests: Sequence[Request], mode: str | None = None, k: int | None = None
    ) -> Iterator[TokenEvent]:
        """Events of these requests until all have ended; leaving early cancels them.

        `mode` and `k` choose an engine; see `engine_of`. An interrupt (Ctrl-C) comes between
        rounds, or ends a wait for another thread's; it cancels these requests and no others.

        Raises:
          DeviceError: a device has failed; the requests have ended with the reason "error".
          SsdError: the model is closed, or another thread has closed it meanwhile.
        """
        caller = Caller(self.engine_of(mode or self.mode, k))
        try:
            self._sharing.add(caller, requests)
            while caller.open:
                yield self._sharing.next(caller)
        finally:
            self._sharing.leave(caller)
        caller.check()


def _in_order(requests: Sequence[Request], events: Iterable[TokenEvent]) -> list[RequestOutput]:
    """What requests have come to, in their order."""
    place = {request.index: number for number, request in enumerate(requests)}
    outputs = [event.output for event in events if event.output is not None]
    return sorted(outputs, key=lambda output: place[output.prompt_index])

"""What the server asks of an open model: all that would change with another engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.engine.request import Request, TokenEvent
from ssd_jax.errors import DeviceError, InputError
from ssd_jax.llm.prompting import Prompt
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.server.activity import EngineActivity, activity_of

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM


class EngineAccess:
    """A model as the routes see it.

    Attributes:
      defaults: sampling parameters of requests that give none.
      failure: what a device reported when it failed; nothing is decoded after it.
    """

    def __init__(self, llm: LLM, defaults: SamplingParams) -> None:
        self._llm = llm
        self.defaults = defaults
        self.failure: str | None = None

    @property
    def slots(self) -> int:
        """Most texts that are decoded at a time."""
        return self._llm.config.slots

    @property
    def context(self) -> int:
        """Most tokens of prompt and text."""
        return self._llm.context

    @property
    def mode(self) -> str:
        """The mode that decodes."""
        return self._llm.mode

    def activity(self) -> EngineActivity:
        """What the engines do; it never waits for them."""
        llm = self._llm
        chooses = llm.config.mode == "auto"
        if chooses and llm.choice is None:
            return EngineActivity(mode=None)
        return activity_of(llm.engines, llm.mode, chooses=chooses)

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self._llm.tokenizer

    async def prompt_ids(
        self, prompt: str | list[int], *, add_special_tokens: bool = True
    ) -> list[int]:
        """The ids of a text that no template is put around; ids stay as they are.

        Raises:
          InputError: it cannot be encoded.
        """
        if not isinstance(prompt, str):
            return prompt
        self._require_short(len(prompt))
        plain = self._llm.config.control_tokens == "plain"
        return await asyncio.to_thread(
            self.tokenizer.encode, prompt, add_special_tokens, split_special_tokens=plain
        )

    async def encode_chat(self, prompt: Mapping[str, Any]) -> list[int]:
        """The ids of an object with messages.

        Raises:
          InputError: malformed messages, or no chat template.
        """
        self._require_short(_characters(prompt))
        return await asyncio.to_thread(self._llm.encode, prompt)

    def _require_short(self, characters: int) -> None:
        """Refuses a text that cannot fit, whatever its tokens: they need not be counted.

        Raises:
          InputError: with the most characters.
        """
        most = self.context * self.tokenizer.longest
        if characters > most:
            raise InputError(
                f"the prompt has {characters} characters; the context, {self.context} tokens, "
                f"holds {most} at most; shorten the prompt"
            )

    async def requests(
        self, prompts: Sequence[Prompt], params: SamplingParams, **settings: Any
    ) -> list[Request]:
        """Checked requests for the `params.n` texts of each prompt; text s of prompt p of P has the
        index p + s P.

        Args:
          settings: fields of each `Request`.

        Raises:
          InputError: a prompt or parameters that cannot run.
        """
        return await asyncio.to_thread(self._requests, prompts, params, settings)

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams, settings: Mapping[str, Any]
    ) -> list[Request]:
        for prompt in prompts:
            self._require_short(_characters(prompt))
        checked = [
            dataclasses.replace(self._llm.request(prompt, params, index), **settings)
            for index, prompt in enumerate(prompts)
        ]
        return [text for request in checked for text in request.split(len(prompts))]

    def mode_of(self, speculation: str, k: int | None = None) -> str | None:
        """The mode that a request asks for; None is the server's.

        Args:
          k: most tokens that a round shall propose; None leaves that to the server.

        Raises:
          InputError: it was not prepared, or such proposals were not.
        """
        most = 0 if self._llm.modes == ("ar",) else self._llm.config.speculated
        if k is not None and not 0 <= k <= most:
            raise InputError(f"k = {k} is out of range; this server proposes 0 to {most} tokens")
        if k and speculation == "off":
            raise InputError(f"k = {k} proposes tokens, and speculation = 'off' none; give one")
        if speculation == "auto":
            return None
        mode = "ar" if speculation == "off" else speculation
        if mode not in self._llm.modes:
            names = ["off" if name == "ar" else name for name in self._llm.modes]
            raise InputError(
                f"speculation = {speculation!r} was not prepared; one of {', '.join(names)}, auto"
            )
        return mode

    async def events(
        self, requests: Sequence[Request], mode: str | None, interval: float
    ) -> AsyncGenerator[TokenEvent]:
        """Their events until all have ended; `aclose` cancels those that have not.

        Args:
          mode: see `mode_of`.
          interval: seconds that new tokens may wait for others.

        Raises:
          DeviceError: a device has failed, and the model must be opened again.
          SsdError: the model was closed.
        """
        try:
            async with contextlib.aclosing(
                self._llm.run_async(requests, mode, interval=interval)
            ) as events:
                async for event in events:
                    yield event
        except DeviceError as error:
            self.failure = str(error)
            raise


def _characters(prompt: Prompt) -> int:
    """Characters of the messages of a prompt, whatever its template adds; 0 of other prompts."""
    messages = prompt.get("messages", ()) if isinstance(prompt, Mapping) else ()
    return sum(_text_length(message.get("content")) for message in messages)


def _text_length(content: Any) -> int:
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return sum(len(text) for text in parts if isinstance(text, str))
    return len(content) if isinstance(content, str) else 0

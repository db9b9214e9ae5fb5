"""From prompts, as callers have them, to checked requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

import numpy as np

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.generation_config import read_sampling
from ssd_jax.checkpoints.tokenizer import Tokenizer
from ssd_jax.engine.request import Request
from ssd_jax.engine.sequence import check
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""Text, chat messages ({"role", "content"}), or token ids."""

Params = SamplingParams | Iterable[SamplingParams] | None
"""Of all prompts, or of each by itself; None is what `generation_config` says."""


def default_params(generation_config: str, checkpoint: Checkpoint) -> SamplingParams:
    """How requests are sampled that do not say it.

    Args:
      generation_config: see `Config.generation_config`.
      checkpoint: of the target.

    Raises:
      InputError: the checkpoint's own settings cannot be read, or are none.
    """
    if generation_config == "none":
        return SamplingParams()
    where, found = read_sampling(checkpoint)
    try:
        return SamplingParams(**found)
    except InputError as error:
        raise InputError(f"{where}: {error}; correct it, or use --generation_config=none") from None


def given_settings(params: SamplingParams) -> dict[str, Any]:
    """Those that are not what they are by default."""
    default = vars(SamplingParams())
    return {name: value for name, value in vars(params).items() if value != default[name]}


def sampling_line(taken: Mapping[str, Any]) -> str:
    """Says what was taken from a checkpoint."""
    if not taken:
        return "generation_config auto: nothing of the checkpoint's is taken"
    each = ", ".join(f"{name} = {value}" for name, value in taken.items())
    return f"generation_config auto: the checkpoint's {each}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestMaker:
    """Makes requests that can run.

    Attributes:
      context: most tokens of a request, prompt and output.
      logprobs: most that a request may ask for; None is none.
      chat_template: whether text goes through the chat template; None is if there is one.
      defaults: parameters of requests that come without.
    """

    tokenizer: Tokenizer
    context: int
    logprobs: int | None
    chat_template: bool | None
    defaults: SamplingParams

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
          InputError: no prompt, messages without a chat template, or malformed ones.
        """
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes):
            raise InputError(
                f"a prompt is text, a list of messages or a list of token ids, not {prompt!r}"
            )
        if not isinstance(prompt, str) and all(isinstance(item, Integral) for item in prompt):
            return self._checked_ids([int(cast("int", token)) for token in prompt])
        templated = self.chat_template
        if templated is None:
            templated = self.tokenizer.has_chat_template
        if isinstance(prompt, str) and not templated:
            return self.tokenizer.encode(prompt)
        if not templated and self.chat_template is False:
            raise InputError(
                "messages need the chat template, which is switched off; give text, or leave out "
                "--chat_template=false"
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.tokenizer.apply_chat_template(cast("list[dict[str, str]]", list(messages)))

    def request(
        self, prompt: Prompt, params: SamplingParams | None = None, index: int = 0
    ) -> Request:
        """A checked request for `Engine.add`.

        Raises:
          InputError: the prompt cannot be encoded or does not fit, or the parameters do not.
        """
        params = self.defaults if params is None else params
        if not isinstance(params, SamplingParams):
            raise InputError(f"params = {params!r}: give SamplingParams")
        request = Request(prompt_ids=self.encode(prompt), params=params, index=index)
        check(request, self.tokenizer.eos_ids, self.context)
        most = -1 if self.logprobs is None else self.logprobs
        if params.logprobs is not None and params.logprobs > most:
            raise InputError(
                f"logprobs = {params.logprobs} were not prepared; open the model with "
                f"logprobs = {params.logprobs} (it has {self.logprobs})"
            )
        self._checked_ids([token for token, _ in params.logit_bias], "logit_bias: ")
        self._checked_ids(list(params.stop_token_ids), "stop_token_ids: ")
        return request

    def requests(
        self, prompts: Prompt | Iterable[Prompt], params: Params = None, n: int = 1
    ) -> list[Request]:
        """Checked requests for n texts of each prompt, those of a prompt side by side.

        Text s of prompt p has the index p + s P, where P is how many prompts there are.

        Raises:
          InputError: as `request`; also parameters that are not one for each prompt.
        """
        if not isinstance(n, Integral) or isinstance(n, bool) or n < 1:
            raise InputError(f"n = {n!r} is impossible; give 1 or more texts of each prompt")
        every = as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params] * len(every)
        elif isinstance(params, Iterable) and not isinstance(params, str | Mapping):
            each = list(params)
        else:
            raise InputError(f"params = {params!r}: give SamplingParams, or one for each prompt")
        if len(each) != len(every):
            raise InputError(f"{len(each)} params for {len(every)} prompts; give one for each")
        made: list[Request] = []
        for place, (prompt, own) in enumerate(zip(every, each, strict=True)):
            try:
                first = self.request(prompt, own, place)
            except InputError as error:
                if len(every) == 1:
                    raise
                raise InputError(f"prompt {place}: {error}") from None
            indices = range(place, place + int(n) * len(every), len(every))
            made += [dataclasses.replace(first, index=index) for index in indices]
        return made

    def _checked_ids(self, ids: list[int], where: str = "") -> list[int]:
        outside = [token for token in ids if not 0 <= token < self.tokenizer.size]
        if outside:
            raise InputError(
                f"{where}token id {outside[0]} is not in the vocabulary; ids are 0 to "
                f"{self.tokenizer.size - 1}"
            )
        return ids


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several.

    A string, a list of messages and a list of ids are each one prompt.

    Raises:
      InputError: neither.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise InputError(f"prompts are text, messages, ids, or a list of such, not {prompts!r}")
    several: list[Any] = list(prompts)
    single = bool(several) and isinstance(several[0], Mapping | Integral)
    return [several] if single else several

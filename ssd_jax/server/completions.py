"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from openai.types import Completion

from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.engine.request import RequestOutput, TokenLogprobs
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.server.fields import COMPLETION, COMPLETION_TOKENS, includes_usage
from ssd_jax.server.generation import Generation
from ssd_jax.server.logprobs import LogprobsWriter


def completion_prompts(fields: Mapping[str, Any]) -> list[str | list[int]]:
    """The prompts, each a text or the ids of one."""
    prompt: Any = fields["prompt"]
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt if several else [prompt]


def completion_params(fields: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """The sampling parameters of a completion.

    Raises:
      ApiError: values out of range.
    """
    limit = fields.get("max_tokens", defaults.max_tokens)
    more: dict[str, Any] = {"max_tokens": COMPLETION_TOKENS if limit is None else limit}
    if echoes_alone(fields):
        more["max_tokens"] = 1
    if "logprobs" in fields:
        more["logprobs"] = fields["logprobs"]
        if fields.get("echo"):
            more["prompt_logprobs"] = fields["logprobs"]
    return COMPLETION.params(fields, defaults, n=fields.get("n", 1), **more)


def echoes_alone(fields: Mapping[str, Any]) -> bool:
    """Whether the prompt comes back with nothing behind it: one token is drawn and left out."""
    return bool(fields.get("echo")) and fields.get("max_tokens") == 0


async def completion_response(
    generation: Generation, fields: Mapping[str, Any], echoes: Sequence[str]
) -> Completion:
    """The response in one piece.

    Args:
      echoes: the text of each prompt, if prompts are to come back.
    """
    choices = []
    for index, output in enumerate(await generation.finish()):
        text = output.outputs[0]
        writer = _ChoiceWriter(generation, fields, index, echoes)
        choices.append(writer.write(text.token_ids, text.text, text.logprobs, output))
    return _completion(generation, choices, **_end(generation))


async def completion_chunks(
    generation: Generation, fields: Mapping[str, Any], echoes: Sequence[str]
) -> AsyncGenerator[Completion]:
    """The response as a stream; arguments as of `completion_response`.

    Log-probabilities of prompts are known when a text ends: with them a choice is one chunk.
    """
    usage = {"usage": None} if includes_usage(fields) else {}
    one_chunk = bool(echoes) and "logprobs" in fields
    writers: dict[int, _ChoiceWriter] = {}
    async for index, event in generation.events():
        if index not in writers:
            writers[index] = _ChoiceWriter(generation, fields, index, echoes)
        writer, output = writers[index], event.output
        if one_chunk and output is not None:
            text = output.outputs[0]
            choice = writer.write(text.token_ids, text.text, text.logprobs, output)
        elif one_chunk or not (event.text or event.logprobs or output or writer.shows_ids):
            continue
        else:
            choice = writer.write(event.token_ids, event.text, event.logprobs, output)
        yield _completion(generation, [choice], **usage)
    if usage:
        yield _completion(generation, [], **_end(generation))


def echoed(prompts: Sequence[str | list[int]], tokenizer: Tokenizer) -> list[str]:
    """The texts of prompts."""
    return [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts]


class _ChoiceWriter:
    """Writes one choice, in one piece or chunk by chunk."""

    def __init__(
        self, generation: Generation, fields: Mapping[str, Any], index: int, echoes: Sequence[str]
    ) -> None:
        prompt = index // generation.texts
        self._index = index
        self._prompt_ids = generation.requests[prompt].prompt_ids
        self._echo = echoes[prompt] if echoes else None  # until it is written
        self.shows_ids = bool(fields.get("return_token_ids"))
        self._echoes_alone = echoes_alone(fields)
        before = self._prompt_ids[-1] if self._echo is None else None
        self._logprobs = LogprobsWriter(generation.engine.tokenizer, before)
        self._begun = False

    def write(
        self,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        output: RequestOutput | None,
    ) -> dict[str, Any]:
        """What is new, behind the prompt where that comes back; with an output also the end."""
        choice: dict[str, Any] = {"index": self._index, "finish_reason": None, "logprobs": None}
        if self._echoes_alone:
            token_ids, text, logprobs = [], "", None if logprobs is None else []
        if self.shows_ids:
            first = {} if self._begun else {"prompt_token_ids": list(self._prompt_ids)}
            choice |= {"token_ids": list(token_ids), **first}
        ids, entries = token_ids, logprobs
        if self._echo is not None:
            text, self._echo = self._echo + text, None
            if entries is not None and output is not None:
                ids = [*self._prompt_ids, *token_ids]
                entries = [*(output.prompt_logprobs or []), *entries]
        if entries is not None:
            choice["logprobs"] = self._logprobs.completion(ids, entries)
        if output is not None:
            choice["finish_reason"] = output.finish_reason
            if output.outputs[0].stop_reason is not None:
                choice["stop_reason"] = output.outputs[0].stop_reason
        self._begun = True
        return choice | {"text": text}


def _end(generation: Generation) -> dict[str, Any]:
    """What is known once all texts have ended."""
    return {"usage": generation.usage, "metrics": generation.response_metrics}


def _completion(
    generation: Generation, choices: Sequence[dict[str, Any]], **more: Any
) -> Completion:
    """A response or a chunk, unchecked: OpenAI's have nulls that the type lacks."""
    return Completion.construct(
        **generation.identity, object="text_completion", choices=list(choices), **more
    )

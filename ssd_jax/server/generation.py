"""The texts of a request while they are decoded, whatever form the response has."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from openai.types import CompletionUsage

from ssd_jax.engine.request import CompletionOutput, Request, RequestOutput, TokenEvent
from ssd_jax.engine.round_thread import WHOLE_TEXT_INTERVAL
from ssd_jax.errors import InputError, SsdError
from ssd_jax.llm.prompting import Prompt
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.server.access_log import record_facts
from ssd_jax.server.admission import QueuePlace
from ssd_jax.server.deadlines import before
from ssd_jax.server.engine_access import EngineAccess
from ssd_jax.server.errors import ApiError, invalid
from ssd_jax.server.metrics import Meter
from ssd_jax.server.speculation_report import speculation_report
from ssd_jax.server.state import ServerState

MOST_LOGPROBS = 1 << 19
"""Of the texts of a request together: a response takes a kilobyte for each while it is made."""


@dataclasses.dataclass(kw_only=True)
class Generation:
    """The texts of a request.

    Attributes:
      place: of the request in the queue.
      requests: one for each text; text s of prompt p of P has the index p + s P.
      prompts: P.
      mode: see `EngineAccess.mode_of`.
      speculation: as the request says it.
      timeout: seconds until the texts must have ended; None is never.
      deadline: that time, of the running event loop.
      identity: `id`, `created` and `model` of the response and of its chunks.
      outputs: those of the texts that have ended, by choice.
    """

    engine: EngineAccess
    meter: Meter
    place: QueuePlace
    requests: Sequence[Request]
    prompts: int
    mode: str | None
    speculation: str
    timeout: float | None
    deadline: float | None
    identity: Mapping[str, Any]
    outputs: dict[int, RequestOutput] = dataclasses.field(default_factory=dict)

    @property
    def texts(self) -> int:
        """Texts of each prompt."""
        return len(self.requests) // self.prompts

    def choice(self, index: int) -> int:
        """The place of a request's text among the choices: those of a prompt are side by side."""
        text, prompt = divmod(index, self.prompts)
        return prompt * self.texts + text

    async def events(self, interval: float = 0.0) -> AsyncGenerator[tuple[int, TokenEvent]]:
        """New tokens, each with the choice that they belong to.

        Args:
          interval: seconds that they may wait for others.

        Raises:
          ApiError: a text cannot be finished.
        """
        source = self.place.guard(self.engine.events(self.requests, self.mode, interval))
        if self.deadline is not None:
            source = before(self.deadline, source)
        try:
            async with contextlib.aclosing(source) as events:
                async for event in events:
                    choice = self.choice(event.prompt_index)
                    self.meter.note(event)
                    if event.output is not None:
                        self.outputs[choice] = event.output
                        _check_ended(event.output.outputs[0])
                    yield choice, event
        except TimeoutError:
            raise ApiError(
                504,
                f"the request has not ended within {self.timeout:g} seconds, after "
                f"{self.meter.tokens} tokens; ask for fewer tokens, or give it more time",
                code="timeout",
            ) from None
        except SsdError as error:
            raise ApiError(503, f"the text could not be finished: {error}") from error
        finally:
            for _ in range(len(self.requests) - len(self.outputs)):
                self.meter.note_aborted()

    async def finish(self) -> list[RequestOutput]:
        """The outputs in the order of the choices."""
        async with contextlib.aclosing(self.events(WHOLE_TEXT_INTERVAL)) as events:
            async for _ in events:
                pass
        return [self.outputs[choice] for choice in sorted(self.outputs)]

    @property
    def usage(self) -> CompletionUsage:
        """Tokens of all prompts and texts; a prompt of several texts counts once."""
        outputs = [self.outputs[choice] for choice in sorted(self.outputs)]
        prompts = sum(len(output.prompt_token_ids) for output in outputs[:: self.texts])
        texts = sum(len(output.token_ids) for output in outputs)
        cached = sum(output.metrics["cached_tokens"] or 0 for output in outputs[:: self.texts])
        return CompletionUsage.model_validate(
            {
                "prompt_tokens": prompts,
                "completion_tokens": texts,
                "total_tokens": prompts + texts,
                "prompt_tokens_details": {"cached_tokens": cached},
            }
        )

    @property
    def response_metrics(self) -> dict[str, Any]:
        """How the texts were decoded; see `speculation_report`."""
        return speculation_report([output.metrics for output in self.outputs.values()])

    def facts(self, with_texts: bool) -> dict[str, Any]:
        """What the access log says; see `AccessRecord`."""
        outputs = [self.outputs.get(choice) for choice in range(len(self.requests))]
        ended = [output.metrics for output in outputs if output is not None]
        rates = [metrics["hit_rate"] for metrics in ended if metrics["hit_rate"] is not None]
        first = self.meter.first_token
        facts = {
            "id": self.identity["id"],
            "model": self.identity["model"],
            "prompt_tokens": sum(len(r.prompt_ids) for r in self.requests[: self.prompts]),
            "output_tokens": self.meter.tokens,
            "time_to_first_token": first and round(first, 6),
            "finish_reasons": [
                "cancelled" if output is None else output.finish_reason for output in outputs
            ],
            "speculation": self.speculation,
            "modes": sorted({metrics["mode"] for metrics in ended if metrics["mode"] is not None}),
            "hit_rate": sum(rates) / len(rates) if rates else None,
        }
        if with_texts:
            decode = self.engine.tokenizer.decode
            facts |= {
                "prompts": [decode(list(r.prompt_ids)) for r in self.requests[: self.prompts]],
                "texts": [None if output is None else output.text for output in outputs],
            }
        return facts


def _check_ended(output: CompletionOutput) -> None:
    """Raises: ApiError: the text has ended by an error, for which the request may be to blame."""
    if output.finish_reason in ("stop", "length"):
        return
    if isinstance(output.error, InputError):
        raise invalid(f"the text cannot go on: {output.error}")
    reason = output.error or "send the request again"
    raise ApiError(500, f"the text could not be finished: {reason}")


async def open_answer(
    state: ServerState,
    place: QueuePlace,
    kind: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    fields: Mapping[str, Any],
    visible_ids: frozenset[int] = frozenset(),
) -> Generation:
    """The answer to a request, whose texts are not queued yet.

    Args:
      place: that the request has in the queue.
      kind: what its `id` begins with.
      visible_ids: see `Request`.

    Raises:
      InputError: a prompt or a setting that cannot run.
      ApiError: a time-out that the server does not give, or more log-probabilities than fit.
    """
    speculation = fields.get("speculation", "auto")
    k, priority = fields.get("k"), fields.get("priority", 0)
    mode = state.engine.mode_of(speculation, k)
    timeout = _timeout(fields, state.options.request_timeout)
    deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
    requests = await state.engine.requests(
        prompts, params, k=k, priority=priority, visible_ids=visible_ids
    )
    _require_few_logprobs(requests, "n" if params.n > 1 else "prompt", state.engine.context)
    generation = Generation(
        engine=state.engine,
        meter=state.metrics.meter(),
        place=place,
        requests=requests,
        prompts=len(prompts),
        mode=mode,
        speculation=speculation,
        timeout=timeout,
        deadline=deadline,
        identity={
            "id": f"{kind}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": state.model,
        },
    )
    record_facts(generation.facts)
    return generation


def _require_few_logprobs(requests: Sequence[Request], param: str, context: int) -> None:
    """Refuses several texts that may have more log-probabilities than a response is to hold.

    Raises:
      ApiError: with the number, and the field that asks for several texts.
    """
    values = 0
    for request in requests:
        params, size = request.params, len(request.prompt_ids)
        if params.logprobs is not None:
            values += min(params.most_tokens, context - size) * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            values += size * (1 + params.prompt_logprobs)
    if len(requests) > 1 and values > MOST_LOGPROBS:
        raise invalid(
            f"{param} asks for {len(requests)} texts with up to {values} log-probabilities; a "
            f"request for several texts has at most {MOST_LOGPROBS}, so ask for fewer of them, "
            "fewer texts, or fewer tokens",
            param,
        )


def _timeout(fields: Mapping[str, Any], most: float | None) -> float | None:
    """Seconds that a request may take."""
    timeout = fields.get("timeout", most)
    if timeout is None:
        return None
    if not 0 < timeout < math.inf:
        raise invalid(f"timeout = {timeout:g} is out of range; give seconds above 0", "timeout")
    if most is not None and timeout > most:
        raise invalid(
            f"timeout = {timeout:g} is more than {most:g} seconds, the limit of this server; give "
            "less, or leave it out",
            "timeout",
        )
    return timeout

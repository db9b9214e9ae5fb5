"""The texts of a request while they are decoded, whatever form the response has."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from openai.types import CompletionUsage

from ssd_jax.engine.request import CompletionOutput, Request, RequestOutput, TokenEvent
from ssd_jax.errors import SsdError
from ssd_jax.llm.prompting import Prompt
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.server.access_log import record_facts
from ssd_jax.server.engine_access import EngineAccess
from ssd_jax.server.errors import ApiError
from ssd_jax.server.metrics import Metrics
from ssd_jax.server.state import ServerState


@dataclasses.dataclass(kw_only=True)
class Generation:
    """The texts of a request.

    Attributes:
      requests: one for each text; text s of prompt p of P has the index p + s P.
      prompts: P.
      mode: see `EngineAccess.mode_of`.
      speculation: as the request says it.
      identity: `id`, `created` and `model` of the response and of its chunks.
      outputs: those of the texts that have ended, by choice.
      tokens: number of tokens that came, of all texts.
      first_token: seconds until the first of them; None before.
    """

    engine: EngineAccess
    metrics: Metrics
    requests: Sequence[Request]
    prompts: int
    mode: str | None
    speculation: str
    identity: Mapping[str, Any]
    outputs: dict[int, RequestOutput] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    first_token: float | None = None

    @property
    def texts(self) -> int:
        """Texts of each prompt."""
        return len(self.requests) // self.prompts

    def choice(self, index: int) -> int:
        """The place of a request's text among the choices: those of a prompt are side by side."""
        text, prompt = divmod(index, self.prompts)
        return prompt * self.texts + text

    async def events(self) -> AsyncGenerator[tuple[int, TokenEvent]]:
        """New tokens, each with the choice that they belong to.

        Raises:
          ApiError: a text cannot be finished.
        """
        started = time.monotonic()
        try:
            async with contextlib.aclosing(self.engine.events(self.requests, self.mode)) as events:
                async for event in events:
                    choice = self.choice(event.prompt_index)
                    self.tokens += len(event.token_ids)
                    if self.first_token is None and event.token_ids:
                        self.first_token = time.monotonic() - started
                    self.metrics.note_tokens(event, started)
                    if event.output is not None:
                        self.outputs[choice] = event.output
                        _check_ended(event.output.outputs[0])
                    yield choice, event
        except SsdError as error:
            raise ApiError(503, f"the text could not be finished: {error}") from error

    async def finish(self) -> list[RequestOutput]:
        """The outputs in the order of the choices."""
        async with contextlib.aclosing(self.events()) as events:
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

    def facts(self, with_texts: bool) -> dict[str, Any]:
        """What the access log says; see `AccessRecord`."""
        outputs = [self.outputs.get(choice) for choice in range(len(self.requests))]
        ended = [output.metrics for output in outputs if output is not None]
        rates = [metrics["hit_rate"] for metrics in ended if metrics["hit_rate"] is not None]
        facts = {
            "id": self.identity["id"],
            "model": self.identity["model"],
            "prompt_tokens": sum(len(r.prompt_ids) for r in self.requests[: self.prompts]),
            "output_tokens": self.tokens,
            "time_to_first_token": self.first_token and round(self.first_token, 6),
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
    if output.finish_reason not in ("stop", "length"):
        raise ApiError(500, "the text could not be finished; send the request again")


async def open_answer(
    state: ServerState,
    kind: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    fields: Mapping[str, Any],
) -> Generation:
    """The answer to a request, whose texts are not queued yet.

    Args:
      kind: what its `id` begins with.

    Raises:
      InputError: a prompt or a setting that cannot run.
    """
    speculation = fields.get("speculation", "auto")
    mode = state.engine.mode_of(speculation)
    generation = Generation(
        engine=state.engine,
        metrics=state.metrics,
        requests=await state.engine.requests(prompts, params),
        prompts=len(prompts),
        mode=mode,
        speculation=speculation,
        identity={
            "id": f"{kind}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": state.model,
        },
    )
    record_facts(generation.facts)
    return generation

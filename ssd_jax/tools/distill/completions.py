"""The target's completions of whole shards, by one engine."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ssd_jax.errors import InputError, SsdError
from ssd_jax.system.atomic import write_file
from ssd_jax.tools.distill.prompt_ids import PromptIds
from ssd_jax.tools.distill.settings import GenerateSettings, TargetSettings
from ssd_jax.tools.distill.shards import Sample, encode_texts

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM

Bar = Callable[..., contextlib.AbstractContextManager[Callable[..., None] | None]]
"""Opens a progress bar: (label, *, unit); the bar takes (done, total) and maybe a text."""

Entry = dict[str, Any]
"""A shard's entry in the manifest; its scores are an entry within it, or None."""

_TOKENS_PER_REPORT = 256
"""Tokens that are reported at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion to generate."""

    index: int  # its number among all, which keys its noise
    prompt: int  # place of its prompt in the list
    temperature: float


Shards = list[list[Completion]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionJob:
    """Inputs of generation.

    Attributes:
      vocabulary: number of ids of the tokenizer.
      limit: number of positions that the target was made for.
      section: of the configuration that has the settings.
    """

    target: TargetSettings
    settings: GenerateSettings
    prompts: Sequence[PromptIds]
    vocabulary: int
    limit: int
    directory: Path
    bar: Bar
    section: str = "generate"

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its completion."""
        return max(len(prompt.ids) for prompt in self.prompts) + self.settings.max_tokens

    def check(self) -> None:
        """Refuses what the target cannot do.

        Raises:
          InputError: completions beyond its context.
        """
        settings = self.settings
        if self.context > self.limit:
            raise InputError(
                f"prompts of up to {self.context - settings.max_tokens} tokens and "
                f"{self.section}.max_tokens = {settings.max_tokens} are more than the {self.limit} "
                "positions that the target was made for; lower prompts.longest or max_tokens"
            )


class Report(NamedTuple):
    """Progress since the last report.

    Attributes:
      shard: place and entry of a shard whose file is written.
    """

    tokens: int = 0
    completions: int = 0
    shard: tuple[int, Entry] | None = None


def complete_shards(
    job: CompletionJob, shards: Iterable[tuple[int, list[Completion]]]
) -> Iterator[Report]:
    """Generates shards by their places, one after the other; the first report says it is ready.

    Raises:
      InputError: a model that cannot be used.
      SsdError: a completion that ended by an error.
    """
    from ssd_jax.config.config import Config
    from ssd_jax.llm.llm import LLM
    from ssd_jax.system.compile_cache import settings_in_use

    config = Config(
        target=job.target.source,
        dtype=job.target.dtype,
        slots=job.settings.slots,
        context=job.context,
        **settings_in_use()._asdict(),  # as the caller of the stages has set it
    )
    with LLM(config=config, load=False) as llm:
        with job.bar("loading weights, compiling", unit="bytes") as progress:
            llm.load(progress=progress)
        yield Report()
        for index, completions in shards:
            yield from _complete(llm, job, index, completions)


def _complete(
    llm: LLM, job: CompletionJob, index: int, completions: Sequence[Completion]
) -> Iterator[Report]:
    from ssd_jax.sampling.params import SamplingParams

    settings = job.settings
    params = {
        temperature: SamplingParams(
            temperature=temperature, seed=settings.seed, max_tokens=settings.max_tokens
        )
        for temperature in settings.temperatures
    }
    requests = [
        llm.request(
            job.prompts[completion.prompt].ids, params[completion.temperature], completion.index
        )
        for completion in completions
    ]
    outputs: dict[int, list[int]] = {}
    tokens = num_reported = 0
    for event in llm.run(requests):
        tokens += len(event.token_ids)
        if event.output is not None:
            if event.output.finish_reason == "error":
                raise SsdError(f"completion {event.prompt_index} ended by an error; see above")
            outputs[event.prompt_index] = event.output.token_ids
        if tokens >= _TOKENS_PER_REPORT or len(outputs) == len(requests):
            yield Report(tokens, len(outputs) - num_reported)
            tokens, num_reported = 0, len(outputs)
    samples = []
    for completion in completions:
        prompt = job.prompts[completion.prompt]
        ids = np.array([*prompt.ids, *outputs[completion.index]], np.int32)
        samples.append(Sample(tokens=ids, prompt_length=0 if prompt.plain else len(prompt.ids)))
    name, data = f"shard-{index:05}.safetensors", encode_texts(samples, job.vocabulary)
    sizes = {
        "completions": len(samples),
        "tokens": sum(len(sample.tokens) for sample in samples),
        "generated": sum(len(sample.learnt) for sample in samples),
    }
    entry = {**write_shard(job.directory, name, data), **sizes, "scores": None}
    yield Report(shard=(index, entry))


def write_shard(directory: Path, name: str, data: bytes) -> Entry:
    """Writes a file; returns its name, size and digest."""
    write_file(directory / name, data, durable=True)
    return {"file": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

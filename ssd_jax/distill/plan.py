"""Which completions are generated, how each is sampled, and in which shard it belongs.

All of it is a function of the settings and the prompts: a shard is the same whoever makes it when.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from ssd_jax.distill.prompts import Prompt
from ssd_jax.distill.settings import GenerateSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion to generate.

    Attributes:
      index: its number among all, which keys its noise.
      prompt: place of its prompt in the list.
    """

    index: int
    prompt: int
    temperature: float


def plan_shards(prompts: Sequence[Prompt], settings: GenerateSettings) -> list[list[Completion]]:
    """Completions by shard, see `into_shards`."""
    return into_shards(_completions(len(prompts), settings), prompts, settings)


def into_shards(
    completions: Sequence[Completion], prompts: Sequence[Prompt], settings: GenerateSettings
) -> list[list[Completion]]:
    """As many completions in each as surely fit `shard_tokens`, but at least one."""
    shards: list[list[Completion]] = []
    room = 0
    for completion in completions:
        most = len(prompts[completion.prompt].ids) + settings.max_tokens
        if most > room or not shards:
            shards.append([])
            room = settings.shard_tokens
        shards[-1].append(completion)
        room -= most
    return shards


def _completions(prompts: int, settings: GenerateSettings) -> list[Completion]:
    count = prompts if settings.completions is None else settings.completions
    choices = settings.temperatures
    completions: list[Completion] = []
    for turn in range(-(-count // prompts)):
        for place, prompt in enumerate(_shuffled(prompts, f"{settings.seed}/{turn}")):
            temperature = choices[(place + turn) % len(choices)]
            completions.append(
                Completion(index=len(completions), prompt=prompt, temperature=temperature)
            )
    return completions[:count]


def _shuffled(count: int, key: str) -> list[int]:
    """0 to count - 1 in an order that depends on `key` alone, not on any library's generator."""
    return sorted(range(count), key=lambda i: hashlib.sha256(f"{key}/{i}".encode()).digest())

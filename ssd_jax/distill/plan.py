"""Which completions are generated, how each is sampled, and in which shard it belongs.

All of it is a function of the settings and the prompts: a shard is the same whoever makes it when.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from ssd_jax.distill.prompts import Prompt
from ssd_jax.distill.settings import GenerateSettings
from ssd_jax.errors import InputError


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
    """Completions by shard, see `into_shards`.

    Raises:
      InputError: more completions than can differ, or shards that cannot use every slot.
    """
    _check_room(prompts, settings)
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


def _check_room(prompts: Sequence[Prompt], settings: GenerateSettings) -> None:
    """Refuses shards that leave slots empty for good: a shard ends before the next is begun."""
    together = min(_wanted(len(prompts), settings), settings.slots)
    longest = max(len(prompt.ids) for prompt in prompts) + settings.max_tokens
    if together * longest > settings.shard_tokens:
        raise InputError(
            f"generate.shard_tokens = {settings.shard_tokens} has room for "
            f"{settings.shard_tokens // longest} completions of up to {longest} tokens with their "
            "prompts, and a shard is begun when the one before has ended, so that "
            f"{together} slots are never all in use; raise it to {together * longest} at least, "
            "or lower generate.slots"
        )


def _wanted(prompts: int, settings: GenerateSettings) -> int:
    """Completions to generate of so many prompts; refused if they cannot differ."""
    count = prompts if settings.completions is None else settings.completions
    if count > prompts and not any(settings.temperatures):
        raise InputError(
            f"generate.completions = {count} is more than the {prompts} prompts, and at "
            f"temperature 0 a prompt has one completion; lower it to {prompts} or add a "
            "temperature above 0"
        )
    return count


def _completions(prompts: int, settings: GenerateSettings) -> list[Completion]:
    """A prompt's temperatures take turns, from where its place in the first order puts it."""
    count, choices = _wanted(prompts, settings), settings.temperatures
    ranks = {prompt: rank for rank, prompt in enumerate(_shuffled(prompts, f"{settings.seed}/0"))}
    completions: list[Completion] = []
    greedy: set[int] = set()
    turn = 0
    while len(completions) < count:
        for prompt in _shuffled(prompts, f"{settings.seed}/{turn}"):
            temperature = choices[(ranks[prompt] + turn) % len(choices)]
            if not temperature:
                if prompt in greedy:
                    continue  # the same text again
                greedy.add(prompt)
            completions.append(
                Completion(index=len(completions), prompt=prompt, temperature=temperature)
            )
        turn += 1
    return completions[:count]


def _shuffled(count: int, key: str) -> list[int]:
    """0 to count - 1 in an order that depends on `key` alone, not on any library's generator."""
    return sorted(range(count), key=lambda i: hashlib.sha256(f"{key}/{i}".encode()).digest())

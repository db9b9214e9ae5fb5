"""Reads prompts and parameters, as callers and checkpoints give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.generation_config import read_sampling
from ssd_jax.config import Config
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""Text, chat messages ({"role", "content"}), or token ids."""

Params = SamplingParams | Iterable[SamplingParams] | None
"""For all prompts, or one for each; None follows `generation_config`."""


def default_params(generation_config: str, checkpoint: Checkpoint) -> SamplingParams:
    """Sampling of requests without parameters, by `Config.generation_config`.

    With auto it is that of the target's checkpoint.

    Raises:
      InputError: the checkpoint's own settings cannot be read, or are not valid.
    """
    if generation_config == "none":
        return SamplingParams()
    where, found = read_sampling(checkpoint)
    try:
        return SamplingParams(**found)
    except InputError as error:
        raise InputError(f"{where}: {error}; correct it, or use --generation_config=none") from None


def given_settings(settings: SamplingParams | Config) -> dict[str, Any]:
    """The settings that differ from their defaults."""
    default = vars(type(settings)())
    return {name: value for name, value in vars(settings).items() if value != default[name]}


def sampling_line(taken: Mapping[str, Any]) -> str:
    """A line on the settings taken from a checkpoint."""
    if not taken:
        return "generation_config auto: nothing of the checkpoint's is taken"
    each = ", ".join(f"{name} = {value}" for name, value in taken.items())
    return f"generation_config auto: the checkpoint's {each}"


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several.

    A string, a list of messages and a list of ids are each one prompt.

    Raises:
      InputError: neither a prompt nor several.
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

"""Reads prompts and parameters, as callers and checkpoints give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.generation_config import read_sampling
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.config.config import Config
from ssd_jax.config.values import is_integer
from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import CHAT_KEYS, PROMPT_KEYS
from ssd_jax.options.fields import check_names, check_type
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.files import shown

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | Mapping[str, Any]
"""Text, chat messages ({"role", "content"}), token ids, or an object with one of the keys of
`PROMPT_KEYS`; one of messages may have those of `CHAT_KEYS`, too."""

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
    file, values = read_sampling(checkpoint)
    try:
        return SamplingParams(**values)
    except InputError as error:
        raise InputError(
            f"{file}: {error}; correct it, or use `generation_config='none'`"
        ) from None


def given_settings(settings: SamplingParams | Config) -> dict[str, Any]:
    """The settings that differ from their defaults."""
    default = vars(type(settings)())
    return {name: value for name, value in vars(settings).items() if value != default[name]}


def sampling_line(settings: Mapping[str, Any]) -> str:
    """A line on the settings taken from a checkpoint."""
    if not settings:
        return "generation_config auto: nothing of the checkpoint's is taken"
    text = ", ".join(f"{name} = {value}" for name, value in settings.items())
    return f"generation_config auto: the checkpoint's {text}"


def text_of(prompt: Prompt) -> str | None:
    """The text of a prompt that is one; None for messages and ids."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several.

    A string, an object, a list of messages and a list of ids are each one prompt.

    Raises:
      InputError: neither a prompt nor several.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str | Mapping):
        one: Any = prompts
        return [one]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InputError(f"prompts are text, messages, ids, or a list of such, not {prompts!r}")
    several: list[Any] = list(prompts)
    first = several[0] if several else None
    single = isinstance(first, Integral) or _is_message(first)
    return [several] if single else several


def as_conversations(messages: object) -> list[Any]:
    """A list of conversations from one, a list of messages, or several."""
    several = list(messages) if isinstance(messages, list | tuple) else [messages]
    return several if several and isinstance(several[0], list | tuple) else [messages]


def _is_message(item: object) -> bool:
    return isinstance(item, Mapping) and not any(key in item for key in PROMPT_KEYS)


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, config: Config) -> list[int]:
    """The ids of one prompt; text goes through the chat template where that is on.

    Raises:
      InputError: no prompt, messages without a chat template, or malformed messages.
    """
    value, chat = _prompt_value(prompt)
    if not isinstance(value, str):
        ids = _ids(value)
        if ids is not None:
            return ids
        if not isinstance(value, Sequence) or not isinstance(value[0], Mapping):
            raise InputError(
                "a prompt is text, a list of messages or a list of token ids, not "
                f"{shown(value)}; generate takes several prompts"
            )
    plain = config.control_tokens == "plain"
    templated = config.chat_template
    if templated is None:
        templated = tokenizer.has_chat_template
    if isinstance(value, str) and not templated:
        return tokenizer.encode(value, split_special_tokens=plain)
    if config.chat_template is False and chat.get("chat_template") is None:
        raise InputError(
            "messages need the chat template, which is switched off; give text, or leave out "
            "`chat_template=False`"
        )
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
    return _apply_template(messages, tokenizer, split_special_tokens=plain, **chat)


def _prompt_value(prompt: Prompt) -> tuple[Any, dict[str, Any]]:
    """Text, messages or ids of a prompt, and the `CHAT_KEYS` of an object."""
    if isinstance(prompt, np.ndarray):
        return prompt.tolist(), {}
    if not isinstance(prompt, Mapping):
        return prompt, {}
    check_names(prompt, (*PROMPT_KEYS, *CHAT_KEYS), "prompt: ")
    keys = [key for key in PROMPT_KEYS if key in prompt]
    if len(keys) != 1:
        raise InputError(f"a prompt has one of {', '.join(PROMPT_KEYS)}; it has {shown(keys)}")
    key, value = keys[0], prompt[keys[0]]
    chat = {name: item for name, item in prompt.items() if name != key}
    if key != "messages" and chat:
        raise InputError(f"{next(iter(chat))} is for messages, not for {key}; leave it out")
    if key == "prompt" and not isinstance(value, str):
        raise InputError(f"prompt must be a string; it is {shown(value)}")
    if key == "prompt_token_ids" and _ids(value) is None:
        raise InputError(f"prompt_token_ids must be a list of integers; it is {shown(value)}")
    if key == "messages" and (isinstance(value, str) or not value):
        raise InputError(f"messages must be a list of messages; it is {shown(value)}")
    return value, chat


def _ids(value: Any) -> list[int] | None:
    """A list of ids, or None if it is something else."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return None
    return [int(token) for token in value] if all(map(is_integer, value)) else None


def _apply_template(
    messages: list[Any],
    tokenizer: Tokenizer,
    *,
    split_special_tokens: bool,
    tools: Any = None,
    chat_template: Any = None,
    chat_template_kwargs: Any = None,
    add_generation_prompt: Any = None,
    continue_final_message: Any = False,
) -> list[int]:
    """The ids of messages; without a word on it, an assistant's turn begins after them unless the
    last one is continued."""
    check_type("chat_template", chat_template, "str | None")
    check_type("add_generation_prompt", add_generation_prompt, "bool | None")
    check_type("continue_final_message", continue_final_message, "bool")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return tokenizer.apply_chat_template(
        messages,
        tools,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        split_special_tokens=split_special_tokens,
        chat_template_kwargs=chat_template_kwargs,
    )

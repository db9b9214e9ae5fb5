"""The forms of tool calls that are recognised."""

from __future__ import annotations

from ssd_jax.errors import InputError
from ssd_jax.server.tool_calls.harmony import HARMONY
from ssd_jax.server.tool_calls.hermes import HERMES
from ssd_jax.server.tool_calls.llama3_json import LLAMA3_JSON
from ssd_jax.server.tool_calls.protocols import CallForm

_FORMS: dict[str, CallForm] = {form.name: form for form in (HARMONY, HERMES, LLAMA3_JSON)}
NAMES = tuple(_FORMS)
"""Their names."""


def form_named(name: str | None) -> CallForm | None:
    """The form of `--tool_parser`; None without a name.

    Raises:
      InputError: there is no such form.
    """
    if name is None:
        return None
    if name not in _FORMS:
        raise InputError(f"tool_parser = {name!r} is unknown; give one of {', '.join(NAMES)}")
    return _FORMS[name]


def form_of(template: str) -> CallForm | None:
    """The form that a chat template asks for; None if it is none of these."""
    return next((form for form in _FORMS.values() if form.is_in(template)), None)

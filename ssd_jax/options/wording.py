"""Settings in messages: in Python as keywords, on the command line as flags."""

from __future__ import annotations

import re

_SETTING = re.compile(r"`(\w+)(?:=(?:'([^`']*)'|([^`']*)))?`")


def as_flags(message: str) -> str:
    """A message with its settings as they are typed on the command line.

    Messages name a setting as `` `context` ``, or with a value as `` `dtype='int8'` ``; they become
    ``--context`` and ``--dtype=int8``. Other words in such quotes have spaces, dots or dashes, and
    stay.
    """

    def flag(match: re.Match[str]) -> str:
        name, text, value = match.groups()
        typed = text if value is None else value.lower() if value in ("True", "False") else value
        return f"--{name}" if typed is None else f"--{name}={typed}"

    return _SETTING.sub(flag, message)

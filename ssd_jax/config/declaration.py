"""How a setting is declared."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Group = Literal["engine", "speculation"]
Need = Literal["draft", "model", "ssd"]


def setting(
    default: Any,
    text: str,
    choices: tuple[str, ...] = (),
    *,
    group: Group = "engine",
    needs: Need | None = None,
    within: tuple[float, float] | None = None,
    or_else: Any = None,
    listed: bool = False,
) -> Any:
    """Declares a setting. Flags, TOML keys, help and checks follow from it.

    Args:
      text: help.
      choices: possible values; one with a colon, such as remote:HOST:PORT, stands for any address.
      group: heading in the help.
      needs: without a draft, without a draft that is a model, or outside mode ssd the setting means
        nothing, and is refused; it is then in group speculation.
      within: least and most of a number.
      or_else: one more possible value.
      listed: whether the text is a list of numbers, which may also be given as a list.
    """
    metadata = {"help": text, "choices": choices, "within": within, "or_else": or_else}
    metadata |= {"group": "speculation" if needs else group, "needs": needs, "listed": listed}
    return dataclasses.field(default=default, metadata=metadata)

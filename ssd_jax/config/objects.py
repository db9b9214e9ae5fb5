"""How a setting says that its value is an object of the program: by a name in angle brackets.

`LLM` puts it there. No path, model or policy has such a name.
"""

from __future__ import annotations


def name_of(value: object) -> str:
    """The setting for an object: the name of a class or function, or of the object's class."""
    value = getattr(value, "func", value)  # of a `functools.partial`
    name = getattr(value, "__name__", type(value).__name__)
    return f"<{name.strip('<>')}>"


def is_object(setting: object) -> bool:
    """Whether the value of a setting stands for an object."""
    return isinstance(setting, str) and setting[:1] == "<" and setting[-1:] == ">"

"""The names that users write or read: they change only on purpose.

`python -m tests.test_public_names` writes the list anew.
"""

import dataclasses
import importlib
import inspect
import pkgutil
from pathlib import Path
from unittest import mock

import ssd_jax
from ssd_jax import LLM, Config, SamplingParams, testing
from ssd_jax.cli import settings
from ssd_jax.cli.main import COMMANDS
from ssd_jax.config.keywords import ConfigSettings
from ssd_jax.config.vllm_names import NAMES
from ssd_jax.engine.request_metrics import REQUEST_KEYS

LIST = Path(__file__).parent / "goldens" / "public_names.txt"
HEADER = """\
# Public names. A name that is missing breaks users: keep it, or say in CHANGELOG.md what to do.
# After a change on purpose: python -m tests.test_public_names
"""


class _Parsed(Exception):  # noqa: N818 (no error)
    """Ends a command once its flags are known."""


def flags_of(command: str) -> list[str]:
    """Names of all flags that a command accepts, `--help` aside."""
    names: list[str] = []

    def parse(values, *_, **__):
        names.extend(values)
        raise _Parsed

    module = importlib.import_module(f"ssd_jax.cli.{command.replace('-', '_')}")
    with mock.patch.object(settings, "parse", parse):
        try:
            module.run([])
        except _Parsed:
            return sorted(names)
    raise AssertionError(f"{command} parses no flags")


def names_in(package) -> list[str]:
    """Names of its modules, and of the classes and functions that they define."""
    names = []
    for entry in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{entry.name}")
        names.append(entry.name)
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__:
                names.append(f"{entry.name}.{name}")
    return names


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def public_names() -> str:
    """A line for each name, under a title for each kind."""
    flags = {command: {*flags_of(command)} for command in COMMANDS}
    common = set.intersection(*(names for names in flags.values() if "temperature" in names))
    kinds = {
        "ssd_jax": ssd_jax.__all__,
        "ssd_jax.testing": names_in(testing),
        "parameters of LLM": parameters(LLM),
        "settings of LLM": ConfigSettings.__annotations__,
        "parameters of LLM.generate": parameters(LLM.generate),
        "parameters of LLM.chat": parameters(LLM.chat),
        "fields of Config": [field.name for field in dataclasses.fields(Config)],
        "fields of SamplingParams": [field.name for field in dataclasses.fields(SamplingParams)],
        "vLLM's names of settings": NAMES,
        "metrics": REQUEST_KEYS,
        "commands": COMMANDS,
        "flags and TOML keys of all commands that run a model": common,
    }
    for command, names in flags.items():
        rest, beside = (names - common, " beside them") if names >= common else (names, "")
        kinds[f"flags of {command}{beside}"] = rest
    lines = [HEADER]
    for kind, names in kinds.items():
        lines += [f"[{kind}]", *sorted(names), ""]
    return "\n".join(lines)


def test_public_names_are_those_of_the_list():
    expected = LIST.read_text().splitlines()
    assert public_names().splitlines() == expected, f"see the first lines of {LIST.name}"


if __name__ == "__main__":
    LIST.write_text(public_names())

"""A setting is declared once: what else names or types it is derived from that, or compared."""

import dataclasses
import types
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

from ssd_jax.cli import settings
from ssd_jax.config.config import Config
from ssd_jax.config.keywords import ConfigSettings, VllmSettings
from ssd_jax.config.settings import EngineSettings, settings_where
from ssd_jax.errors import InputError
from ssd_jax.loading.custom import Custom

FIELDS = {field.name: field for field in dataclasses.fields(Config)}
HINTS = typing.get_type_hints(ConfigSettings)
TYPES = typing.get_type_hints(EngineSettings)


def taken(hint) -> set[object]:
    """Types and values that an annotation allows."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*map(taken, typing.get_args(hint)))
    return {*typing.get_args(hint)} if typing.get_origin(hint) is typing.Literal else {hint}


def test_keywords_are_in_the_order_of_the_settings():
    others = {"target", *VllmSettings.__annotations__}
    assert [name for name in HINTS if name not in others] == [*FIELDS][1:]


@pytest.mark.parametrize("name", FIELDS)
def test_the_type_of_a_keyword_is_what_the_setting_takes(name):
    kinds, values = taken(TYPES[name]), taken(HINTS[name])
    objects = {value for value in values if typing.get_origin(value) is Callable}
    assert bool(objects) == (name in Custom._fields)  # of `LLM` alone
    values -= objects
    assert (type(None) in kinds) == (type(None) in values)
    choices = FIELDS[name].metadata["choices"]
    if choices and not any(":" in choice for choice in choices):
        assert values - {type(None)} == {*choices}
    else:
        assert kinds <= values
        assert values <= kinds | {int, float, Path}  # which stand for text


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_is_under_one_heading_and_has_a_flag_of_its_type(name):
    metadata, flag = FIELDS[name].metadata, settings.new_flags()[name]
    assert name in settings_where(group=metadata["group"])
    assert flag.help.split() == metadata["help"].split()
    assert flag.boolean == (bool in taken(TYPES[name]))


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"mode": "ar"}, {"draft", "model", "ssd"}),
        ({"mode": "sd", "draft": "d"}, {"ssd"}),
        ({"mode": "sd", "draft": "ngram"}, {"model", "ssd"}),
    ],
)
@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_is_refused_where_what_it_needs_is_missing(name, given, missing):
    metadata = FIELDS[name].metadata
    value = metadata["choices"][0] if metadata["choices"] else (metadata["within"] or "d")[0]
    try:
        Config(**{name: value, **given})
    except InputError as error:
        refused = str(error)
    else:
        refused = ""
    if name not in given:
        assert ("means nothing with" in refused) == (metadata["needs"] in missing), refused

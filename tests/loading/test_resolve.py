"""What settings leave open is decided once; the settings themselves stay as they were given."""

import dataclasses
from types import SimpleNamespace

import pytest

from ssd_jax import LLM, Config
from ssd_jax.config.settings import AUTO_BUDGETS, AUTO_K, AUTO_WIDTHS, SUPPORT
from ssd_jax.models.mechanisms import Mechanisms
from tests.loading.variation import resolved_of

SSD = {"mode": "ssd", "draft_placement": "process"}


@pytest.fixture(scope="module")
def given(tiny_checkpoint):
    """A configuration that leaves everything open that it can."""
    open_ = {"dtype": "auto", "compile_cache": "off", "kv_memory": "auto"}
    return Config(target=str(tiny_checkpoint), draft=str(tiny_checkpoint), **SSD, **open_)


@pytest.fixture(scope="module")
def llm(given):
    return LLM(config=given, load=False, ks=[2])


def test_a_model_keeps_its_configuration_as_it_was_given(given, llm):
    before = dataclasses.asdict(given)
    assert llm.config is llm.resolved.config is given
    assert dataclasses.asdict(given) == before
    assert (given.dtype, given.draft_dtype, given.budget, given.context) == (
        "auto",
        None,
        None,
        None,
    )


def test_open_settings_are_decided(given, llm):
    resolved = llm.resolved
    assert (resolved.dtype, resolved.draft_dtype) == ("bfloat16", "bfloat16")
    assert resolved.draft_source == given.draft == resolved.draft.source
    assert (resolved.ks, resolved.widths, resolved.budgets) == ((2, 4), (0, 2, 4), AUTO_BUDGETS)
    assert resolved.context == resolved.target.checkpoint.config.max_context
    assert resolved.placement.kind == "process"
    assert resolved.paging.total == -(-resolved.context // resolved.paging.size)
    assert resolved.engines == [("ssd", 2), ("ssd", 4)]
    assert resolved.chooses


def test_names_of_a_model_are_those_of_what_was_resolved(llm):
    resolved = llm.resolved
    for name in ("target", "draft", "context", "placement", "paging"):
        assert getattr(llm, name) is getattr(resolved, name)
    assert llm.tokenizer is resolved.target.tokenizer


@pytest.mark.parametrize(
    ("support", "outputs", "ids"),
    [
        (None, (1000, 900), SUPPORT),
        (None, (1000, 10), 10),
        (80, (1000, 900), 80),
        (80, (50, 60), 50),
        ("full", (1000, 900), 900),
    ],
)
def test_q_has_no_more_ids_than_either_model_has_outputs(support, outputs, ids):
    config = Config(target="t", draft="d", mode="sd", proposal_support=support)
    target, draft = (
        SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(outputs=count)))
        for count in outputs
    )
    resolved = dataclasses.replace(resolved_of(config, target=target), draft=draft)
    assert resolved.support == ids


@pytest.mark.parametrize(
    ("settings", "widths", "chooses"),
    [
        ({"mode": "ssd"}, (0, 4), False),
        ({"mode": "ssd", "budget": "auto"}, (0, 4), True),
        ({"mode": "ssd", "k": "auto"}, tuple(sorted({0, *AUTO_WIDTHS, AUTO_K})), True),
        ({"mode": "sd", "k": 3}, (0, 3), False),
        ({"mode": "auto", "k": 3}, (0, 3), True),
    ],
)
def test_widths_and_choices_follow_from_the_settings(settings, widths, chooses):
    resolved = resolved_of(Config(target="t", draft="d", **settings))
    assert (resolved.widths, resolved.chooses) == (widths, chooses)


def _with_layers(*kinds, window=9):
    mechanisms = Mechanisms(layer_kinds=kinds, window=window if "window" in kinds else None)
    return SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(mechanisms=mechanisms)))


def test_texts_give_back_pages_where_every_layer_of_both_models_has_a_window():
    every, wide = _with_layers("window", "window"), _with_layers("window", window=20)
    mixed, plain = _with_layers("window", "full"), _with_layers()

    def window(target, draft=None):
        resolved = resolved_of(Config(target="t"), target=target)
        return dataclasses.replace(resolved, draft=draft).window

    assert (window(every), window(every, wide), window(wide, every)) == (9, 20, 20)
    assert window(mixed) is window(plain) is window(every, mixed) is window(plain, every) is None

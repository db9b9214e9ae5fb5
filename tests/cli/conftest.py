"""Models that are opened and never loaded."""

import pytest

from ssd_jax.llm import LLM


class LoadingError(Exception):
    """Weights would load now."""


@pytest.fixture
def unloaded(monkeypatch):
    """`LoadingError` is raised instead of loading weights."""

    def load(*_args, **_kwargs):
        raise LoadingError

    monkeypatch.setattr(LLM, "load", load)
    return LoadingError

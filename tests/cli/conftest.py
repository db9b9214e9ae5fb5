"""Prompts, and models that are opened and never loaded."""

import json

import pytest

from ssd_jax.llm.llm import LLM


class LoadingError(Exception):
    """Weights would load now."""


@pytest.fixture
def unloaded(monkeypatch):
    """`LoadingError` is raised instead of loading weights."""

    def load(*_args, **_kwargs):
        raise LoadingError

    monkeypatch.setattr(LLM, "load", load)
    return LoadingError


@pytest.fixture
def prompts(tmp_path):
    """A file of three prompts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"prompt {i}"}) for i in range(3)))
    return path

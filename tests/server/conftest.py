"""Servers that several modules share."""

from __future__ import annotations

import pytest

from tests.server.scripted import ScriptedEngine, served


@pytest.fixture(scope="module")
def scripted_server():
    """A server of a scripted engine: two slots, four texts may wait, bodies of 100,000 bytes."""
    with served(ScriptedEngine()) as server:
        yield server


@pytest.fixture
def engine(scripted_server):
    """The engine of `server`, as it was at first."""
    engine = scripted_server.state.engine
    engine.held, engine.error, engine.failure = False, None, None
    engine.pieces, engine.tokenizer.chat_template = None, None
    return engine


@pytest.fixture
def server(scripted_server, engine):
    """A server that takes requests."""
    scripted_server.state.draining = False
    return scripted_server


@pytest.fixture
def completions(server, engine):
    """Completions of chats by the `openai` client."""
    import openai

    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client.chat.completions

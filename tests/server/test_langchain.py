"""LangChain's client against a server; skipped where it is not installed."""

from __future__ import annotations

import pytest

chat_models = pytest.importorskip("langchain_openai")


@pytest.fixture
def chat(server):
    return chat_models.ChatOpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1",
        api_key="none",
        model="m",
        max_tokens=3,
        max_retries=0,
        stream_usage=True,
    )


def test_chats_have_text_and_usage(chat):
    answer = chat.invoke("hi")
    assert (answer.content, answer.usage_metadata["total_tokens"]) == ("aaa", 5)
    assert [answer.content for answer in chat.batch(["a", "b"])] == ["aaa", "aaa"]


def test_streams_have_text_and_usage(chat):
    chunks = [*chat.stream("hi")]
    assert "".join(chunk.content for chunk in chunks) == "aaa"
    assert (
        sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 3
    )


def test_refusals_name_the_field(chat):
    with pytest.raises(Exception, match="temperature"):
        chat.bind(temperature=-1.0).invoke("hi")

"""The `openai` client against a server."""

import openai
import pytest

from tests.server.http_calls import call
from tests.waiting import eventually


@pytest.fixture
def client(server):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat(client):
    answer = client.chat.completions.create(model="m", messages=MESSAGES, max_completion_tokens=3)
    assert answer.choices[0].message.content == "aaa"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 5


def test_chat_streamed(client):
    chunks = [
        *client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "aaa"
    assert chunks[-1].usage.completion_tokens == 3


def test_the_clients_own_accumulation_of_a_stream(client):
    with client.chat.completions.stream(model="m", messages=MESSAGES) as events:
        answer = events.get_final_completion()
    assert answer.choices[0].message.content == "a" * 50


def test_completions_with_fields_of_vllm(client):
    answer = client.completions.create(
        model="m", prompt=["x", "y"], max_tokens=2, extra_body={"top_k": 3, "min_p": 0.1}
    )
    assert [choice.text for choice in answer.choices] == ["aa", "aa"]


def test_completions_streamed(client):
    chunks = client.completions.create(model="m", prompt="x", max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "aa"


def test_models(client):
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="m", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )


def test_a_failure_within_a_stream_reaches_the_client(client, server, engine):
    engine.error = openai.OpenAIError("no")
    with pytest.raises(openai.APIError):
        list(client.completions.create(model="m", prompt="x", stream=True))
    engine.error = None
    assert call(server.port, "GET", "/health")[0] == 200


def test_a_stream_that_the_client_leaves_is_cancelled(client, server, engine):
    engine.held = True
    stream = client.completions.create(model="m", prompt="x", stream=True, max_tokens=50)
    eventually(lambda: engine.running == 1)
    stream.close()
    eventually(lambda: engine.running == 0)

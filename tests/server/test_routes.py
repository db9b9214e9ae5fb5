"""What the routes answer, by an engine that follows a script."""

import socket

import pytest

import ssd_jax
from ssd_jax.errors import DeviceError, SsdError
from ssd_jax.server import fields
from ssd_jax.server.app import make_app
from ssd_jax.server.lifecycle import listen
from tests.server.http_calls import call, error_of, post, raw, stream
from tests.server.scripted import ScriptedEngine, served
from tests.waiting import eventually

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
COMPLETION = {"model": "m", "prompt": "hi", "max_tokens": 3}


def test_chat_has_openais_shape(server):
    status, value = post(server.port, "/v1/chat/completions", CHAT)
    assert status == 200
    assert value.pop("id").startswith("chatcmpl-")
    assert value.pop("created") > 1e9
    assert value == {
        "model": "m",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "aaa", "refusal": None},
                "finish_reason": "length",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "metrics": {
            "mode": None,
            "speculating": False,
            "reason": "the request was decoded in mode ar, without a draft",
            "hit_rate": None,
            "speculative_decoding": None,
        },
    }


def test_completions_of_several_prompts_are_side_by_side(server):
    body = {**COMPLETION, "prompt": ["x", "yy"], "n": 2, "echo": True}
    _, value = post(server.port, "/v1/completions", body)
    assert [choice["text"] for choice in value["choices"]] == ["xaaa", "xaaa", "yyaaa", "yyaaa"]
    assert [choice["index"] for choice in value["choices"]] == [0, 1, 2, 3]
    usage = value["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 12)


def test_an_echo_may_come_back_alone(server):
    body = {**COMPLETION, "echo": True, "max_tokens": 0}
    _, value = post(server.port, "/v1/completions", body)
    assert value["choices"][0]["text"] == "hi"


def test_a_chat_stream_gives_the_role_then_text_then_the_reason(server):
    events = stream(server.port, "/v1/chat/completions", {**CHAT, "max_tokens": 2})
    deltas = [event["choices"][0]["delta"] for event in events]
    role = {"role": "assistant", "content": "", "refusal": None}
    assert deltas == [role, {"content": "a"}, {"content": "a"}, {}]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None, None, None, "length"]
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
def test_usage_comes_last_in_a_stream_that_asks_for_it(server, path, body):
    body = {**body, "stream_options": {"include_usage": True}}
    *events, last = stream(server.port, path, body)
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5
    assert last["metrics"]["speculative_decoding"] is None


def test_models_are_listed_and_described(server):
    _, _, listed = call(server.port, "GET", "/v1/models")
    assert [model["id"] for model in listed["data"]] == ["m"]
    assert call(server.port, "GET", "/v1/models/m")[2] == listed["data"][0]
    status, _, value = call(server.port, "GET", "/v1/models/other")
    assert (status, value["error"]["code"]) == (404, "model_not_found")


def test_another_model_or_adapter_is_refused_by_name(server):
    status, error = error_of(server.port, "/v1/completions", {**COMPLETION, "model": "lora"})
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "'lora'" in error["message"]


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
def test_a_request_that_names_no_model_gets_the_one_that_is_served(server, path, body, named):
    asked = {name: value for name, value in body.items() if name != "model"} | named
    status, answer = post(server.port, path, asked)
    assert (status, answer["model"]) == (200, "m")


def test_the_version_is_the_packages(server):
    assert call(server.port, "GET", "/version")[2] == {"version": ssd_jax.__version__}


def test_a_server_is_live_while_its_model_loads_but_not_ready():
    with served(ScriptedEngine(), loaded=False) as server:
        assert call(server.port, "GET", "/health/live")[0] == 200
        assert call(server.port, "GET", "/health/ready")[0] == 503
        status, headers, _ = call(server.port, "POST", "/v1/completions", COMPLETION)
        assert (status, headers["retry-after"]) == (503, "5")
        server.state.loaded = True
        assert call(server.port, "GET", "/health/ready")[0] == 200
        assert call(server.port, "GET", "/health")[0] == 200


def test_a_failed_device_ends_requests_with_an_error_and_the_server_is_no_longer_live(
    server, engine
):
    engine.error = DeviceError("out of reach")
    engine.failure = "out of reach"
    assert call(server.port, "GET", "/health/live")[0] == 503
    assert error_of(server.port, "/v1/completions", COMPLETION)[0] == 503


def test_a_stream_whose_text_fails_ends_with_an_error_event(server, engine):
    engine.error = SsdError("the model was closed")
    (event,) = stream(server.port, "/v1/completions", COMPLETION)
    assert "the model was closed" in event["error"]["message"]
    eventually(lambda: server.state.admission.texts == 0)


def test_unexpected_failures_are_status_500_without_their_words(server, engine, caplog):
    engine.error = ZeroDivisionError("secret")
    status, error = error_of(server.port, "/v1/completions", COMPLETION)
    assert status == 500
    assert "secret" not in error["message"]
    assert "secret" in caplog.text


def test_a_speculation_that_was_not_prepared_is_refused(server):
    status, error = error_of(server.port, "/v1/completions", {**COMPLETION, "speculation": "ssd"})
    assert (status, error["param"]) == (400, "speculation")


def test_texts_are_tokenized_and_ids_detokenized(server):
    _, value = post(server.port, "/tokenize", {"prompt": "ab"})
    assert value == {"count": 2, "max_model_len": 100, "tokens": [97, 98]}
    _, value = post(server.port, "/tokenize", {"messages": CHAT["messages"]})
    assert value["tokens"] == [104, 105]
    assert post(server.port, "/detokenize", {"tokens": [97, 98]})[1] == {"prompt": "ab"}
    status, error = error_of(server.port, "/detokenize", {"tokens": [-1]})
    assert (status, error["param"]) == (400, "tokens")
    assert error_of(server.port, "/tokenize", {})[0] == 400


def test_the_tokenizer_is_described(server):
    _, _, value = call(server.port, "GET", "/tokenizer_info")
    assert value == {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": None}


def test_the_openapi_document_has_all_routes_and_supported_fields(server):
    _, _, document = call(server.port, "GET", "/openapi.json")
    served = {route.path for route in make_app(server.state).routes}
    assert {*document["paths"]} == served - {"/v1/models/{name:path}"}
    schemas = document["components"]["schemas"]
    for form in (fields.CHAT, fields.COMPLETION):
        schema = schemas[form.model.__name__]
        assert {*schema["properties"]} == {*form.model.model_fields}
        assert schema["additionalProperties"] is False
        assert schema["properties"]["model"]["enum"] == ["m", "", None]


def test_the_parts_of_a_response_do_not_wait_for_the_client():
    with listen("127.0.0.1", 0) as listener, raw(listener.getsockname()[1], b""):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

"""Requests that hypothesis makes up, of fields that there are: each is answered or refused, and
none is a failure of the server."""

from __future__ import annotations

import operator
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssd_jax import LLM
from ssd_jax.server.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE
from tests.checkpoints import tiny_pair
from tests.server import models
from tests.server.http_calls import call
from tests.server.tool_calls import templates
from tests.waiting import eventually

quick = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

words = st.text(max_size=6) | st.sampled_from(["a", "<|eot_id|>", "\u2028", "\0", "é"])
numbers = st.integers(-3, 40) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | words
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)


def object_of(**fields):
    """Objects with some of these fields, whose values are now and then something else."""
    mixed = {name: value | anything for name, value in fields.items()}
    return st.fixed_dictionaries({}, optional=mixed)


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
function = object_of(
    name=st.sampled_from(["f", "g", "a b"]),
    parameters=st.just(SCHEMA),
    strict=st.booleans(),
    arguments=st.sampled_from(["{}", "{", '{"x": 1}']),
    description=words,
)
call_or_tool = object_of(type=st.just("function"), id=words, function=function)
message = object_of(
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=words | st.lists(object_of(type=st.just("text"), text=words), max_size=2),
    tool_calls=st.lists(call_or_tool, max_size=2),
    tool_call_id=words,
    reasoning_content=words,
)
USUAL = {
    "messages": st.lists(message, max_size=3),
    "prompt": words | st.lists(words | st.integers(0, 99), max_size=3),
    "model": st.sampled_from(["tiny", "", "other"]),
    "max_tokens": st.integers(-1, 9),
    "tools": st.lists(call_or_tool, max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required"]) | call_or_tool,
    "response_format": object_of(
        type=st.sampled_from(["text", "json_object", "json_schema"]),
        json_schema=object_of(name=words, schema=st.just(SCHEMA), strict=st.booleans()),
    ),
    "structured_outputs": object_of(json=st.just(SCHEMA), regex=words, choice=st.lists(words)),
    "stream_options": object_of(include_usage=st.booleans()),
    "logit_bias": st.dictionaries(st.integers(-1, 99).map(str), numbers, max_size=3),
    "stop": words | st.lists(words, max_size=3),
    "speculation": st.sampled_from(["off", "sd", "ssd", "auto"]),
    "timeout": st.floats(0.001, 9),
    "chat_template_kwargs": st.dictionaries(words, anything, max_size=2),
    "tokens": st.lists(st.integers(-1, 99), max_size=4),
}
REQUIRED = {
    "/v1/chat/completions": {
        "messages": st.just([{"role": "user", "content": "hi"}]),
        "max_tokens": st.just(2),
    },
    "/v1/completions": {"prompt": st.just("hi")},
    "/tokenize": {},
    "/detokenize": {"tokens": st.just([97])},
}
FORMS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}


def bodies(path):
    """Bodies that often have what is required, and some of the other fields, OpenAI's included."""
    form = FORMS[path]
    names = [*form.model.model_fields, *sorted(form.unsupported)]
    fields = {name: USUAL.get(name, st.booleans() | numbers | words) | anything for name in names}
    few = st.lists(st.sampled_from(names), max_size=5, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen})
    )
    usual = st.fixed_dictionaries(REQUIRED[path])
    return st.builds(operator.or_, usual, few)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A model with a template of tools, which decodes alone."""
    target, _ = tiny_pair.write(tmp_path_factory.mktemp("odd"), "qwen3")
    (Path(target) / "chat_template.jinja").write_text(templates.HERMES)
    settings = {"context": 320, "slots": 4, "dtype": "float32", "compile_cache": "off"}
    with (
        LLM(target, mode="ar", verify="coupled", control_tokens="plain", **settings) as llm,
        models.served(llm) as server,
    ):
        yield server


@pytest.mark.parametrize("path", FORMS)
def test_no_request_is_a_failure_of_the_server(server, path, caplog):
    @quick
    @given(body=bodies(path))
    def check(body):
        status, headers, answer = call(server.port, "POST", path, body)
        assert status in (200, 400, 404, 504), (body, answer)
        assert not caplog.records, body
        if status != 200:
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert answer["error"]["message"]
        elif headers["content-type"].startswith("text/event-stream"):
            assert answer.endswith("data: [DONE]\n\n")

    check()
    eventually(lambda: not server.llm.engine.has_work and server.state.admission.texts == 0)


@pytest.mark.skipif(shutil.which("schemathesis") is None, reason="there is no schemathesis")
def test_schemathesis_finds_no_failure_of_the_server(server, tmp_path):
    checks = "not_a_server_error,response_schema_conformance,negative_data_rejection"
    document = f"http://127.0.0.1:{server.port}/openapi.json"
    command = ["schemathesis", "run", document, "--checks", checks, "--max-examples=8"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout

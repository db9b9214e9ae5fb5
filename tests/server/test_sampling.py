"""Texts through HTTP are those of Python, in every mode, streamed or not."""

import json

import pytest

from ssd_jax import SamplingParams
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_pair
from tests.llm.runs import LETTERS, PROMPTS
from tests.server import models
from tests.server.http_calls import error_of, post, raw, request_text, stream
from tests.waiting import eventually

CASES = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 7},
    "top_p and top_k": {"top_p": 0.9, "top_k": 9, "seed": 2**63 - 1},
    "min_p": {"min_p": 0.05, "seed": 3},
    "penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.5,
    },
    "bias": {"seed": 4, "logit_bias": {str(token): value for token, value in LETTERS.items()}},
    "bad words": {
        "seed": 4,
        "logit_bias": {str(token): value for token, value in LETTERS.items()},
        "bad_words": ["bb", "cdc"],
    },
    "stop strings": {
        "seed": 5,
        "logit_bias": {str(token): value for token, value in LETTERS.items()},
        "stop": ["bbb", "ccc"],
    },
    "stop kept": {
        "seed": 5,
        "logit_bias": {str(token): value for token, value in LETTERS.items()},
        "stop": ["bbb", "ccc"],
        "include_stop_str_in_output": True,
    },
    "stop ids": {
        "seed": 6,
        "logit_bias": {str(token): value for token, value in LETTERS.items()},
        "stop_token_ids": [66, 67],
        "min_tokens": 5,
    },
    "past eos": {"seed": 8, "logit_bias": {str(tiny.EOS): 3.0}, "ignore_eos": True},
    "special tokens": {
        "seed": 8,
        "logit_bias": {str(tiny.EOS): 3.0, str(tiny.PAD): 3.0},
        "min_tokens": 6,
        "skip_special_tokens": False,
    },
}
# Bytes of "é" and of "€", alone or one behind the other: characters across tokens, and broken ones.
SPLIT = {"seed": 9, "logit_bias": {}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pair = tiny_pair.write(tmp_path_factory.mktemp("served"), "qwen3")
    with models.opened(pair) as llm, models.served(llm) as server:
        encode = llm.tokenizer.encode
        SPLIT["logit_bias"] = {str(token): 30.0 for token in {*encode("é€")}}
        yield server


def python_params(fields, **more):
    shared = {name: value for name, value in fields.items() if name not in ("logprobs", "n")}
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 24, **shared, **more})


def seen(choice):
    """What a choice says of its text."""
    return {
        "text": choice["text"],
        "ids": choice["token_ids"],
        "reason": choice["finish_reason"],
        "stop": choice.get("stop_reason"),
        "logprobs": (choice["logprobs"] or {}).get("token_logprobs"),
    }


def python_seen(output):
    return {
        "text": output.text,
        "ids": output.token_ids,
        "reason": output.finish_reason,
        "stop": output.outputs[0].stop_reason,
        "logprobs": [entry.logprob for entry in output.logprobs],
    }


def joined(events):
    """The choices that the events of a stream of completions make."""
    choices = {}
    for event in events:
        for new in event["choices"]:
            choice = choices.setdefault(
                new["index"], {"text": "", "token_ids": [], "logprobs": None, "index": new["index"]}
            )
            choice["text"] += new["text"]
            choice["token_ids"] += new["token_ids"]
            if new["logprobs"]:
                have = choice["logprobs"] or {name: [] for name in new["logprobs"]}
                choice["logprobs"] = {
                    name: have[name] + values for name, values in new["logprobs"].items()
                }
            choice["finish_reason"] = new["finish_reason"]
            choice["stop_reason"] = new.get("stop_reason")
            if "prompt_token_ids" in new:
                choice["prompt_token_ids"] = new["prompt_token_ids"]
    return [choices[index] for index in sorted(choices)]


def body(prompt, fields, **more):
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 24,
        "return_token_ids": True,
        **fields,
        **more,
    }


@pytest.mark.parametrize("speculation", models.MODES)
def test_all_settings_give_pythons_text_ids_and_logprobs_in_one_request_after_another(
    server, speculation
):
    mode, prompts = models.MODES[speculation], PROMPTS[:2]
    for name, fields in {**CASES, "split characters": SPLIT}.items():
        ids = [server.llm.tokenizer.encode(prompt) for prompt in prompts]
        expected = server.llm.generate(ids, python_params(fields, logprobs=1), mode=mode)
        request = body(prompts, fields, logprobs=1, speculation=speculation)
        status, answer = post(server.port, "/v1/completions", request)
        assert status == 200, (name, answer)
        assert [*map(seen, answer["choices"])] == [*map(python_seen, expected)], name
        if name.startswith("stop"):
            assert "stop" in {choice["finish_reason"] for choice in answer["choices"]}, name
        usage = answer["usage"]
        assert usage["completion_tokens"] == sum(len(out.token_ids) for out in expected), name
        assert usage["prompt_tokens"] == sum(map(len, ids)), name


@pytest.mark.parametrize(
    ("fields", "mode", "longest"),
    [
        ({"speculation": "sd", "k": 1}, "sd", 1),
        ({"speculation": "ssd", "k": 2}, "ssd", 2),
        ({"k": 0}, "ar", None),
        ({"k": 3}, "ssd", 3),
    ],
)
def test_a_request_has_the_longest_proposals_that_it_asks_for(server, fields, mode, longest):
    ended = []
    generate = server.llm.run_async

    async def noted(requests, asked_mode, **settings):
        async for event in generate(requests, asked_mode, **settings):
            if event.output is not None:
                ended.append(event.output.metrics)
            yield event

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.llm, "run_async", noted)
        request = body(PROMPTS[:1], {"temperature": 0, "ignore_eos": True}, **fields)
        assert post(server.port, "/v1/completions", request)[0] == 200
    (metrics,) = ended
    positions = metrics["acceptance_by_position"]
    assert (metrics["mode"], positions and len(positions)) == (mode, longest)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": 4}, "k = 4 is out of range; this server proposes 0 to 3 tokens"),
        ({"k": -1}, "k = -1 is out of range; this server proposes 0 to 3 tokens"),
        ({"k": 2, "speculation": "off"}, "k = 2 proposes tokens, and speculation = 'off' none"),
    ],
)
def test_proposals_that_cannot_be_are_refused(server, fields, message):
    status, answer = post(server.port, "/v1/completions", body(PROMPTS[:1], {}, **fields))
    assert (status, answer["error"]["param"]) == (400, "k")
    assert message in answer["error"]["message"]


@pytest.mark.parametrize("speculation", models.MODES)
def test_a_stream_joins_to_the_answer_in_one_piece(server, speculation):
    for name, fields in {**CASES, "split characters": SPLIT}.items():
        request = body(PROMPTS[:2], fields, logprobs=2, speculation=speculation)
        choices = post(server.port, "/v1/completions", request)[1]["choices"]
        options = {"stream_options": {"include_usage": True}}
        *events, last = stream(server.port, "/v1/completions", {**request, **options})
        for choice in choices:
            choice.setdefault("stop_reason", None)
        assert joined(events) == choices, name
        ids = sum(len(choice["token_ids"]) for choice in choices)
        assert last["usage"]["completion_tokens"] == ids, name


def test_stops_are_found_within_blocks_of_accepted_tokens(server):
    stops = {**CASES["stop strings"], "stop": ["cd"]}
    fields = {**stops, "speculation": "ssd", "n": 4}
    choices = post(server.port, "/v1/completions", body("a", fields, logprobs=0))[1]["choices"]
    stopped = [choice for choice in choices if choice["finish_reason"] == "stop"]
    assert stopped
    ids = [server.llm.tokenizer.encode("a")]
    asked = python_params(stops, n=4)
    expected = server.llm.generate(ids, asked, mode="ssd")[0].outputs
    inside = 0
    for choice, output in zip(choices, expected, strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
        spelled = server.llm.tokenizer.decode(choice["token_ids"])
        assert spelled == choice["text"]
        histogram = output.metrics["acceptance_histogram"] or []
        inside += any(histogram[1:]) and choice["finish_reason"] == "stop"
    assert inside


def test_a_character_is_never_split_between_chunks(server):
    events = stream(server.port, "/v1/completions", body("a", SPLIT, speculation="ssd"))
    texts = [choice["text"] for event in events for choice in event["choices"]]
    assert "é" in "".join(texts) or "€" in "".join(texts)
    assert len(events) > 3
    encoded = b"".join(text.encode() for text in texts)
    assert encoded.decode() == "".join(texts)


def test_chats_are_those_of_python_streamed_or_not(server):
    messages = [{"role": "user", "content": "to be <eos> or not to be"}]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, n=2, logprobs=2)
    expected = server.llm.chat(messages, params)[0]
    request = {
        "model": "tiny",
        "messages": messages,
        "temperature": 0.8,
        "seed": 3,
        "max_completion_tokens": 20,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    _, answer = post(server.port, "/v1/chat/completions", request)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [text.text for text in expected.outputs]
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert tiny.EOS not in expected.prompt_token_ids
    streamed, entries = ["", ""], [[], []]
    for event in stream(server.port, "/v1/chat/completions", request):
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["delta"].get("content", "")
        entries[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    assert streamed == texts
    for choice, text, seen_entries in zip(
        answer["choices"], expected.outputs, entries, strict=True
    ):
        content = choice["logprobs"]["content"]
        assert content == seen_entries
        assert [entry["logprob"] for entry in content] == [entry.logprob for entry in text.logprobs]
        spelled = bytes(byte for entry in content for byte in entry["bytes"])
        special = server.llm.tokenizer.decode(text.token_ids)
        assert spelled.decode(errors="replace") == special
        assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)


def test_a_seed_repeats_a_text_in_every_mode_and_without_one_texts_differ(server):
    texts = [
        post(server.port, "/v1/completions", body("a", {"seed": 5}, speculation=speculation))[1]
        for speculation in (*models.MODES, "auto")
    ]
    assert len({answer["choices"][0]["text"] for answer in texts}) == 1
    several = body("a", {}, n=3)
    answers = [post(server.port, "/v1/completions", several)[1]["choices"] for _ in range(2)]
    assert len({choice["text"] for choices in answers for choice in choices}) == 6


def test_control_tokens_in_a_text_are_text(server):
    _, value = post(server.port, "/tokenize", {"prompt": "<eos>"})
    assert value["tokens"] == server.llm.tokenizer.encode("<eos>", split_special_tokens=True)
    assert tiny.EOS not in value["tokens"]
    _, value = post(server.port, "/tokenize", {"messages": [{"role": "user", "content": "<eos>"}]})
    assert tiny.END_OF_TURN in value["tokens"]
    assert tiny.EOS not in value["tokens"]


def test_an_echo_has_the_log_probabilities_of_its_prompt(server):
    prompt = "to be or not"
    ids = server.llm.tokenizer.encode(prompt)
    expected = server.llm.generate(
        [ids], SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, prompt_logprobs=1)
    )[0]
    fields = {"temperature": 0.0, "max_tokens": 1, "logprobs": 1, "echo": True}
    for asked in (prompt, [ids]):
        _, answer = post(server.port, "/v1/completions", body(asked, fields))
        (choice,) = answer["choices"]
        assert choice["text"] == prompt + expected.text
        logprobs = choice["logprobs"]
        entries = [*expected.prompt_logprobs, *expected.logprobs]
        values = [entry and entry.logprob for entry in entries]
        assert logprobs["token_logprobs"] == values
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["tokens"][:3] == ["t", "o", " "]
        assert logprobs["text_offset"] == [*range(len(ids) + 1)]
        # What an evaluation by log-likelihood reads: the value of a token and the likeliest.
        for token, value, top in list(
            zip(logprobs["tokens"], values, logprobs["top_logprobs"], strict=True)
        )[1:]:
            assert top[token] == pytest.approx(value)
            assert len(top) in (1, 2)
        streamed = joined(stream(server.port, "/v1/completions", body(asked, fields)))
        assert streamed[0]["logprobs"] == logprobs
        assert streamed[0]["text"] == choice["text"]


def test_a_prompt_alone_may_come_back_with_its_log_probabilities(server):
    fields = {"max_tokens": 0, "logprobs": 0, "echo": True}
    _, answer = post(server.port, "/v1/completions", body("abc", fields))
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"]) == ("abc", [])
    assert len(choice["logprobs"]["tokens"]) == 3


def test_bad_ids_and_long_prompts_are_refused_with_their_field(server):
    for fields, param in (
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "a" * 400}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
    ):
        status, error = error_of(server.port, "/v1/completions", {**body("a", {}), **fields})
        assert (status, error["param"]) == (400, param), error
    for messages in ([], [{"role": "user"}], [{"role": "nobody", "content": "a"}], [{"a": {}}]):
        request = {"model": "tiny", "messages": messages}
        status, error = error_of(server.port, "/v1/chat/completions", request)
        assert (status, error["param"]) == (400, "messages"), error
    deep = json.loads("[" * 300 + "]" * 300)
    request = {"model": "tiny", "messages": [{"role": "user", "content": deep}]}
    assert error_of(server.port, "/v1/chat/completions", request)[0] == 400


@pytest.mark.parametrize("speculation", models.MODES)
def test_a_response_says_how_it_was_speculated(server, speculation):
    asked = body("a", {"temperature": 0.0, "ignore_eos": True}, speculation=speculation)
    _, answer = post(server.port, "/v1/completions", asked)
    metrics = answer["metrics"]
    assert metrics["mode"] == models.MODES[speculation]
    assert metrics["speculating"] == (speculation != "off")
    statistics = metrics["speculative_decoding"]
    if speculation == "off":
        assert statistics is None
        assert metrics["reason"] == "the request was decoded in mode ar, without a draft"
        return
    # The first token is the prompt's; a round gives one more than it accepts, but at the end.
    given = statistics["num_accepted_draft_tokens"] + statistics["num_spec_steps"]
    assert 22 <= given <= 24
    assert statistics["num_draft_tokens"] >= statistics["num_accepted_draft_tokens"]
    assert (metrics["hit_rate"] is None) == (speculation == "sd")
    *_, last = stream(
        server.port, "/v1/completions", {**asked, "stream_options": {"include_usage": True}}
    )
    assert last["metrics"] == metrics


def test_a_time_out_gives_the_slot_back(server):
    asked = body("a", {"ignore_eos": True, "timeout": 0.01}, max_tokens=300)
    status, error = error_of(server.port, "/v1/completions", asked)
    assert (status, error["code"]) == (504, "timeout")
    eventually(lambda: not server.llm.engine.has_work and server.state.admission.texts == 0)


def test_a_client_that_leaves_gives_its_slot_back(server):
    asked = body("a", {"ignore_eos": True, "stream": True}, max_tokens=300)
    engine = server.llm.engine
    with raw(server.port, request_text(asked)) as connection:
        assert b"200 OK" in connection.recv(4096)
    eventually(lambda: not engine.has_work and server.state.admission.texts == 0)

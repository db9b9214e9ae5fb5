"""What Prometheus reads."""

from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ssd_jax.engine.rounds.monitor import RoundCounts, TargetSpan
from ssd_jax.server.activity import EngineActivity
from tests.server.http_calls import call, post, raw, request_text, stream
from tests.server.scripted import ScriptedEngine, served
from tests.waiting import eventually

COMPLETION = {"model": "m", "prompt": "hi", "max_tokens": 3}


def samples(server):
    """Values by name and labels besides the model's."""
    _, headers, text = call(server.port, "GET", "/metrics")
    assert headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            found[(sample.name, *labels.values())] = sample.value
    return found


def test_requests_tokens_and_refusals_are_counted():
    with served(ScriptedEngine()) as server:
        post(server.port, "/v1/completions", COMPLETION)
        stream(server.port, "/v1/completions", COMPLETION)
        post(server.port, "/v1/completions", {})
        values = samples(server)
    assert values["vllm:prompt_tokens_total",] == 4
    assert values["vllm:generation_tokens_total",] == 6
    assert values["vllm:request_success_total", "length"] == 2
    assert values["vllm:num_requests_running",] == values["vllm:num_requests_waiting",] == 0
    assert values["ssd_jax:refused_total", "400"] == 1
    for name, count in (
        ("time_to_first_token_seconds", 2),
        ("inter_token_latency_seconds", 4),
        ("request_time_per_output_token_seconds", 2),
        ("e2e_request_latency_seconds", 2),
    ):
        assert values[f"vllm:{name}_count",] == count, name
    assert values["vllm:prefix_cache_queries_total",] == 0
    assert values["vllm:num_preemptions_total",] == 0
    assert values["ssd_jax:speculating", "ar"] == 0


def test_tokens_of_a_stream_come_at_once_and_others_together():
    engine = ScriptedEngine()
    with served(engine) as server:
        post(server.port, "/v1/completions", COMPLETION)
        stream(server.port, "/v1/completions", COMPLETION)
    together, at_once = engine.intervals
    assert together > at_once == 0


def test_a_text_that_is_cancelled_is_aborted():
    engine = ScriptedEngine()
    engine.held = True
    with served(engine) as server:
        with raw(server.port, request_text({**COMPLETION, "n": 2})):
            eventually(lambda: engine.running == 2)
            assert samples(server)["vllm:num_requests_running",] == 2
        eventually(lambda: samples(server).get(("vllm:request_success_total", "abort")) == 2)


def test_what_the_engines_did_has_vllms_names():
    engine = ScriptedEngine()
    engine.seen = EngineActivity(
        mode="auto",
        counts=RoundCounts(
            rounds=Counter({"ssd": 5, "ar": 2}),
            batches=Counter({4: 7}),
            drafts=5,
            draft_tokens=20,
            accepted=8,
            accepted_at=Counter({0: 5, 1: 3}),
            hits=3,
            misses=Counter({"late": 1, "miss": 1}),
            draft_seconds=4.0,
            hidden_seconds=3.0,
        ),
        running=1,
        used_pages=3,
        pages=12,
        target=[
            TargetSpan(
                0, 1, rows=2, tokens=6, proposed=8, accepted=4, hits=1, lookups=2, mode="ssd"
            )
        ],
    )
    with served(engine) as server:
        values = samples(server)
    assert values["vllm:spec_decode_num_drafts_total",] == 5
    assert values["vllm:spec_decode_num_draft_tokens_total",] == 20
    assert values["vllm:spec_decode_num_accepted_tokens_total",] == 8
    assert values["vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"] == 5
    assert values["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 3
    assert values["vllm:kv_cache_usage_perc",] == pytest.approx(0.25)
    assert values["ssd_jax:cache_hits_total",] == 3
    assert values["ssd_jax:fallbacks_total", "late"] == 1
    assert values["ssd_jax:rounds_total", "ar"] == 2
    assert values["ssd_jax:rounds_total", "ssd"] == 5
    assert values["ssd_jax:batches_total", "4"] == 7
    assert values["ssd_jax:hit_rate",] == 0.5
    assert values["ssd_jax:acceptance_length",] == 3
    assert values["ssd_jax:hidden_draft_share",] == 0.75
    assert values["ssd_jax:speculating", "ssd"] == 1

"""What Prometheus reads at `/metrics`; names are vLLM's where it has one."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ssd_jax.engine.request import TokenEvent
from ssd_jax.engine.request_metrics import RequestMetrics
from ssd_jax.server.admission import Admission

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 40.96)


class Metrics:
    """Counters of one server."""

    def __init__(self, admission: Admission, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        running = self._gauge("vllm:num_requests_running", "texts in slots")
        running.labels(model).set_function(lambda: admission.running)
        waiting = self._gauge("vllm:num_requests_waiting", "texts that wait for a slot")
        waiting.labels(model).set_function(lambda: admission.waiting)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "tokens of prompts")
        self._tokens = self._counter("vllm:generation_tokens", "tokens generated")
        self._ended = self._counter(
            "vllm:request_success", "texts that have ended, by reason", "finished_reason"
        )
        self._first = self._histogram("vllm:time_to_first_token_seconds", "until the first token")
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "until the last token")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "proposals that were verified")
        self._accepted = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "proposed tokens that were accepted"
        )
        self._accepted_at = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "proposed tokens that were accepted, by place in the proposal",
            "position",
        )
        self._refused = self._counter("ssd_jax:refused", "requests refused, by status", "status")

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, ["model_name"], registry=self._registry, buckets=_SECONDS)

    def note_tokens(self, event: TokenEvent, started: float) -> None:
        """Counts new tokens of a text of a request that came at `started`."""
        self._tokens.labels(self._model).inc(len(event.token_ids))
        output = event.output
        if output is None:
            return
        now = time.monotonic()
        self._whole.labels(self._model).observe(now - started)
        self._prompt_tokens.labels(self._model).inc(len(output.prompt_token_ids))
        self._ended.labels(self._model, output.finish_reason).inc()
        if output.metrics["ttft_ms"] is not None:
            self._first.labels(self._model).observe(output.metrics["ttft_ms"] / 1000)
        self._note_speculation(output.metrics)

    def _note_speculation(self, metrics: RequestMetrics) -> None:
        places = metrics["acceptance_by_position"] or []
        if not places:
            return
        self._drafts.labels(self._model).inc(places[0][1])
        for position, (accepted, _) in enumerate(places):
            self._accepted.labels(self._model).inc(accepted)
            self._accepted_at.labels(self._model, position).inc(accepted)

    def note_refusal(self, status: int) -> None:
        """Counts a request that was not answered."""
        self._refused.labels(self._model, status).inc()

    def page(self) -> bytes:
        """The counters as text."""
        return generate_latest(self._registry)

"""What Prometheus reads at `/metrics`; names are vLLM's where it has one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from ssd_jax.engine.request import TokenEvent
from ssd_jax.server.activity import EngineActivity
from ssd_jax.server.admission import Admission

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 40.96)


class Metrics:
    """Counters of one server.

    Args:
      model: the label of all of them.
      activity: gives what the engines do.
    """

    def __init__(
        self, admission: Admission, model: str, activity: Callable[[], EngineActivity]
    ) -> None:
        self._registry, self._model = CollectorRegistry(), model
        self._registry.register(_Engines(admission, model, activity))
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "tokens of prompts")
        self._tokens = self._counter("vllm:generation_tokens", "tokens generated")
        self._queries = self._counter(
            "vllm:prefix_cache_queries", "tokens of prompts that were looked for in kept pages"
        )
        self._cached = self._counter("vllm:prefix_cache_hits", "those of them that were found")
        self._preemptions = self._counter("vllm:num_preemptions", "texts preempted for pages")
        self._ended = self._counter(
            "vllm:request_success", "texts that have ended, by reason", "finished_reason"
        )
        self._first = self._histogram("vllm:time_to_first_token_seconds", "until the first token")
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds", "between arrivals of a text's tokens, 1 or more"
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "mean time a token, without the first"
        )
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", "until the last token")
        self._verify_idle = Summary(
            "ssd_jax:verify_idle_seconds",
            "medians of texts: a verification while the draft was idle",
            ["model_name"],
            registry=self._registry,
        )
        self._refused = self._counter("ssd_jax:refused", "requests refused, by status", "status")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(name, text, ["model_name", *labels], registry=self._registry)
        if not labels:
            counter.labels(self._model)  # there from the start
        return counter

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, ["model_name"], registry=self._registry, buckets=_SECONDS)

    def meter(self) -> Meter:
        """What counts the tokens of a request that comes now."""
        return Meter(self)

    def note_output(self, event: TokenEvent) -> None:
        """Counts a text that has ended."""
        output, model = event.output, self._model
        if output is None:
            return
        metrics, size = output.metrics, len(output.prompt_token_ids)
        self._prompt_tokens.labels(model).inc(size)
        self._ended.labels(model, output.finish_reason).inc()
        self._preemptions.labels(model).inc(metrics["preemptions"] or 0)
        if metrics["cached_tokens"] is not None:
            self._queries.labels(model).inc(size)
            self._cached.labels(model).inc(metrics["cached_tokens"])
        if metrics["verify_idle_ms"] is not None:
            self._verify_idle.labels(model).observe(metrics["verify_idle_ms"] / 1000)

    def note_tokens(self, event: TokenEvent, seconds: float, *, first: bool) -> None:
        """Counts new tokens of a text.

        Args:
          seconds: since the request came, or since its tokens before.
        """
        self._tokens.labels(self._model).inc(len(event.token_ids))
        (self._first if first else self._between).labels(self._model).observe(seconds)

    def note_times(self, seconds: float, a_token: float | None) -> None:
        """Counts how long a text took, and each of its tokens behind the first."""
        self._latency.labels(self._model).observe(seconds)
        if a_token is not None:
            self._per_token.labels(self._model).observe(a_token)

    def note_aborted(self) -> None:
        """Counts a text that was cancelled."""
        self._ended.labels(self._model, "abort").inc()

    def note_refusal(self, status: int) -> None:
        """Counts a request that was not answered."""
        self._refused.labels(self._model, status).inc()

    def page(self) -> bytes:
        """The counters as text."""
        return generate_latest(self._registry)


class Meter:
    """Counts the tokens of one request.

    Attributes:
      tokens: number of tokens that came, of all texts.
      first_token: seconds until the first of them; None before.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._began = metrics, time.monotonic()
        self._times: dict[int, tuple[float, float, int]] = {}  # first, last, number, by text
        self.tokens = 0
        self.first_token: float | None = None

    def note(self, event: TokenEvent) -> None:
        """Counts an event."""
        now, number = event.time, len(event.token_ids)
        first, last, before = self._times.get(event.request_id, (now, self._began, 0))
        if number:
            self._metrics.note_tokens(event, now - last, first=not before)
            self._times[event.request_id] = first, now, before + number
            self.tokens += number
            if self.first_token is None:
                self.first_token = now - self._began
        if event.output is not None:
            self._metrics.note_output(event)
            count = before + number
            a_token = (now - first) / (count - 1) if count > 1 else None
            self._metrics.note_times(now - self._began, a_token)

    def note_aborted(self) -> None:
        """Counts a text that was cancelled."""
        self._metrics.note_aborted()


class _Engines(Collector):
    """Reads the engines when Prometheus asks."""

    def __init__(
        self, admission: Admission, model: str, activity: Callable[[], EngineActivity]
    ) -> None:
        self._admission, self._model, self._activity = admission, model, activity

    @override
    def collect(self) -> Iterator[Metric]:
        activity = self._activity()
        counts, waiting = activity.counts, max(self._admission.texts - activity.running, 0)
        yield self._gauge("vllm:num_requests_running", "texts in slots", activity.running)
        yield self._gauge("vllm:num_requests_waiting", "texts that wait for a slot", waiting)
        if activity.pages:
            used = activity.used_pages / activity.pages
            yield self._gauge("vllm:kv_cache_usage_perc", "pages in use, 1 is all", used)
        for name, text, number in (
            ("num_drafts", "proposals that were verified", counts.drafts),
            ("num_draft_tokens", "proposed tokens that were verified", counts.draft_tokens),
            ("num_accepted_tokens", "proposed tokens that were accepted", counts.accepted),
        ):
            yield self._counter(f"vllm:spec_decode_{name}", text, number)
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "proposed tokens that were accepted, by place in the proposal",
            labels=["model_name", "position"],
        )
        for position, number in sorted(counts.accepted_at.items()):
            places.add_metric([self._model, str(position)], number)
        yield places
        yield from self._ours(activity)

    def _ours(self, activity: EngineActivity) -> Iterator[Metric]:
        counts = activity.counts
        rounds = CounterMetricFamily(
            "ssd_jax:rounds",
            "forwards of the target, by mode: ar are those without the draft",
            labels=["model_name", "mode"],
        )
        for mode, number in sorted(counts.rounds.items()):
            rounds.add_metric([self._model, mode], number)
        yield rounds
        batches = CounterMetricFamily(
            "ssd_jax:batches",
            "forwards of the target, by the number of slots that they ran",
            labels=["model_name", "slots"],
        )
        for slots, number in sorted(counts.batches.items()):
            batches.add_metric([self._model, str(slots)], number)
        yield batches
        yield self._counter("ssd_jax:cache_hits", "look-ups that found a branch", counts.hits)
        causes = CounterMetricFamily(
            "ssd_jax:fallbacks",
            "look-ups that found no branch, by cause",
            labels=["model_name", "cause"],
        )
        for cause, number in sorted(counts.misses.items()):
            causes.add_metric([self._model, cause], number)
        yield causes
        yield self._counter("ssd_jax:draft_seconds", "work of the draft", counts.draft_seconds)
        yield self._counter(
            "ssd_jax:draft_hidden_seconds", "of it beside the target", counts.hidden_seconds
        )
        for name, text, value in (
            ("hit_rate", "hits of look-ups in the last rounds", activity.hit_rate),
            ("acceptance_length", "tokens a text and round, lately", activity.acceptance_length),
            ("hidden_draft_share", "draft work beside the target", activity.hidden_draft_share),
        ):
            if value is not None:
                yield self._gauge(f"ssd_jax:{name}", text, value)
        speculating = GaugeMetricFamily(
            "ssd_jax:speculating",
            "whether the last rounds verified a draft's tokens, and the mode that ran",
            labels=["model_name", "mode"],
        )
        value = float(activity.why_not_speculating is None)
        speculating.add_metric([self._model, activity.ran or activity.mode or ""], value)
        yield speculating

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

"""What Prometheus is told: counters and histograms as things happen, gauges when it asks.

Times are seconds. The names and what they mean are the table in docs/operating.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from errors import RequestError, Unavailable
from model import Cost, Generated

PREFIX = "onequeue_"
CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
INPUTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
SHARES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
REASONS = ("queue_full", "loading", "recovering", "draining", "dead")
RELOADS = ("done", "failed")
GAUGES: Mapping[str, str] = {
    "queue_size": "Inputs that wait for the model.",
    "in_flight": "Admitted requests that have no answer yet.",
    "ready": "1 while requests are admitted.",
    "max_batch_size": "Inputs that a batch may have now; fewer after running out of memory.",
    "reloading": "1 while another model is loaded.",
    "running": "Prompts that are generated for.",
    "cache_used_tokens": "Tokens whose keys and values are kept.",
    "cache_tokens": "Tokens for which there is room.",
    "gpu_memory_allocated_bytes": "In use by tensors.",
    "gpu_memory_reserved_bytes": "Held by the allocator.",
    "gpu_memory_fragmentation_ratio": "Of the reserved memory, the share that is not allocated.",
}

# Else each has a series more, that nobody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._outcomes: dict[tuple[int, str], Counter] = {}
        self._requests = self._counter(
            "requests", "Inference requests that have ended.", ("code", "outcome")
        )
        self._rejected = self._counter("rejected", "Requests that were not admitted.", ("reason",))
        self.batch_retries = self._counter("batch_retries", "Batches halved after a failure.")
        self.out_of_memory = self._counter("out_of_memory", "Calls that ran out of memory.")
        self.reloads = self._counter("reloads", "Models loaded in place of another.", ("outcome",))
        for reason in REASONS:
            self._rejected.labels(reason)
        for outcome in RELOADS:
            self.reloads.labels(outcome)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts answered.")
        self._new_tokens = self._counter("generated_tokens", "Tokens generated for whole answers.")
        self._request_duration = self._seconds(
            "request", "From head of request to last byte sent; not of rejected."
        )
        self.queue_duration = self._seconds("queue", "From admission until a batch took the input.")
        self._prepare_duration = self._seconds("prepare", "Tokenising a batch.")
        self._inference_duration = self._seconds("inference", "A forward pass.")
        self._finish_duration = self._seconds("finish", "Writing the answers of a batch.")
        self._first_token = self._seconds(
            "time_to_first_token", "From admission to first token.", ""
        )
        self._next_token = self._seconds("time_per_output_token", "From one token to the next.", "")
        self._batch_size = self._histogram("batch_size", "Inputs in a forward pass.", INPUTS)
        self._batch_tokens = self._histogram("batch_tokens", "Tokens in a forward pass.", TOKENS)
        self._padding = self._histogram("padding_ratio", "Of a pass, the share of padding.", SHARES)

    def watch(
        self, readings: Callable[[], Mapping[str, float]], model: Callable[[], Mapping[str, str]]
    ) -> None:
        """Have gauges read whenever metrics are asked for.

        Args:
            readings: Returns values by name; those of GAUGES are shown.
            model: Returns facts of the model.
        """
        self._registry.register(_Gauges(readings, model))

    def written(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def count_request(self, code: int, error: RequestError | None, seconds: float) -> None:
        """Count an inference request that has ended.

        Args:
            code: HTTP status of its answer.
            error: Why it has no answer; None: it has, or the status tells.
            seconds: From its head to the last byte of its answer.
        """
        outcome = outcome_of(code, error)
        self._ended(code, outcome).inc()
        if outcome != "rejected":  # in no time, which would make an overload look fast
            self._request_duration.observe(seconds)
        if isinstance(error, Unavailable):
            self._rejected.labels(error.reason).inc()

    def expect(self, code: int, outcome: str) -> None:
        """Show how often requests end so before the first one does; else its count is lost."""
        self._ended(code, outcome)

    def count_call(self, cost: Cost) -> None:
        """Count a call of the model."""
        if cost.prepare_s:
            self._prepare_duration.observe(cost.prepare_s)
        if cost.inputs:
            self._inference_duration.observe(cost.forward_s)
            self._finish_duration.observe(cost.finish_s)
            self._batch_size.observe(cost.inputs)
            self._batch_tokens.observe(cost.tokens)
            if cost.computed_tokens:
                self._padding.observe(1 - cost.tokens / cost.computed_tokens)

    def count_generated(self, answer: Generated, queue_s: float) -> None:
        """Count a whole answer of a generating model, to a prompt that waited for `queue_s`."""
        self._prompt_tokens.inc(answer.prompt_tokens)
        self._new_tokens.inc(answer.new_tokens)
        self._first_token.observe(queue_s + answer.first_token_ms / 1000)
        if answer.new_tokens > 1:
            self._next_token.observe(answer.next_token_ms / 1000)

    def _ended(self, code: int, outcome: str) -> Counter:
        counter = self._outcomes.get((code, outcome))
        if counter is None:
            counter = self._outcomes[code, outcome] = self._requests.labels(code, outcome)
        return counter

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(PREFIX + name, text, tuple(labels), registry=self._registry)

    def _seconds(self, name: str, text: str, suffix: str = "_duration") -> Histogram:
        return self._histogram(f"{name}{suffix}_seconds", text, SECONDS)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=tuple(buckets), registry=self._registry)


class _Gauges(Collector):
    def __init__(
        self, readings: Callable[[], Mapping[str, float]], model: Callable[[], Mapping[str, str]]
    ) -> None:
        self._readings = readings
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """Read the gauges."""
        readings = self._readings()
        for name, text in GAUGES.items():
            if name in readings:
                yield GaugeMetricFamily(PREFIX + name, text, value=readings[name])
        yield InfoMetricFamily(
            PREFIX + "model", "The model that answers.", value=dict(self._model())
        )

    def describe(self) -> Iterable[Metric]:
        """Return nothing: to be registered is not to be read."""
        return ()


def outcome_of(code: int, error: RequestError | None) -> str:
    """Return how a request ended: ok, rejected, expired, cancelled, invalid or failed."""
    if error is not None:
        return error.outcome
    return "ok" if code < 400 else "invalid" if code < 500 else "failed"

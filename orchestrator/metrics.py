"""Prometheus metrics under vLLM's names and with its buckets, so that its dashboards work.

Counted from the events that go to clients, whatever protocol they use; what stands still is looked up when somebody
asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from orchestrator.core.requests import Request
from orchestrator.outputs import Event, Finished, Piece
from orchestrator.usage import Usage
from pilotfish.errors import DeadlineExceededError, PilotfishError

_LABELS = ("model_name", "engine")
_ENGINE = "0"  # there is one; vLLM counts data-parallel ones

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_SAMPLES = (1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True, slots=True)
class Load:
    """How things stand.

    Attributes:
        running: requests in the batch.
        waiting: requests in the queue.
        kv_usage: part of the target's pages that running requests hold, in [0, 1].
        target_ready: whether the target answers.
        draft_replicas: that answer.
    """

    running: int
    waiting: int
    kv_usage: float
    target_ready: bool
    draft_replicas: int


class Metrics:
    """Counts what is served.

    Args:
        model: name of the model served.
        load: how things stand now.
    """

    def __init__(self, model: str, load: Callable[[], Load]) -> None:
        self._labels = (model, _ENGINE)
        self._registry = CollectorRegistry()
        self._registry.register(_Gauges(self._labels, load))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens that went to clients.")
        self._cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = self._counter("num_preemptions", "Times that requests lost their pages to others.")
        self._ended = Counter(
            "vllm:request_success", "Requests that ended, by how.", (*_LABELS, "finished_reason"),
            registry=self._registry,
        )  # fmt: skip
        self._drafts = self._counter("spec_decode_num_drafts", "Proposals judged.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens judged.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens kept.")
        self._accepted_per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens kept, by their place in the proposal.",
            (*_LABELS, "position"), registry=self._registry,
        )  # fmt: skip
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between the rounds of a request, which may bring several tokens.",
            _BETWEEN_TOKENS_S,
        )  # fmt: skip
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after its first.",
            _BETWEEN_TOKENS_S,
        )  # fmt: skip
        self._total = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_S)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to being scheduled.", _REQUEST_S)
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._completion_size = self._histogram("request_generation_tokens", "Tokens made for a request.", _TOKENS)
        self._n = self._histogram("request_params_n", "Samples that a request asks for.", _SAMPLES)
        self._max_tokens = self._histogram("request_params_max_tokens", "Most tokens that a request asks for.", _TOKENS)

    def watch(self) -> Watch:
        """For the events of one request."""
        return Watch(self)

    def add_request(self, samples: int, max_tokens: int) -> None:
        """Counts a request that was taken."""
        self._n.observe(samples)
        self._max_tokens.observe(max_tokens)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics as text, and its media type.

        Args:
            accept: header of the one who asks.
        """
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def add_piece(self, piece: Piece, since_last_s: float | None) -> None:
        """Counts what a round added to a sample.

        Args:
            piece: the tokens.
            since_last_s: seconds since the piece before; None for the first.
        """
        self._generation_tokens.inc(len(piece.token_ids))
        if since_last_s is not None:
            self._between.observe(since_last_s)
        if piece.drafted:
            self._drafts.inc()
            self._draft_tokens.inc(piece.drafted)
            self._accepted.inc(piece.accepted)
            for position in range(piece.accepted):
                self._accepted_per_position.labels(*self._labels, str(position)).inc()

    def add_finished(self, reason: str, usage: Usage) -> None:
        """Counts a sample that ended well."""
        self.add_end(reason)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cache_queries.inc(usage.prompt_tokens)
        self._cache_hits.inc(usage.cached_tokens)
        self._preemptions.inc(usage.preemptions)
        if usage.completion_tokens:
            self._first_token.observe(usage.first_token_us / 1e6)
        self._queue.observe(usage.queue_us / 1e6)
        self._total.observe(usage.total_us / 1e6)
        self._prompt_size.observe(usage.prompt_tokens)
        self._completion_size.observe(usage.completion_tokens)
        if usage.completion_tokens > 1:
            decoding_s = (usage.total_us - usage.first_token_us) / 1e6
            self._per_token.observe(decoding_s / (usage.completion_tokens - 1))

    def add_end(self, reason: str) -> None:
        """Counts a sample that ended: stop, length, abort (its client left, or its time was over) or error."""
        self._ended.labels(*self._labels, reason).inc()

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"vllm:{name}", what, _LABELS, registry=self._registry).labels(*self._labels)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", what, _LABELS, registry=self._registry, buckets=buckets)
        return histogram.labels(*self._labels)


class Watch:
    """Counts the events of one request with all its samples.

    Args:
        metrics: where to.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._running = 0
        self._last_at: dict[int, float] = {}  # of each sample's newest piece, time.perf_counter seconds

    def began(self, requests: Sequence[Request]) -> None:
        """The request was taken."""
        self._running = len(requests)
        self._metrics.add_request(len(requests), requests[0].params.max_tokens)

    def saw(self, event: Event | PilotfishError) -> None:
        """Counts an event as it is made."""
        if isinstance(event, Piece):
            now = time.perf_counter()
            last_at, self._last_at[event.index] = self._last_at.get(event.index), now
            self._metrics.add_piece(event, None if last_at is None else now - last_at)
        elif isinstance(event, Finished):
            self._running -= 1
            self._metrics.add_finished(event.reason.name.lower(), event.usage)
        elif isinstance(event, PilotfishError):
            self._running -= 1
            self._metrics.add_end("abort" if isinstance(event, DeadlineExceededError) else "error")

    def closed(self) -> None:
        """Nobody waits any more for what has not ended."""
        for _ in range(self._running):
            self._metrics.add_end("abort")
        self._running = 0


class _Gauges(Collector):
    """What stands still, looked up when it is asked for."""

    def __init__(self, labels: tuple[str, ...], load: Callable[[], Load]) -> None:
        self._labels, self._load = labels, load

    def collect(self) -> Iterator[Metric]:
        """One value of each."""
        load = self._load()
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", load.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Part of the pages that are held; 1 is all.", load.kv_usage)
        yield self._gauge("pilotfish:target_ready", "Whether the target answers.", load.target_ready)
        yield self._gauge("pilotfish:draft_replicas", "Draft replicas that answer.", load.draft_replicas)

    def describe(self) -> list[Metric]:
        """Nothing: so that registering asks for no values."""
        return []

    def _gauge(self, name: str, what: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, what, labels=_LABELS)
        family.add_metric(self._labels, float(value))
        return family

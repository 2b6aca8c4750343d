"""What the bridge counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300, 1800)


class Metrics:
    """Counters and gauges under the prefix `bridge_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("bridge_requests", "Answered requests", ["route", "status"], registry=self.registry)
        self._seconds = Histogram(
            "bridge_request_seconds", "Request received to answer complete", buckets=_SECONDS, registry=self.registry
        )
        self._queue_seconds = Histogram(
            "bridge_queue_seconds", "Request received to handed to a replica", buckets=_SECONDS, registry=self.registry
        )
        self._retries = Counter(
            "bridge_retries", "Requests started again, by reason", ["reason"], registry=self.registry
        )
        self._tokens = Counter("bridge_captured_tokens", "Sampled tokens captured", registry=self.registry)
        self._forks = Counter(
            "bridge_forks", "Sequences that do not continue their session", ["reason"], registry=self.registry
        )
        self._updates = Counter("bridge_weight_updates", "Weight updates done", registry=self.registry)
        self._update_seconds = Histogram(
            "bridge_weight_update_seconds", "Stage to served", buckets=_SECONDS, registry=self.registry
        )
        self._gauges = {
            name: Gauge(f"bridge_{name}", text, registry=self.registry)
            for name, text in {
                "policy_version": "Policy version that is served",
                "in_flight": "Requests inside an engine",
                "queued": "Requests that wait for a replica",
                "replicas_serving": "Replicas that serve",
                "replica_restarts": "Replicas brought up again",
                "captured_calls": "Captured calls that wait for pick-up",
                "dropped_calls": "Captured calls dropped because nobody picked them up",
            }.items()
        }
        # Looking up a label takes longer than counting.
        self._by_labels: dict[tuple[str, int], Counter] = {}

    def answered(self, route: str, status: int, seconds: float) -> None:
        counter = self._by_labels.get((route, status))
        if counter is None:
            counter = self._by_labels[route, status] = self._requests.labels(route, str(status))
        counter.inc()
        self._seconds.observe(seconds)

    def waited(self, seconds: float) -> None:
        self._queue_seconds.observe(seconds)

    def retried(self, reason: str) -> None:
        self._retries.labels(reason).inc()

    def captured(self, tokens: int) -> None:
        self._tokens.inc(tokens)

    def forked(self, reason: str) -> None:
        self._forks.labels(reason.split(":")[0]).inc()

    def updated(self, version: int, seconds: float) -> None:
        self._updates.inc()
        self._update_seconds.observe(seconds)

    def text(self, **gauges: float) -> bytes:
        for name, value in gauges.items():
            self._gauges[name].set(value)
        return generate_latest(self.registry)

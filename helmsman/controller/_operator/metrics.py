"""Prometheus metrics of a run, by a process of their own, so that a scrape costs the script little.

Each scrape takes one snapshot. Names follow the Prometheus conventions: base units, `_total` for
counters.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from helmsman.api.extras import needed_by
from helmsman.api.run_state import RunSnapshot

METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "helmsman_up": ("1 if the run's script answers.", ()),
    "helmsman_uptime_seconds": ("Seconds since the run began.", ()),
    "helmsman_workers": ("Workers by state.", ("role", "state")),
    "helmsman_worker_restarts_total": ("Restarts of workers.", ("role",)),
    "helmsman_worker_resident_bytes": ("Resident memory of a worker.", ("worker",)),
    "helmsman_worker_cpu_seconds_total": ("CPU time of a worker.", ("worker",)),
    "helmsman_calls_in_flight": ("Unanswered calls.", ("role", "method")),
    "helmsman_calls_total": ("Calls with an outcome.", ("role", "method")),
    "helmsman_call_median_seconds": ("Median duration of recent calls.", ("role", "method")),
    "helmsman_oldest_call_seconds": ("Age of the oldest unanswered call.", ("role", "method")),
    "helmsman_phase_seconds": ("Age of an open phase.", ("phase",)),
    "helmsman_requests_queued": ("Queued generation requests.", ("role",)),
    "helmsman_requests_in_flight": ("Generation requests at instances.", ("role",)),
    "helmsman_requests_total": ("Completed generation requests.", ("role",)),
    "helmsman_request_median_seconds": ("Median duration of recent requests.", ("role",)),
    "helmsman_generated_tokens_total": ("Tokens of completed requests.", ("role",)),
    "helmsman_weight_version": ("Weight version that the instances serve.", ("role",)),
    "helmsman_instances": ("Rollout instances by health.", ("role", "health")),
}
"""Metric -> description and labels."""

Sample = tuple[str, tuple[str, ...], float]
"""Metric, values of its labels, value."""


def samples(run: RunSnapshot) -> Iterator[Sample]:
    """Yield the samples of a snapshot.

    Args:
        run: The snapshot.
    """
    yield "helmsman_up", (), float(run.answered_by == "script")
    yield "helmsman_uptime_seconds", (), run.taken_at - run.started_at
    counts = collections.Counter((each.role, each.state) for each in run.workers)
    yield from (("helmsman_workers", labels, float(n)) for labels, n in counts.items())
    restarts = collections.Counter[str]()
    for worker in run.workers:
        restarts[worker.role] += worker.num_restarts
        if worker.health is not None:
            id_ = (worker.worker_id,)
            yield "helmsman_worker_resident_bytes", id_, float(worker.health.rss_bytes)
            yield "helmsman_worker_cpu_seconds_total", id_, worker.health.cpu_s
    yield from (("helmsman_worker_restarts_total", (r,), float(n)) for r, n in restarts.items())
    ages: dict[tuple[str, str], list[float]] = {}
    for worker in run.workers:
        for call in worker.calls:
            key = (worker.role, call.name.rpartition(".")[2])
            ages.setdefault(key, []).append(call.age_s)
    for key, found in ages.items():
        yield "helmsman_calls_in_flight", key, float(len(found))
        yield "helmsman_oldest_call_seconds", key, max(found)
    for usual in run.durations:
        key = (usual.role, usual.method)
        yield "helmsman_calls_total", key, float(usual.num_calls)
        yield "helmsman_call_median_seconds", key, usual.median_s
    for phase in run.phases:
        yield "helmsman_phase_seconds", (phase.kind,), phase.age_s
    for rollout in run.rollouts:
        role = (rollout.role,)
        yield "helmsman_requests_queued", role, float(rollout.num_queued)
        yield "helmsman_requests_in_flight", role, float(rollout.num_in_flight)
        yield "helmsman_requests_total", role, float(rollout.num_done)
        yield "helmsman_generated_tokens_total", role, float(rollout.num_tokens_done)
        if rollout.median_s is not None:
            yield "helmsman_request_median_seconds", role, rollout.median_s
        if rollout.version is not None:
            yield "helmsman_weight_version", role, float(rollout.version)
        for health, n in collections.Counter(rollout.instances.values()).items():
            yield "helmsman_instances", (rollout.role, health), float(n)


def serve(take: Callable[[], RunSnapshot | None], host: str, port: int) -> tuple[Any, int]:
    """Serve the metrics of a run at http://HOST:PORT/metrics, on a thread.

    Args:
        take: Takes a snapshot; None once the run has ended.
        host: Address to listen on.
        port: Port; any free one if 0.

    Returns:
        The server, whose ``shutdown`` ends it, and its port.

    Raises:
        BackendNotInstalledError: prometheus_client is missing.
        OSError: The port is not free.
    """
    with needed_by("helmsman metrics", "prometheus_client"):
        import prometheus_client
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Run:
        def collect(self) -> Iterable[Any]:
            run = take()
            found: dict[str, Any] = {}
            if run is None:
                family = GaugeMetricFamily("helmsman_up", METRICS["helmsman_up"][0])
                family.add_metric([], 0.0)
                return [family]
            for name, labels, value in samples(run):
                text, label_names = METRICS[name]
                if name not in found:
                    is_counter = name.endswith("_total")
                    kind = CounterMetricFamily if is_counter else GaugeMetricFamily
                    found[name] = kind(name, text, labels=label_names)
                found[name].add_metric(labels, value)
            return list(found.values())

        def describe(self) -> Iterable[Any]:
            return []

    registry = prometheus_client.CollectorRegistry()
    registry.register(Run())
    server, _ = prometheus_client.start_http_server(port, host, registry)
    return server, server.server_port


def serve_until_end(take: Callable[[], RunSnapshot | None], host: str, port: int) -> None:
    """Serve metrics until the run has ended.

    Args:
        take: Takes a snapshot; None once the run has ended.
        host: Address to listen on.
        port: Port.
    """
    server, port = serve(take, host, port)
    print(f"metrics at http://{host}:{port}/metrics", flush=True)
    try:
        while take() is not None:
            time.sleep(5.0)
    finally:
        server.shutdown()

"""Prometheus metrics of a run, by a process of their own, so that a scrape costs the script little.

Each scrape takes one snapshot. Names follow the Prometheus conventions: base units, `_total` for
counters.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

from helmsman.api.extras import needed_by
from helmsman.api.run_state import RunSnapshot
from helmsman.controller._operator.runs import (
    FoundRun,
    RunNotFoundError,
    find_run,
    take_snapshot,
)

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
_POLL_S = 5.0


def samples(run: RunSnapshot) -> Iterator[Sample]:
    """Yield the samples of a snapshot."""
    yield "helmsman_up", (), float(run.answered_by == "script")
    yield "helmsman_uptime_seconds", (), run.taken_at - run.started_at
    counts = collections.Counter((each.role, each.state) for each in run.workers)
    yield from (("helmsman_workers", labels, float(n)) for labels, n in counts.items())
    restarts = collections.Counter[str]()
    ages: dict[tuple[str, str], list[float]] = {}
    for worker in run.workers:
        restarts[worker.role] += worker.num_restarts
        if worker.health is not None:
            id_ = (worker.worker_id,)
            yield "helmsman_worker_resident_bytes", id_, float(worker.health.rss_bytes)
            yield "helmsman_worker_cpu_seconds_total", id_, worker.health.cpu_s
        for call in worker.calls:
            ages.setdefault((worker.role, call.name.rpartition(".")[2]), []).append(call.age_s)
    yield from (("helmsman_worker_restarts_total", (r,), float(n)) for r, n in restarts.items())
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
        figures = {
            "helmsman_requests_queued": rollout.num_queued,
            "helmsman_requests_in_flight": rollout.num_in_flight,
            "helmsman_requests_total": rollout.num_done,
            "helmsman_generated_tokens_total": rollout.num_tokens_done,
            "helmsman_request_median_seconds": rollout.median_s,
            "helmsman_weight_version": rollout.version,
        }
        for name, value in figures.items():
            if value is not None:
                yield name, (rollout.role,), float(value)
        for health, n in collections.Counter(rollout.instances.values()).items():
            yield "helmsman_instances", (rollout.role, health), float(n)


def serve(run: FoundRun, host: str, port: int) -> None:
    """Serve the metrics of a run at http://HOST:PORT/metrics until it has ended.

    Raises:
        BackendNotInstalledError: prometheus_client is missing.
        OSError: The port is not free; with port 0, any free one is used.
    """
    with needed_by("helmsman metrics", "prometheus_client"):
        import prometheus_client
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def take() -> RunSnapshot | None:
        with contextlib.suppress(RunNotFoundError):
            return take_snapshot(find_run(run.run_id, alive=True))
        return None

    class Run:
        def collect(self) -> Iterable[Any]:
            snapshot, families = take(), dict[str, Any]()
            found = [("helmsman_up", (), 0.0)] if snapshot is None else samples(snapshot)
            for name, labels, value in found:
                text, label_names = METRICS[name]
                is_counter = name.endswith("_total")
                kind = CounterMetricFamily if is_counter else GaugeMetricFamily
                family = families.setdefault(name, kind(name, text, labels=label_names))
                family.add_metric(labels, value)
            return list(families.values())

    registry = prometheus_client.CollectorRegistry()
    registry.register(Run())
    server, _ = prometheus_client.start_http_server(port, host, registry)
    print(f"metrics at http://{host}:{server.server_port}/metrics", flush=True)
    try:
        while take() is not None:
            time.sleep(_POLL_S)
    finally:
        server.shutdown()

"""Serves a run's Prometheus metrics from a separate process: a scrape costs the script little.

Each scrape takes one snapshot. Names follow the Prometheus conventions: base units, `_total` for
counters.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

from helmsman._desk.connections import TokenServer
from helmsman._desk.runs import FoundRun, RunNotFoundError, find_run, take_snapshot
from helmsman.api.extras import needed_by
from helmsman.api.run_state import RunSnapshot

TOKEN_VARIABLE = "HELMSMAN_METRICS_TOKEN"
"""Environment variable: the token that scrapes need; without it, each server makes its own."""

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

_POLL_S = 5.0


def samples(run: RunSnapshot) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the values of a snapshot by metric and values of its labels."""
    found = collections.defaultdict[tuple[str, tuple[str, ...]], float](float)
    found["helmsman_up", ()] = float(run.answered_by == "script")
    found["helmsman_uptime_seconds", ()] = run.taken_at - run.started_at
    for worker in run.workers:
        found["helmsman_workers", (worker.role, worker.state)] += 1
        found["helmsman_worker_restarts_total", (worker.role,)] += worker.num_restarts
        if worker.health is not None:
            id_ = (worker.worker_id,)
            found["helmsman_worker_resident_bytes", id_] = worker.health.rss_bytes
            found["helmsman_worker_cpu_seconds_total", id_] = worker.health.cpu_s
        for call in worker.calls:
            key = worker.role, call.name.rpartition(".")[2]
            found["helmsman_calls_in_flight", key] += 1
            oldest = "helmsman_oldest_call_seconds", key
            found[oldest] = max(found[oldest], call.age_s)
    for role, methods in run.durations.items():
        for method, (num_calls, median_s) in methods.items():
            found["helmsman_calls_total", (role, method)] = num_calls
            found["helmsman_call_median_seconds", (role, method)] = median_s
    for phase in run.phases:
        found["helmsman_phase_seconds", (phase.kind,)] = phase.age_s
    for rollout in run.rollouts:
        of = (rollout.role,)
        found["helmsman_requests_queued", of] = rollout.num_queued
        found["helmsman_requests_in_flight", of] = rollout.num_in_flight
        found["helmsman_requests_total", of] = rollout.num_done
        found["helmsman_generated_tokens_total", of] = rollout.num_tokens_done
        if rollout.median_s is not None:
            found["helmsman_request_median_seconds", of] = rollout.median_s
        if rollout.version is not None:
            found["helmsman_weight_version", of] = rollout.version
        for health in rollout.instances.values():
            found["helmsman_instances", (rollout.role, health)] += 1
    return found


def serve(run: FoundRun, host: str, port: int) -> None:
    """Serve the metrics of a run at http://HOST:PORT/metrics until it has ended.

    A scrape needs the token, as a bearer token or as the parameter ``token`` of the address.

    Raises:
        BackendNotInstalledError: prometheus_client is missing.
        OSError: The port is not free; with port 0, any free one is used.
    """
    with needed_by("helmsman metrics", "prometheus_client"):
        import prometheus_client
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Figures:
        def collect(self) -> Iterable[Any]:
            snapshot, families = _take(run.run_id), dict[str, Any]()
            found = samples(snapshot) if snapshot is not None else {("helmsman_up", ()): 0.0}
            for (name, labels), value in found.items():
                text, label_names = METRICS[name]
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families.setdefault(name, kind(name, text, labels=label_names))
                family.add_metric(labels, value)
            return families.values()

    registry = prometheus_client.CollectorRegistry()
    registry.register(Figures())

    def answer(*_: object) -> tuple[str, bytes]:
        return "text/plain; version=0.0.4", prometheus_client.generate_latest(registry)

    token = os.environ.get(TOKEN_VARIABLE, "")
    with TokenServer(
        host, port, "/metrics", answer, command="helmsman metrics", token=token
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"metrics at {server.url}", flush=True)
        try:
            while _take(run.run_id) is not None:
                time.sleep(_POLL_S)
        finally:
            server.shutdown()


def _take(run_id: str) -> RunSnapshot | None:
    with contextlib.suppress(RunNotFoundError):
        return take_snapshot(find_run(run_id, alive=True))
    return None

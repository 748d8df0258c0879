"""Tests that `helmsman metrics` serves documented figures, and that spans reach OpenTelemetry."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from helmsman import Job, LocalScheduler, RolloutController, SamplingParams, SchedulingSpec
from helmsman._desk.metrics import METRICS
from tests.desk.staged import Answers

ROOT = Path(__file__).parents[2]

pytest.importorskip("prometheus_client")


def test_metrics_of_a_run() -> None:
    job = Job(role="rollout", replicas=2, tasks=[SchedulingSpec(cpu=0.5)])
    with (
        LocalScheduler(preload=()) as scheduler,
        RolloutController(scheduler, Answers, job) as controller,
    ):
        controller.generate([[1]] * 5, SamplingParams(max_new_tokens=4))
        command = [sys.executable, "-m", "helmsman", "metrics", scheduler.run_id, "--port", "0"]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server,
            scheduler.reporter.phase("evaluation"),
        ):
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            with urllib.request.urlopen(url, timeout=30) as answer:
                text = answer.read().decode()
            server.terminate()
    found = dict(re.findall(r"^(helmsman_\S+) (\S+)$", text, re.MULTILINE))
    assert found["helmsman_up"] == "1.0"
    assert found['helmsman_workers{role="rollout",state="ready"}'] == "2.0"
    assert found['helmsman_requests_total{role="rollout"}'] == "5.0"
    assert found['helmsman_generated_tokens_total{role="rollout"}'] == "5.0"
    assert found['helmsman_instances{health="healthy",role="rollout"}'] == "2.0"
    assert found['helmsman_calls_total{method="agenerate",role="rollout"}'] == "5.0"
    assert float(found['helmsman_phase_seconds{phase="evaluation"}']) > 0
    assert float(found['helmsman_worker_resident_bytes{worker="rollout/1"}']) > 1e6
    assert {re.split(r"[{ ]", name)[0] for name in found} <= set(METRICS)
    assert re.search(r"# TYPE helmsman_generated_tokens_total counter", text)


def test_spans_of_phases() -> None:
    code = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from helmsman import InlineScheduler

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
with InlineScheduler() as scheduler:
    with scheduler.reporter.phase("evaluation", "held-out"):
        pass
for span in exporter.get_finished_spans():
    print(span.name, dict(span.attributes or {}), span.end_time >= span.start_time)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "helmsman evaluation {'helmsman.detail': 'held-out'} True" in done.stdout

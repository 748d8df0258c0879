"""Tests that metrics are documented, and drop those of closed controllers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from helmsman import InlineScheduler, Job, RolloutController, SchedulingSpec
from helmsman._desk.metrics import METRICS
from tests.controller.engines import CountingRollout

ROOT = Path(__file__).parents[3]


def test_snapshot_after_a_controller_is_closed() -> None:
    job = Job(role="rollout", tasks=[SchedulingSpec(cpu=0.5)])
    with InlineScheduler() as scheduler:
        controller = RolloutController(scheduler, CountingRollout, job)
        assert scheduler.reporter.snapshot().rollouts == []
        controller.initialize()
        assert [each.role for each in scheduler.reporter.snapshot().rollouts] == ["rollout"]
        controller.close()
        assert scheduler.reporter.snapshot().rollouts == []


def test_metrics_are_documented() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    for name, (text, labels) in METRICS.items():
        shown = ", ".join(f"`{label}`" for label in labels) or "-"
        assert f"| `{name}` | {shown} | {text} |" in page


def test_dashboard_has_known_metrics() -> None:
    panels = json.loads((ROOT / "docs/grafana.json").read_text())["panels"]
    used = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"helmsman_\w+", target["expr"])
    }
    assert used <= set(METRICS)
    assert len(used) >= 15

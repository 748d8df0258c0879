"""Tests that `helmsman why` and `status` show hung episodes, sessions, tools and rewards."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.desk.staged_runs import LIMIT_S, end, run_of, start
from tests.desk.work_runs import (
    WORK,
    assert_work_healthy,
    assert_work_named,
    command,
)

pytestmark = pytest.mark.timeout(300)


def test_hung_work_is_named() -> None:
    assert_work_named(("event", "thread", "reward"))


def test_healthy_work_raises_no_alarm() -> None:
    assert_work_healthy(("progressing",), watched_s=3.0)


def test_hung_work_is_recorded(tmp_path: Path) -> None:
    process = start("event", script=WORK)
    try:
        run_id, shown = run_of(process).run_id, ""
        deadline = time.monotonic() + LIMIT_S
        while "episode awaits" not in shown and time.monotonic() < deadline:
            _, shown = command("postmortem", run_id)
        assert command("report", run_id, "-o", str(tmp_path / "run.html"))[0] == 0
    finally:
        end(process)
    code, text = command("postmortem", run_id)
    assert code == 1
    assert "Open episodes, sessions, tools and rewards:\n  episode awaits Event.wait at st" in text
    page = (tmp_path / "run.html").read_text()
    assert '"waits_for":"awaits Event.wait at staged_work.py:' in page
    trace = tmp_path / "run.perfetto-trace"
    assert command("trace", run_id, "-o", str(trace))[0] == 0
    assert '"name":"episode awaits Event.wait at staged_work.py:' in trace.read_text()

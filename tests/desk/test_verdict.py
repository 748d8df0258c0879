"""Tests that status, why, the page and the watchdog give one verdict about a run."""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman import Job, LocalScheduler
from helmsman._cli import main
from helmsman._desk.runs import find_run
from helmsman._desk.ui import Server, write_report
from helmsman.api.run_state import HangPolicy


class Counter:
    def count(self, path: str) -> int:
        """Compute until a file is there; only its own progress shows that it goes on."""
        number = 0
        while not Path(path).exists():
            number += 1
        return number


@pytest.fixture
def run_id(tmp_path: Path) -> Iterator[str]:
    """A run with a call that computes, and is overdue by the run's policy."""
    with LocalScheduler(log_dir=tmp_path / "logs", preload=()) as scheduler:
        scheduler.reporter.watch(HangPolicy(floor_s=0.5))
        scheduler.create_workers(Job(role="actor"))
        scheduler.create_engines(["actor/0"], Counter)
        for _ in range(3):
            scheduler.call_engine("actor/0", "count", None, "/")
        end = tmp_path / "end"
        arguments = ("actor/0", "count", None, str(end))
        call = threading.Thread(target=scheduler.call_engine, args=arguments)
        call.start()
        yield scheduler.run_id
        end.touch()
        call.join()


def page_of(run_id: str) -> dict[str, Any]:
    with Server(run_id, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        peer = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        peer.request("GET", "/api/state", headers={"Authorization": f"Bearer {server.token}"})
        answer: dict[str, Any] = json.loads(peer.getresponse().read())
        server.shutdown()
        return answer


def test_one_verdict(
    run_id: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    deadline = time.monotonic() + 60.0
    while "may hang" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "actor/0.count on actor/0 has run for" in caplog.text
    assert main(["status", run_id]) == 1
    assert "state: 1 problem\n  " in (status := capsys.readouterr().out)
    assert ": actor/0.count on actor/0 " in status
    assert main(["why", run_id]) == 1
    assert ": actor/0.count on actor/0 " in capsys.readouterr().out
    page = page_of(run_id)
    assert [each["subject"] for each in page["problems"]] == ["actor/0"]
    assert page["states"] == {"actor/0": ["busy", False]}
    write_report(find_run(run_id), tmp_path / "run.html")
    assert '"subject":"actor/0"' in (tmp_path / "run.html").read_text()

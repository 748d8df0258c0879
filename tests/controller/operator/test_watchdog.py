"""The watchdog reports an overdue call once, and fails it on request."""

from __future__ import annotations

import http.server
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman import Job, LocalScheduler
from helmsman.api.errors import CallTimeoutError
from helmsman.api.run_state import HangPolicy

pytestmark = pytest.mark.slow

FLOOR_S = 0.5


class Sleeper:
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    with LocalScheduler(log_dir=tmp_path / "logs") as scheduler:
        scheduler.create_workers(Job(role="actor"))
        scheduler.create_engines(["actor/0"], Sleeper)
        for _ in range(3):
            scheduler.call_engine("actor/0", "sleep", None, 0.001)
        yield scheduler


class Receiver:
    """An HTTP server that keeps the first message."""

    def __init__(self) -> None:
        self.arrived, self.message = threading.Event(), dict[str, Any]()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                outer.message = json.loads(self.rfile.read(size))
                self.send_response(200)
                self.end_headers()
                outer.arrived.set()

            def log_message(self, *_: Any) -> None:
                return

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/hang"


def test_watchdog_reports_once(scheduler: LocalScheduler, caplog: pytest.LogCaptureFixture) -> None:
    reported: list[str] = []
    arrived = threading.Event()

    def notify(text: str) -> None:
        reported.append(text)
        arrived.set()

    scheduler.reporter.watch(HangPolicy(floor_s=FLOOR_S, notify=notify))
    with caplog.at_level(logging.WARNING, "helmsman"):
        call = threading.Thread(target=scheduler.call_engine, args=("actor/0", "sleep", None, 6.0))
        call.start()
        assert arrived.wait(30)
        call.join()
    (path,) = scheduler.log_dir.glob("hang-*.txt")
    text = path.read_text()
    assert text.startswith("Overdue: actor/0.sleep on actor/0 (")
    assert "sleep at" in text or "time.sleep(seconds)" in text
    assert "actor/0:\n  engine, actor/0.sleep for" in text
    assert f"See {path}" in reported[0]
    assert len(reported) == 1
    (warning,) = [each for each in caplog.messages if "may hang" in each]
    assert "actor/0.sleep on actor/0" in warning
    assert str(path) in (scheduler.log_dir / "driver.log").read_text()


def test_watchdog_fails_overdue_call(scheduler: LocalScheduler) -> None:
    scheduler.reporter.watch(HangPolicy(floor_s=FLOOR_S, on_hang="raise"))
    with pytest.raises(CallTimeoutError, match="the watchdog, by on_hang='raise'"):
        scheduler.call_engine("actor/0", "sleep", None, 8.0)


def test_watchdog_notifies_url(scheduler: LocalScheduler) -> None:
    receiver = Receiver()
    scheduler.reporter.watch(HangPolicy(floor_s=FLOOR_S, notify=receiver.url))
    scheduler.call_engine("actor/0", "sleep", None, 5.0)
    assert receiver.arrived.wait(30)
    receiver.server.shutdown()
    receiver.server.server_close()
    assert receiver.message["run_id"] == scheduler.run_id
    assert "hang-" in receiver.message["text"]


def test_watchdog_notifies_program(scheduler: LocalScheduler, tmp_path: Path) -> None:
    program, out = tmp_path / "notify", tmp_path / "out"
    program.write_text(f"#!/bin/sh\ncat > {out}.part\nmv {out}.part {out}\n")
    program.chmod(0o700)
    scheduler.reporter.watch(HangPolicy(floor_s=FLOOR_S, notify=str(program)))
    scheduler.call_engine("actor/0", "sleep", None, 5.0)
    deadline = time.monotonic() + 30
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "hang-" in out.read_text()


def test_watchdog_failed_notification_is_logged(
    scheduler: LocalScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler.reporter.watch(HangPolicy(floor_s=FLOOR_S, notify="/absent/program"))
    with caplog.at_level(logging.WARNING, "helmsman"):
        scheduler.call_engine("actor/0", "sleep", None, 5.0)
    assert any("a hang was not reported to '/absent/program'" in each for each in caplog.messages)


def test_watchdog_ignores_usual_calls(scheduler: LocalScheduler) -> None:
    """A call that takes as long as the earlier ones is not overdue, whatever the floor."""
    scheduler.reporter.watch(HangPolicy(floor_s=0.01, factor=1e6))
    scheduler.call_engine("actor/0", "sleep", None, 2.5)
    assert not list(scheduler.log_dir.glob("hang-*"))

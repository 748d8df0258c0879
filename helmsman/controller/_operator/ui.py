"""The web page of a run: served on this machine for a live one, or written to a file."""

from __future__ import annotations

import hmac
import http.server
import secrets
import time
import urllib.parse
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from helmsman.api.errors import HelmsmanError
from helmsman.api.run_state import RunSnapshot, WorkerSnapshot
from helmsman.controller._diagnosis.texts import stack_text
from helmsman.controller._operator.logs import read_lines, sources
from helmsman.controller._operator.recordings import Timeline, read_timeline
from helmsman.controller._operator.runs import FoundRun, RunNotFoundError, find_run, take_snapshot
from helmsman.controller._schedulers.run_view import SCRIPT

_SHOWN_S = 60.0
_MOST_SPANS = 20_000
_MOST_LINES = 200
_MOST_DETAILS = 200
_PLACEHOLDER = '<script id="data" type="application/json">null</script>'
_BAD = (" WARNING ", " ERROR ", " CRITICAL ")


def page(data: object = None) -> str:
    """Return the page, with the data of a run if it must work without a server.

    Args:
        data: The data; None for a page that asks its server.
    """
    text = resources.files("helmsman.controller._operator").joinpath("page.html").read_text()
    if data is None:
        return text
    content = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return text.replace(
        _PLACEHOLDER, f'<script id="data" type="application/json">{content}</script>'
    )


def state_of(run: FoundRun, shown_s: float = _SHOWN_S) -> dict[str, Any]:
    """Return the data of the page about a run, alive or ended.

    Args:
        run: The run.
        shown_s: Seconds of the timeline before its end.
    """
    timeline = read_timeline(run.log_dir, only_script=True)
    snapshot = take_snapshot(run, reports=False) if run.is_alive else _last_of(run, timeline)
    lines = read_lines(run.log_dir, SCRIPT)
    errors = [text for _, _, text in lines if any(level in text for level in _BAD)]
    return {
        "alive": run.is_alive,
        "snapshot": snapshot,
        "timeline": _recent(timeline, shown_s, is_alive=run.is_alive),
        "errors": errors[-_MOST_LINES:],
    }


def _last_of(run: FoundRun, timeline: Timeline | None) -> RunSnapshot:
    """Return what is known of a run that has ended."""
    ended_at = time.time()
    if timeline is not None:
        ended_at = (timeline.end_ns + timeline.clock_ahead_ns) / 1e9
    record = run.record
    return RunSnapshot(
        run_id=run.run_id,
        command=record.command if record is not None else "",
        scheduler=record.scheduler if record is not None else "",
        host=record.host if record is not None else "",
        pid=record.pid if record is not None else 0,
        log_dir=str(run.log_dir),
        started_at=record.since if record is not None else ended_at,
        taken_at=ended_at,
        answered_by="observation",
        workers=[
            WorkerSnapshot(
                worker_id=each,
                role=each.rpartition("/")[0],
                node="",
                pid=None,
                state="ended",
                log_path="",
            )
            for each in sources(run.log_dir)
            if each != SCRIPT
        ],
    )


def _recent(timeline: Timeline | None, shown_s: float, *, is_alive: bool) -> dict[str, Any]:
    """Return the spans of the last seconds, in seconds of the script's clock."""
    if timeline is None:
        return {"begin": 0.0, "end": 0.0, "calls": [], "phases": [], "requests": []}
    end = (time.monotonic_ns() if is_alive else timeline.end_ns) / 1e9
    begin = max(end - shown_s, timeline.begin_ns / 1e9)

    def s(at_ns: int | None) -> float | None:
        return None if at_ns is None else at_ns / 1e9

    def shown(end_ns: int | None) -> bool:
        return end_ns is None or end_ns / 1e9 >= begin

    calls = [
        (each.process, each.name, s(each.begin_ns), s(each.end_ns), each.ok)
        for each in timeline.sent
        if shown(each.end_ns)
    ]
    phases = [
        (each.name, s(each.begin_ns), s(each.end_ns))
        for each in timeline.phases
        if shown(each.end_ns)
    ]
    requests = [
        (s(each.begin_ns), s(each.end_ns), each.value)
        for each, _ in timeline.requests
        if shown(each.end_ns)
    ]
    return {
        "begin": begin,
        "end": end,
        "calls": calls[-_MOST_SPANS:],
        "phases": phases[-_MOST_SPANS:],
        "requests": requests[-_MOST_SPANS:],
    }


def worker_detail(run: FoundRun, worker_id: str) -> dict[str, Any]:
    """Return the stacks and the last log lines of a worker.

    Args:
        run: The run.
        worker_id: The worker.

    Raises:
        HelmsmanError: There is no such worker.
    """
    if not run.is_alive:
        return _detail(run, worker_id, "the run has ended")
    role = worker_id.rpartition("/")[0]
    for each in take_snapshot(run, reports=True, role=role).workers:
        if each.worker_id == worker_id:
            return _detail(run, worker_id, _stacks_of(each))
    raise RunNotFoundError(f"run {run.run_id} has no worker {worker_id!r}.")


def _detail(run: FoundRun, worker_id: str, stacks: str) -> dict[str, Any]:
    log = [line for _, _, line in read_lines(run.log_dir, worker_id)]
    return {"stacks": stacks, "log": log[-_MOST_LINES:]}


def _stacks_of(worker: WorkerSnapshot) -> str:
    shown = worker.report.stacks if worker.report is not None else []
    return "\n".join(map(stack_text, shown)) or f"no stacks: {worker.error or 'no answer'}"


def write_report(run: FoundRun, out: Path) -> None:
    """Write the page with all data of a run, which may have ended.

    Args:
        run: The run.
        out: File to write.

    Raises:
        OSError: The file cannot be written.
    """
    data = state_of(run, shown_s=600.0)
    known = take_snapshot(run, reports=True) if run.is_alive else data["snapshot"]
    details = {
        each.worker_id: _detail(
            run, each.worker_id, _stacks_of(each) if run.is_alive else "the run has ended"
        )
        for each in known.workers[:_MOST_DETAILS]
    }
    out.write_text(page({**data, "details": details}))


class Server(http.server.ThreadingHTTPServer):
    """Serves the page of a run on this machine, to the holder of a token.

    Args:
        run_id: The run.
        port: Port on 127.0.0.1; any free one if 0.

    Raises:
        OSError: The port is not free.
    """

    daemon_threads = True

    def __init__(self, run_id: str, port: int) -> None:
        self.run_id, self.token = run_id, secrets.token_urlsafe(24)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        address, _, query = self.path.partition("?")
        values = urllib.parse.parse_qs(query)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if address == "/":
            given = values.get("token", [""])[0]
        port = self.server.server_port
        # Another site's page may reach this port by a name of its own; its Host header tells.
        is_here = self.headers.get("Host") in (f"127.0.0.1:{port}", f"localhost:{port}")
        if not is_here or not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self._send(403, "text/plain", b"The address needs the token that helmsman ui printed.")
            return
        answers: dict[str, Callable[[FoundRun], object]] = {
            "/api/state": state_of,
            "/api/worker": lambda run: worker_detail(run, values.get("id", [""])[0]),
        }
        if address == "/":
            self._send(200, "text/html; charset=utf-8", page().encode())
        elif address in answers:
            try:
                content = msgspec.json.encode(answers[address](find_run(self.server.run_id)))
                self._send(200, "application/json", content)
            except HelmsmanError as error:
                self._send(404, "text/plain; charset=utf-8", str(error).encode())
        else:
            self._send(404, "text/plain", b"not found")

    def _send(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        policy = (
            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
            "img-src data:; connect-src 'self'; frame-ancestors 'none'"
        )
        headers: Sequence[tuple[str, str]] = (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", policy),
        )
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing: the address has the token."""

"""The web page of a run: served on this machine for a live one, or written to a file."""

from __future__ import annotations

import collections
import hmac
import http.server
import secrets
import time
import urllib.parse
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from helmsman.api.errors import HelmsmanError
from helmsman.api.observer import SCRIPT
from helmsman.api.run_state import RunSnapshot, WorkerSnapshot
from helmsman.controller._diagnosis.texts import stack_text, state_of
from helmsman.controller._operator.connections import BoundedThreads
from helmsman.controller._operator.logs import find_logs, read_lines, shown
from helmsman.controller._operator.recordings import Timeline, read_timeline
from helmsman.controller._operator.runs import (
    FoundRun,
    RunNotFoundError,
    find_run,
    judge,
    take_snapshot,
)

_SHOWN_S, _REPORT_S = 60.0, 600.0
_MOST_SPANS = 20_000
_MOST_LINES, _MOST_CHARS = 200, 2000
_MOST_DETAILS = 200
_PLACEHOLDER = '<script id="data" type="application/json">null</script>'
_BAD = (" WARNING ", " ERROR ", " CRITICAL ")
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; img-src data:; connect-src 'self'; frame-ancestors 'none'",
}


def _page() -> str:
    page = resources.files("helmsman.controller._operator").joinpath("page.html")
    return page.read_text(encoding="utf-8")


def write_report(run: FoundRun, out: Path) -> None:
    """Write the page with all data of a run, which may have ended. Raises OSError."""
    data = _state_of(run, _REPORT_S)
    workers = data["snapshot"].workers[:_MOST_DETAILS]
    data["details"] = {each.worker_id: _detail(run, each) for each in workers}
    content = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    page = _page().replace(_PLACEHOLDER, _PLACEHOLDER.replace("null", content))
    out.write_text(page, encoding="utf-8")


def _state_of(run: FoundRun, shown_s: float = _SHOWN_S) -> dict[str, Any]:
    """Return the data of the page about a run, alive or ended, with the last seconds of it."""
    judged = judge(run) if run.is_alive else None
    timeline = read_timeline(run.log_dir, only_script=True)
    lines = (text[:_MOST_CHARS] for _, _, text in read_lines(run.log_dir, SCRIPT))
    errors = (text for text in lines if any(level in text for level in _BAD))
    snapshot = judged[0] if judged is not None else _ended(run, timeline)
    problems = judged[1].problems if judged is not None else []
    bad = {worker_id for each in problems for worker_id in each.workers}
    return {
        "alive": run.is_alive,
        "snapshot": snapshot,
        "problems": problems,
        "states": {e.worker_id: (state_of(e), e.worker_id not in bad) for e in snapshot.workers},
        "timeline": _recent(timeline, shown_s, is_alive=run.is_alive),
        "errors": list(collections.deque(errors, _MOST_LINES)),
    }


def _ended(run: FoundRun, timeline: Timeline | None) -> RunSnapshot:
    """Return what is known of a run that has ended."""
    ended_at = timeline.end_at if timeline is not None else time.time()
    about: dict[str, Any] = {"node": "", "pid": None, "state": "ended", "log_path": ""}
    workers = [
        WorkerSnapshot(worker_id=each, role=each.rpartition("/")[0], **about)
        for each in find_logs(run.log_dir)
        if each != SCRIPT
    ]
    times = {"started_at": run.record.since or ended_at, "taken_at": ended_at}
    about = {name: shown(getattr(run.record, name)) for name in ("run_id", "log_dir")}
    return run.record.snapshot("observation", **about, **times, workers=workers)


def _recent(timeline: Timeline | None, shown_s: float, *, is_alive: bool) -> dict[str, Any]:
    """Return the spans of the last seconds, in nanoseconds of the script's clock."""
    if timeline is None:
        return {"begin": 0, "end": 0, "calls": [], "phases": [], "requests": []}
    end_ns = time.monotonic_ns() if is_alive else timeline.end_ns
    begin_ns = max(end_ns - int(shown_s * 1e9), timeline.begin_ns)
    recent: dict[str, Any] = {"begin": begin_ns, "end": end_ns}
    kinds = {"calls": timeline.sent, "phases": timeline.phases, "requests": timeline.requests}
    for kind, spans in kinds.items():
        shown = [each for each in spans if each.end_ns is None or each.end_ns >= begin_ns]
        recent[kind] = shown[-_MOST_SPANS:]
    return recent


def _worker_detail(run: FoundRun, worker_id: str) -> dict[str, Any]:
    """Return the stacks and the last log lines of a worker; HelmsmanError if there is none."""
    is_alive, role = run.is_alive, worker_id.rpartition("/")[0]
    snapshot = take_snapshot(run, role, reports=True) if is_alive else _ended(run, None)
    for each in snapshot.workers:
        if each.worker_id == worker_id:
            return _detail(run, each)
    raise RunNotFoundError(f"run {run.run_id} has no worker {worker_id!r}.")


def _detail(run: FoundRun, worker: WorkerSnapshot) -> dict[str, Any]:
    lines = (line[:_MOST_CHARS] for _, _, line in read_lines(run.log_dir, worker.worker_id))
    text = "the run has ended" if not run.is_alive else f"no stacks: {worker.error}"
    if run.is_alive and worker.report is not None and worker.report.stacks:
        text = stack_text(worker.worker_id, worker.report.stacks)
    return {"stacks": text, "log": list(collections.deque(lines, _MOST_LINES))}


class Server(BoundedThreads, http.server.HTTPServer):
    """Serves the page of a run on a port of 127.0.0.1, to the holder of a token.

    With port 0, it listens on any free one. Raises OSError if the port is not free.
    """

    def __init__(self, run_id: str, port: int) -> None:
        self.run_id, self.token = run_id, secrets.token_urlsafe(24)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    timeout = 30.0  # s without a byte from the peer

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
        self.server.keep(self.connection)
        if address == "/":
            self._send(200, "text/html", _page().encode())
            return
        try:
            run = find_run(self.server.run_id)
            if address == "/api/state":
                self._send(200, "application/json", msgspec.json.encode(_state_of(run)))
            elif address == "/api/worker":
                detail = _worker_detail(run, values.get("id", [""])[0])
                self._send(200, "application/json", msgspec.json.encode(detail))
            else:
                self._send(404, "text/plain", b"not found")
        except (HelmsmanError, OSError) as error:
            self._send(404, "text/plain", str(error).encode())

    def _send(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing: the address has the token."""

"""The web page of a run: served on this machine for a live one, or written to a file."""

from __future__ import annotations

import collections
import time
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from helmsman._desk.connections import TokenServer
from helmsman._desk.logs import find_logs, read_lines, shown
from helmsman._desk.recordings import Timeline, read_timeline
from helmsman._desk.runs import (
    FoundRun,
    RunNotFoundError,
    find_run,
    judge,
    take_snapshot,
)
from helmsman._desk.texts import stack_text, state_of
from helmsman.api.observer import SCRIPT
from helmsman.api.run_state import RunSnapshot, WorkerSnapshot

_SHOWN_S, _REPORT_S = 60.0, 600.0
_MOST_SPANS = 20_000
_MOST_LINES, _MOST_CHARS = 200, 2000
_MOST_DETAILS = 200
_PLACEHOLDER = '<script id="data" type="application/json">null</script>'
_BAD = (" WARNING ", " ERROR ", " CRITICAL ")


def _page() -> str:
    page = resources.files("helmsman._desk").joinpath("page.html")
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


class Server(TokenServer):
    """Serves the page of a run on a port of 127.0.0.1, to the holder of a token."""

    def __init__(self, run_id: str, port: int) -> None:
        self.run_id = run_id
        super().__init__("127.0.0.1", port, "/", self._answer, command="helmsman ui")
        # Another site's page may reach this port by a name of its own; its Host header tells.
        self.hosts = f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"

    def _answer(self, path: str, values: dict[str, list[str]]) -> tuple[str, bytes]:
        if path == "/":
            return "text/html", _page().encode()
        run = find_run(self.run_id)
        if path == "/api/state":
            return "application/json", msgspec.json.encode(_state_of(run))
        if path == "/api/worker":
            detail = _worker_detail(run, values.get("id", [""])[0])
            return "application/json", msgspec.json.encode(detail)
        raise FileNotFoundError("not found")

"""Traces of a run for Perfetto (ui.perfetto.dev), in the Chrome Trace Event Format.

Each worker is a process with a lane for each concurrent call. Arrows lead from the script's calls
to their execution. Source: the format's specification by Google, "Trace Event Format".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from helmsman.controller._operator.recordings import Span, Timeline, read_timeline
from helmsman.controller._operator.runs import RunNotFoundError
from helmsman.controller._schedulers.run_view import SCRIPT


def write_trace(log_dir: Path, out: Path) -> int:
    """Write the trace of a run, which may still be running; returns the number of events.

    Raises:
        RunNotFoundError: The directory has no recordings.
        OSError: The file cannot be written.
    """
    timeline = read_timeline(log_dir)
    if timeline is None:
        raise RunNotFoundError(f"{log_dir} has no recordings of a run.")
    events = _Trace(timeline).events
    begin_unix_ns = timeline.begin_ns + timeline.clock_ahead_ns
    content = {"traceEvents": events, "otherData": {"begin_unix_ns": begin_unix_ns}}
    out.write_bytes(msgspec.json.encode(content))
    return len(events)


class _Trace:
    def __init__(self, timeline: Timeline) -> None:
        self.events: list[dict[str, Any]] = []
        self._begin_ns, self._end_ns = timeline.begin_ns, timeline.end_ns
        self._pids: dict[str, int] = {}
        self._lanes: dict[tuple[int, str], dict[int, int]] = {}
        """(process, kind) -> id of a lane -> the end of its last slice."""
        self._tids = itertools.count(1)
        script, requests = self._process(SCRIPT), self._process("requests")
        self._add_spans(timeline.phases, "phase", script)
        self._add_spans(timeline.sent, "call", script)
        self._add_spans(timeline.run, "run")
        for span in timeline.requests:
            end_ns = span.end_ns or self._end_ns
            tid = self._lane(requests, "request", span.begin_ns, end_ns)
            args = {"number": span.number, "instance": span.process, "end": span.name}
            where = {"cat": "request", "args": args}
            sent_ns = end_ns if span.sent_ns is None else span.sent_ns
            if sent_ns > span.begin_ns:
                self._add("X", "queued", requests, tid, span.begin_ns, sent_ns, **where)
            if span.sent_ns is not None:
                self._add("X", span.process, requests, tid, sent_ns, end_ns, **where)
        for process, pid, at_ns, text in timeline.marks:
            name = SCRIPT if process == SCRIPT else f"{process} (pid {pid})"
            self._add("i", text, self._process(name), 0, at_ns, s="p")

    def _add(self, ph: str, name: str, pid: int, tid: int = 0, *ns: int, **more: Any) -> None:
        """Add an event without a time, at a time, or with a begin and an end."""
        if ns:
            more["ts"] = (ns[0] - self._begin_ns) / 1000
        if len(ns) > 1:
            more["dur"] = max(ns[1] - ns[0], 1) / 1000
        self.events.append({"ph": ph, "name": name, "pid": pid, "tid": tid, **more})

    def _process(self, name: str) -> int:
        if name not in self._pids:
            pid = self._pids[name] = len(self._pids) + 1
            self._add("M", "process_name", pid, args={"name": name})
            self._add("M", "process_sort_index", pid, args={"sort_index": pid})
        return self._pids[name]

    def _lane(self, pid: int, kind: str, begin_ns: int, end_ns: int) -> int:
        """Return the first lane of a kind that is free at the begin of a span."""
        ends = self._lanes.setdefault((pid, kind), {})
        tid = next((tid for tid, free_at in ends.items() if free_at <= begin_ns), None)
        if tid is None:
            tid, name = next(self._tids), f"{kind} {len(ends)}" if ends else kind
            self._add("M", "thread_name", pid, tid, args={"name": name})
        ends[tid] = end_ns
        return tid

    def _add_spans(self, spans: Iterable[Span], kind: str, script: int | None = None) -> None:
        for span in spans:
            pid = script or self._process(f"{span.process} (pid {span.pid})")
            end_ns = span.end_ns or self._end_ns
            lane = f"{kind} {span.process}" if kind == "call" else kind
            tid = self._lane(pid, lane, span.begin_ns, end_ns)
            args: dict[str, Any] = {"number": span.number}
            args |= {"unfinished": True} if span.end_ns is None else {}
            args |= {"failed": True} if not span.ok else {}
            title = span.name if kind == "phase" else span.name.rpartition(".")[2]
            self._add("X", title, pid, tid, span.begin_ns, end_ns, cat=kind, args=args)
            if kind != "phase":
                flow = {"bp": "e", "cat": "flow", "id": f"{span.process} {span.number}"}
                self._add("s" if script else "f", "call", pid, tid, span.begin_ns, **flow)

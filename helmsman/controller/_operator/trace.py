"""Traces of a run for Perfetto (ui.perfetto.dev), in the Chrome Trace Event Format.

Each worker is a process with a lane for each concurrent call. Arrows lead from the script's calls
to their execution. Source: the format's specification by Google, "Trace Event Format".
"""

from __future__ import annotations

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
    trace = _Trace(timeline)
    begin_unix_ns = timeline.begin_ns + timeline.clock_ahead_ns
    content = {"traceEvents": trace.events, "otherData": {"begin_unix_ns": begin_unix_ns}}
    out.write_bytes(msgspec.json.encode(content))
    return len(trace.events)


class _Trace:
    def __init__(self, timeline: Timeline) -> None:
        self.events: list[dict[str, Any]] = []
        self._begin_ns, self._end_ns = timeline.begin_ns, timeline.end_ns
        self._pids: dict[str, int] = {}
        self._lanes: dict[tuple[int, str], list[int]] = {}
        """(process, kind) -> for each lane, the end of its last slice."""
        self._tids: dict[tuple[int, str], int] = {}
        script, requests = self._process(SCRIPT), self._process("requests")
        self._add_spans(timeline.phases, "phase", script)
        self._add_spans(timeline.sent, "call", script)
        self._add_spans(timeline.run, "run")
        for span in timeline.requests:
            end_ns = span.end_ns or self._end_ns
            tid = self._lane(requests, "request", span.begin_ns, end_ns)
            args = {"number": span.number, "instance": span.process, "end": span.name}
            sent_ns = end_ns if span.sent_ns is None else span.sent_ns
            if sent_ns > span.begin_ns:
                self._slice("queued", "request", requests, tid, span.begin_ns, sent_ns, args)
            if span.sent_ns is not None:
                self._slice(span.process, "request", requests, tid, sent_ns, end_ns, args)
        for process, pid, at_ns, text in timeline.marks:
            name = SCRIPT if process == SCRIPT else f"{process} (pid {pid})"
            self._add("i", text, self._process(name), at_ns=at_ns, s="p")

    def _add(
        self, ph: str, name: str, pid: int, tid: int = 0, at_ns: int | None = None, **more: Any
    ) -> None:
        if at_ns is not None:
            more["ts"] = (at_ns - self._begin_ns) / 1000
        self.events.append({"ph": ph, "name": name, "pid": pid, "tid": tid, **more})

    def _process(self, name: str) -> int:
        if name not in self._pids:
            pid = self._pids[name] = len(self._pids) + 1
            self._add("M", "process_name", pid, args={"name": name})
            self._add("M", "process_sort_index", pid, args={"sort_index": pid})
        return self._pids[name]

    def _lane(self, pid: int, kind: str, begin_ns: int, end_ns: int) -> int:
        """Return the first lane of a kind that is free at the begin of a span."""
        ends = self._lanes.setdefault((pid, kind), [])
        number = next((n for n, free_at in enumerate(ends) if free_at <= begin_ns), len(ends))
        ends[number : number + 1] = [end_ns]
        lane = f"{kind} {number}" if number else kind
        if (pid, lane) not in self._tids:
            tid = self._tids[pid, lane] = len(self._tids) + 1
            self._add("M", "thread_name", pid, tid, args={"name": lane})
        return self._tids[pid, lane]

    def _slice(
        self, name: str, kind: str, pid: int, tid: int, begin_ns: int, end_ns: int, args: Any
    ) -> None:
        dur = max(end_ns - begin_ns, 1) / 1000
        self._add("X", name, pid, tid, begin_ns, cat=kind, args=args, dur=dur)

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
            self._slice(title, kind, pid, tid, span.begin_ns, end_ns, args)
            if kind != "phase":
                flow = {"bp": "e", "cat": "flow", "id": f"{span.process} {span.number}"}
                self._add("s" if script else "f", "call", pid, tid, span.begin_ns, **flow)

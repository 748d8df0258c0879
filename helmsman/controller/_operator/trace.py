"""Traces of a run for Perfetto (ui.perfetto.dev), in the Chrome Trace Event Format.

Each worker is a process with a lane for each concurrent call. Arrows lead from the script's calls
to their execution. Source: the format's specification by Google, "Trace Event Format".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from helmsman.controller._operator.recordings import Span, Timeline, read_timeline
from helmsman.controller._operator.runs import RunNotFoundError
from helmsman.controller._schedulers.run_view import SCRIPT

_REQUESTS = "requests"


def write_trace(log_dir: Path, out: Path) -> int:
    """Write the trace of a run, which may still be running.

    Args:
        log_dir: The run's log directory.
        out: File to write.

    Returns:
        The number of events.

    Raises:
        RunNotFoundError: The directory has no recordings.
        OSError: The file cannot be written.
    """
    timeline = read_timeline(log_dir)
    if timeline is None:
        raise RunNotFoundError(f"{log_dir} has no recordings of a run.")
    events = list(_events(timeline))
    content = {
        "traceEvents": events,
        "otherData": {"begin_unix_ns": timeline.begin_ns + timeline.clock_ahead_ns},
    }
    out.write_bytes(msgspec.json.encode(content))
    return len(events)


class _Lanes:
    """Assigns overlapping spans to different lanes of a process."""

    def __init__(self) -> None:
        self._free_at: dict[tuple[int, str], list[int]] = {}

    def lane(self, pid: int, kind: str, begin_ns: int, end_ns: int) -> int:
        ends = self._free_at.setdefault((pid, kind), [])
        for number, free_at in enumerate(ends):
            if free_at <= begin_ns:
                ends[number] = end_ns
                return number
        ends.append(end_ns)
        return len(ends) - 1


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    names = [SCRIPT, _REQUESTS]
    for span in timeline.run:
        names += [f"{span.process} (pid {span.pid})"]
    pids = {name: number for number, name in enumerate(dict.fromkeys(names), 1)}
    for name, pid in pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    lanes = _Lanes()

    def slices(
        spans: Iterable[Span], pid_of: dict[int, int] | None, kind: str
    ) -> Iterator[dict[str, Any]]:
        for span in spans:
            name = f"{span.process} (pid {span.pid})"
            pid = pids[SCRIPT] if pid_of is None else pids[name]
            end_ns = timeline.end_ns if span.end_ns is None else span.end_ns
            lane_kind = f"{kind} {span.process}" if kind == "call" else kind
            number = lanes.lane(pid, lane_kind, span.begin_ns, end_ns)
            lane = f"{lane_kind} {number}" if number else lane_kind
            tid = _tid(pid, lane)
            if tid not in named:
                named.add(tid)
                yield {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": pid,
                    "tid": tid,
                    "args": {"name": lane},
                }
            args: dict[str, Any] = {"number": span.number}
            if span.end_ns is None:
                args["unfinished"] = True
            if not span.ok:
                args["failed"] = True
            title = span.name.rpartition(".")[2] if kind != "phase" else span.name
            yield _slice(title, kind, pid, tid, span.begin_ns, end_ns, args, timeline)
            if kind in ("call", "run"):
                yield {
                    "ph": "s" if kind == "call" else "f",
                    "bp": "e",
                    "cat": "flow",
                    "name": "call",
                    "id": f"{span.process} {span.number}",
                    "pid": pid,
                    "tid": tid,
                    "ts": _us(span.begin_ns, timeline),
                }

    named: set[int] = set()
    yield from slices(timeline.phases, None, "phase")
    yield from slices(timeline.sent, None, "call")
    yield from slices(timeline.run, {}, "run")
    for span, sent_ns in timeline.requests:
        end_ns = timeline.end_ns if span.end_ns is None else span.end_ns
        pid = pids[_REQUESTS]
        number = lanes.lane(pid, "request", span.begin_ns, end_ns)
        tid = _tid(pid, f"request {number}")
        args = {"number": span.number, "instance": span.process, "end": span.name}
        if sent_ns is None or sent_ns > span.begin_ns:
            queued_until = end_ns if sent_ns is None else sent_ns
            yield _slice("queued", "request", pid, tid, span.begin_ns, queued_until, args, timeline)
        if sent_ns is not None:
            yield _slice(span.process, "request", pid, tid, sent_ns, end_ns, args, timeline)
    for process, own_pid, at_ns, text in timeline.marks:
        pid = pids.get(f"{process} (pid {own_pid})", pids[SCRIPT])
        yield {
            "ph": "i",
            "s": "p",
            "name": text,
            "pid": pid,
            "tid": 0,
            "ts": _us(at_ns, timeline),
        }


def _slice(
    name: str,
    kind: str,
    pid: int,
    tid: int,
    begin_ns: int,
    end_ns: int,
    args: dict[str, Any],
    timeline: Timeline,
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": pid,
        "tid": tid,
        "args": args,
        "ts": _us(begin_ns, timeline),
        "dur": max(end_ns - begin_ns, 1) / 1000,
    }


def _us(at_ns: int, timeline: Timeline) -> float:
    return (at_ns - timeline.begin_ns) / 1000


_tids: dict[tuple[int, str], int] = {}


def _tid(pid: int, lane: str) -> int:
    return _tids.setdefault((pid, lane), len(_tids) + 1)

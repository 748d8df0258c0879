"""The flight recorders of a run on one clock, and their trace for Perfetto (ui.perfetto.dev).

In a trace, each worker is a process with a lane for each concurrent call. Arrows lead from the
script's calls to their execution. Source: the specification by Google, "Trace Event Format".
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from helmsman._desk.logs import files_of
from helmsman._desk.runs import RunNotFoundError
from helmsman._process.recorder import SUFFIX, Recording, read_recording
from helmsman.api.observer import SCRIPT, Kind


class Span(NamedTuple):
    """An operation with a begin, in nanoseconds of the script's monotonic clock."""

    process: str
    """Worker id, or 'script'; the last instance of a generation request."""
    pid: int
    name: str
    number: int
    begin_ns: int
    end_ns: int | None
    """None if it had not ended."""
    ok: bool = True
    value: float = 0.0
    """New tokens of a generation request."""
    sent_ns: int | None = None
    """When a generation request was sent last."""


class Timeline:
    """Events of all processes of a run on the script's clock."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        script = next((e for e in reversed(recordings) if e.title == SCRIPT), recordings[0])
        own = script if script.title == SCRIPT else script._replace(events=[])
        self.clock_ahead_ns = script.clock_ahead_ns
        """Wall clock minus the script's monotonic clock."""
        self.phases, self.requests = _spans(own, Kind.PHASE), _requests(own)
        self.work = _spans(own, Kind.OPEN)
        """Waits of episodes, sessions, tool calls and rewards that were open for seconds."""
        self.sent, self.run = list[Span](), list[Span]()
        """Calls as the script saw them, and as the workers executed them."""
        for span in _spans(own, Kind.SENT):
            worker, _, method = span.name.partition(" ")
            self.sent.append(span._replace(process=worker, name=method))
        self.marks: list[tuple[str, int, int, str]] = []
        """(process, pid, time, text) of changes of states and weight versions."""
        times = []
        for each in recordings:
            shift = 0 if each is script else _shift(script, each, self.sent)
            self.run += _spans(each, Kind.BEGUN, shift) if each.title != SCRIPT else []
            for event in each.events:
                if event.kind in (Kind.WEIGHTS, Kind.STATE):
                    version = f" has weight version {event.number}"
                    text = event.name + (version if event.kind is Kind.WEIGHTS else "")
                    self.marks.append((each.title, each.pid, event.at_ns + shift, text))
            last_ns = max(event.end_ns or event.at_ns for event in each.events)
            times += [each.events[0].at_ns + shift, max(last_ns, each.alive_ns) + shift]
        self.begin_ns, self.end_ns = min(times), max(times)
        """Times of the first and last event."""
        self.end_at = (self.end_ns + self.clock_ahead_ns) / 1e9
        """The latter in seconds since the epoch."""


def read_timeline(log_dir: Path, *, only_script: bool = False) -> Timeline | None:
    """Read all recorders of a run, or the script's, since workers may be many; None without any."""
    recordings = []
    for path in files_of(log_dir, f"{SCRIPT if only_script else ''}*{SUFFIX}"):
        with contextlib.suppress(OSError):
            if (found := read_recording(path)) is not None and found.events:
                recordings.append(found)
    return Timeline(recordings) if recordings else None


def _spans(recording: Recording, kind: Kind, shift: int = 0) -> list[Span]:
    """Return the calls or phases of a process, oldest first."""
    about = recording.title, recording.pid
    return [
        Span(*about, e.name, e.number, e.at_ns + shift, e.end_ns and e.end_ns + shift, e.ok)
        for e in recording.events
        if e.kind is kind
    ]


def _requests(recording: Recording) -> list[Span]:
    """Return the generation requests of a script, oldest first."""
    found: dict[int, Span] = {}
    for event in recording.events:
        number, at_ns, span = event.number, event.at_ns, found.get(event.number)
        if event.kind is Kind.QUEUED:
            found[number] = Span("", recording.pid, "open", number, at_ns, None)
        elif span is not None and event.kind is Kind.ASSIGNED:
            found[number] = span._replace(process=event.name, sent_ns=at_ns)
        elif span is not None and event.kind is Kind.ENDED:
            name = f"{event.name}, {event.value:.0f} tokens"
            found[number] = span._replace(name=name, end_ns=at_ns, value=event.value)
    return list(found.values())


def _shift(script: Recording, worker: Recording, sent: Sequence[Span]) -> int:
    """Return the nanoseconds to add to a worker's times.

    A call begins after it was sent, and its outcome arrives after its end. On one node the clocks
    are the same. The wall clocks decide for a worker without calls.
    """
    asked = {span.number: span for span in sent if span.process == worker.title}
    lower, upper = [], []
    for span in _spans(worker, Kind.BEGUN):
        if (outer := asked.get(span.number)) is not None:
            lower.append(outer.begin_ns - span.begin_ns)
            if outer.end_ns is not None and span.end_ns is not None:
                upper.append(outer.end_ns - span.end_ns)
    if not lower:
        return worker.clock_ahead_ns - script.clock_ahead_ns
    least, most = max(lower), min(upper, default=max(lower))
    return 0 if least <= 0 <= most else (least + most) // 2


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
        self._lanes: dict[tuple[int, str], list[tuple[int, int]]] = {}
        """(process, kind) -> a heap of the ends of the last slices and the ids of their lanes."""
        self._tids = itertools.count(1)
        script, requests = self._process(SCRIPT), self._process("requests")
        self._add_spans(timeline.phases, "phase", script)
        self._add_spans(timeline.work, "work", script)
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
        """Return the lane of a kind that is free for longest at the begin of a span."""
        ends = self._lanes.setdefault((pid, kind), [])
        if ends and ends[0][0] <= begin_ns:
            tid = ends[0][1]
            heapq.heapreplace(ends, (end_ns, tid))
            return tid
        tid, name = next(self._tids), f"{kind} {len(ends)}" if ends else kind
        self._add("M", "thread_name", pid, tid, args={"name": name})
        heapq.heappush(ends, (end_ns, tid))
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
            title = span.name.rpartition(".")[2] if kind in ("call", "run") else span.name
            self._add("X", title, pid, tid, span.begin_ns, end_ns, cat=kind, args=args)
            if kind in ("call", "run"):
                flow = {"bp": "e", "cat": "flow", "id": f"{span.process} {span.number}"}
                self._add("s" if script else "f", "call", pid, tid, span.begin_ns, **flow)

"""The flight recorders of a run, on one clock, with the calls, phases and requests they contain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from helmsman.controller._diagnosis.stacks import named
from helmsman.controller._operator.logs import read_lines
from helmsman.controller._schedulers.run_view import SCRIPT
from helmsman.rpc_server._process.recorder import SUFFIX, Event, Kind, Recording, read_recording

_STARTED = re.compile(r"(\S+/\d+) \(pid (\d+), ([^)\s]+)\)")
"""A worker in a line of driver.log about a start."""


class Span(NamedTuple):
    """An operation with a begin, in nanoseconds of the script's monotonic clock."""

    process: str
    """Worker id, or 'script'."""
    pid: int
    name: str
    number: int
    begin_ns: int
    end_ns: int | None
    """None if it had not ended."""
    ok: bool = True
    value: float = 0.0
    """New tokens of a generation request."""


class Timeline(NamedTuple):
    """Events of all processes of a run on the script's clock."""

    clock_ahead_ns: int
    """Wall clock minus the script's monotonic clock."""
    begin_ns: int
    end_ns: int
    """Times of the first and last event."""
    sent: list[Span]
    """Calls as the script saw them; ``process`` is the worker, ``name`` the method."""
    run: list[Span]
    """Calls as the workers executed them."""
    phases: list[Span]
    requests: list[tuple[Span, int | None]]
    """Generation requests, and when each was sent last; ``process`` is the last instance."""
    marks: list[tuple[str, int, int, str]]
    """(process, pid, time, text) of changes of states and weight versions."""


def read_timeline(log_dir: Path, *, only_script: bool = False) -> Timeline | None:
    """Read all recorders of a run; None without any.

    Args:
        log_dir: The run's log directory.
        only_script: Whether to omit those of the workers, which may be many.
    """
    recordings = [
        found
        for path in sorted(log_dir.glob(f"{SCRIPT if only_script else ''}*{SUFFIX}"))
        if (found := _read(path)) is not None and found.events
    ]
    if not recordings:
        return None
    scripts = [each for each in recordings if each.title == SCRIPT]
    script = scripts[-1] if scripts else recordings[0]
    events = script.events if scripts else []
    sent = _spans(script, events, Kind.SENT, Kind.REPLIED, 0)
    run: list[Span] = []
    marks: list[tuple[str, int, int, str]] = []
    begin_ns, end_ns = recordings[0].events[0].at_ns, 0
    for each in recordings:
        shift = 0 if each is script else _shift(script, each, sent)
        if each.title != SCRIPT:
            run += _spans(each, each.events, Kind.BEGUN, Kind.DONE, shift)
        marks += [
            (each.title, each.pid, event.at_ns + shift, _text(event))
            for event in each.events
            if event.kind in (Kind.WEIGHTS, Kind.STATE)
        ]
        begin_ns = min(begin_ns, each.events[0].at_ns + shift)
        end_ns = max(end_ns, each.events[-1].at_ns + shift, each.alive_ns + shift)
    return Timeline(
        clock_ahead_ns=script.clock_ahead_ns,
        begin_ns=begin_ns,
        end_ns=end_ns,
        sent=[_by_worker(span) for span in sent],
        run=run,
        phases=_spans(script, events, Kind.PHASE, Kind.PHASE_END, 0),
        requests=list(_requests(script, events)),
        marks=marks,
    )


def missing_recordings(log_dir: Path) -> list[str]:
    """Describe the workers whose recordings are on other nodes, with commands that copy them.

    Args:
        log_dir: The run's log directory.
    """
    text = "".join(line for _, _, line in read_lines(log_dir, SCRIPT))
    scripts = {path.name.split(".")[1] for path in log_dir.glob(f"{SCRIPT}.*{SUFFIX}")}
    by_node: dict[str, list[str]] = {}
    for worker_id, pid, node in dict.fromkeys(_STARTED.findall(text)):
        stem = worker_id.replace("/", "-")
        # Inline workers are threads of the script, which records for them.
        if pid not in scripts and not any(log_dir.glob(f"{stem}.*{SUFFIX}")):
            by_node.setdefault(node, []).append(worker_id)
    return [
        f"without the recordings of {named(ids)}, which are on node {node}. This copies them: "
        f"scp '{node}:{log_dir}/{{*.events,*.log}}' {log_dir}"
        for node, ids in by_node.items()
    ]


def _read(path: Path) -> Recording | None:
    try:
        return read_recording(path)
    except OSError:
        return None


def _text(event: Event) -> str:
    if event.kind is Kind.WEIGHTS:
        return f"{event.name} has weight version {event.number}"
    return event.name


def _spans(
    recording: Recording, events: Sequence[Event], begin: Kind, end: Kind, shift: int
) -> list[Span]:
    """Pair the begins and ends of operations by number."""
    pending: dict[int, Event] = {}
    found = []
    for event in events:
        if event.kind is begin:
            pending[event.number] = event
        elif event.kind is end and (first := pending.pop(event.number, None)) is not None:
            ok = end is not Kind.REPLIED or bool(event.value)
            found.append(_span(recording, first, event.at_ns + shift, shift, ok=ok))
    found += [_span(recording, first, None, shift) for first in pending.values()]
    return sorted(found, key=lambda each: each.begin_ns)


def _span(
    recording: Recording, first: Event, end_ns: int | None, shift: int, *, ok: bool = True
) -> Span:
    return Span(
        *(recording.title, recording.pid, first.name, first.number),
        *(first.at_ns + shift, end_ns, ok),
    )


def _by_worker(span: Span) -> Span:
    worker, _, method = span.name.partition(" ")
    return span._replace(process=worker, name=method)


def _shift(script: Recording, worker: Recording, sent: Sequence[Span]) -> int:
    """Return the nanoseconds to add to a worker's times.

    A call begins after it was sent, and its outcome arrives after its end. On one node the clocks
    are the same. The wall clocks decide for a worker without calls.
    """
    asked = {span.number: span for span in sent if span.name.startswith(f"{worker.title} ")}
    lower, upper = [], []
    for span in _spans(worker, worker.events, Kind.BEGUN, Kind.DONE, 0):
        outer = asked.get(span.number)
        if outer is None:
            continue
        lower.append(outer.begin_ns - span.begin_ns)
        if outer.end_ns is not None and span.end_ns is not None:
            upper.append(outer.end_ns - span.end_ns)
    if not lower:
        return worker.clock_ahead_ns - script.clock_ahead_ns
    least, most = max(lower), min(upper, default=max(lower))
    return 0 if least <= 0 <= most else (least + most) // 2


def _requests(script: Recording, events: Sequence[Event]) -> Iterator[tuple[Span, int | None]]:
    queued: dict[int, Event] = {}
    assigned: dict[int, Event] = {}
    for event in events:
        if event.kind is Kind.QUEUED:
            queued[event.number] = event
        elif event.kind is Kind.ASSIGNED:
            assigned[event.number] = event
        elif event.kind is Kind.ENDED and event.number in queued:
            first, last = queued.pop(event.number), assigned.pop(event.number, None)
            yield _request(script, first, last, event)
    for number, first in queued.items():
        yield _request(script, first, assigned.get(number), None)


def _request(
    script: Recording, first: Event, last: Event | None, end: Event | None
) -> tuple[Span, int | None]:
    span = Span(
        process=last.name if last is not None else "",
        pid=script.pid,
        name=f"{end.name}, {end.value:.0f} tokens" if end is not None else "open",
        number=first.number,
        begin_ns=first.at_ns,
        end_ns=end.at_ns if end is not None else None,
        value=end.value if end is not None else 0.0,
    )
    return span, last.at_ns if last is not None else None

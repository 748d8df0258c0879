"""Post-mortems: the last minute of a run that has ended, the first cause first."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NamedTuple

from helmsman._desk.evidence import seconds
from helmsman._desk.logs import read_lines
from helmsman._desk.recordings import Span, Timeline, read_timeline
from helmsman._desk.runs import RunNotFoundError
from helmsman.api.observer import SCRIPT

_LAST_S = 60.0
_MOST_LINES, _MOST_CALLS = 200, 20
_BEGINS = re.compile(r"INFO run (\S+) begins: ")
_ENDS = re.compile(
    r"was ended by (?!close|delete_workers|restart)|exited with code [1-9]|has ended;|"
    r"stays dead|out of memory|OutOfMemory|SIGTERM|preemption|Segmentation fault|Fatal Python error"
)
_FAILS = re.compile(r" (?:ERROR|CRITICAL) |^Traceback|(?:Error|Exception)(?::|$)|failed: ")


class _Line(NamedTuple):
    at: float
    source: str
    text: str
    rank: int
    """0 for the end of a process, 1 for an error, 2 for other lines."""


def postmortem(log_dir: Path, *, is_alive: bool = False) -> tuple[str, bool]:
    """Describe the end of a run from its log directory, or a copy of it, and whether it was normal.

    Raises:
        RunNotFoundError: The directory has neither logs nor recordings.
    """
    lines = [
        _Line(at, source, text[:300], _rank(text))
        for at, source, text in read_lines(log_dir)
        if at and text.strip()
    ]
    timeline = read_timeline(log_dir)
    if not lines and timeline is None:
        raise RunNotFoundError(f"{log_dir} has no logs and no recordings of a run.")
    story = [each.text for each in lines if each.source == SCRIPT]
    # The file of a run begins with its own line; it also has those of other runs of the script.
    begin = next(filter(None, map(_BEGINS.search, story)), None)
    own = re.escape(begin[1]) if begin else r"\S+"
    is_closed = any(re.search(rf"INFO run {own} is closed$", each) for each in story)
    raised = [found[1] for each in story if (found := re.search(rf"run {own} ends by (.+)", each))]
    ended_at = max((each.at for each in lines), default=0.0)
    if timeline is not None:
        ended_at = max(ended_at, timeline.end_at)
    end = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ended_at))
    if is_alive:
        parts = ["The run is alive; this is its last minute."]
    elif not is_closed:
        parts = [f"The run ended at {end} without being closed; its last sign of life."]
    elif raised:
        parts = [f"The run was closed at {end}, after an exception in the script: {raised[0]}"]
    else:
        parts = [f"The run was closed normally at {end}."]
    last = [each for each in lines if each.at >= ended_at - _LAST_S]
    first = min(
        (each for each in last if each.rank < 2),
        key=lambda each: (each.rank, each.at),
        default=None,
    )
    if not (is_closed or is_alive) and (first is None or first.rank > 0):
        parts.append(
            "No process reported its end: the script's process was killed, or its node was lost."
        )
    if first is not None:
        label = "First cause" if first.rank == 0 else "First error"
        before = seconds(max(ended_at - first.at, 0.0))
        parts.append(f"{label}, {before} before the end:\n  [{first.source}] {first.text}")
    parts += _in_flight(timeline) if timeline is not None else []
    shown = [each for each in last if each.rank < 2 or each.source == SCRIPT][-_MOST_LINES:]
    parts.append("Last minute:")
    parts += [f"  -{seconds(ended_at - e.at):>8} [{e.source}] {e.text}" for e in shown]
    return "\n".join(parts), is_closed and not raised


def _rank(text: str) -> int:
    return 0 if _ENDS.search(text) else 1 if _FAILS.search(text) else 2


def _in_flight(timeline: Timeline) -> list[str]:
    """Describe the calls, phases and requests that had not ended."""

    def open_for(span: Span) -> str:
        return seconds((timeline.end_ns - span.begin_ns) / 1e9)

    phases = [f"{e.name} ({open_for(e)})" for e in timeline.phases if e.end_ns is None]
    calls = [f"  {e.process}: {e.name} for {open_for(e)}" for e in timeline.sent if not e.end_ns]
    num_requests = sum(each.end_ns is None for each in timeline.requests)
    parts = [f"Phase at the end: {' > '.join(phases)}"] if phases else []
    parts += ["Calls in flight at the end:", *calls[:_MOST_CALLS]] if calls else []
    work = [f"  {e.name} for {open_for(e)}" for e in timeline.work if not e.end_ns]
    parts += ["Open episodes, sessions, tools and rewards:", *work[:_MOST_CALLS]] if work else []
    parts += [f"Generation requests open at the end: {num_requests}"] if num_requests else []
    return parts

"""Post-mortems: the last minute of a run that has ended, the first cause first."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NamedTuple

from helmsman.controller._diagnosis.evidence import seconds
from helmsman.controller._operator.logs import read_lines
from helmsman.controller._operator.recordings import Timeline, read_timeline
from helmsman.controller._operator.runs import RunNotFoundError

_LAST_S = 60.0
_MOST_LINES = 200
_TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d+) ")
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


def postmortem(log_dir: Path) -> tuple[str, bool]:
    """Describe the end of a run from its log directory alone.

    Args:
        log_dir: The run's log directory, which may be a copy.

    Returns:
        The text, and whether the run ended normally.

    Raises:
        RunNotFoundError: The directory has neither logs nor recordings.
    """
    lines = _lines(log_dir)
    timeline = read_timeline(log_dir)
    if not lines and timeline is None:
        raise RunNotFoundError(f"{log_dir} has no logs and no recordings of a run.")
    ended_at = max((each.at for each in lines), default=0.0)
    if timeline is not None:
        ended_at = max(ended_at, (timeline.end_ns + timeline.clock_ahead_ns) / 1e9)
    is_closed = any(re.search(r"run \S+ is closed", each.text) for each in lines)
    last = [each for each in lines if each.at >= ended_at - _LAST_S]
    causes = sorted((each for each in last if each.rank < 2), key=lambda each: each.at)
    first = next((each for each in causes if each.rank == 0), None) or next(iter(causes), None)
    end = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ended_at))
    parts = [
        f"The run was closed normally at {end}."
        if is_closed
        else f"The run ended at {end} without being closed; its last sign of life."
    ]
    if first is not None:
        before = seconds(max(ended_at - first.at, 0.0))
        parts.append(f"First cause, {before} before the end:\n  [{first.source}] {first.text}")
    elif not is_closed:
        parts.append(
            "No process reported a cause: the script's process was killed, or its node was lost."
        )
    if timeline is not None:
        parts += _in_flight(timeline)
    shown = [each for each in last if each.rank < 2 or each.source == "script"][-_MOST_LINES:]
    parts.append("Last minute:")
    parts += [f"  -{seconds(ended_at - e.at):>8} [{e.source}] {e.text}" for e in shown]
    return "\n".join(parts), is_closed


def _lines(log_dir: Path) -> list[_Line]:
    found: list[_Line] = []
    at = dict[str, float]()
    for _, source, text in read_lines(log_dir, None):
        if match := _TIME.match(text):
            moment = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S"))
            at[source] = moment + float(f"0.{match[2]}")
        if source in at:
            rank = 0 if _ENDS.search(text) else 1 if _FAILS.search(text) else 2
            found.append(_Line(at[source], source, text[:300], rank))
    return found


def _in_flight(timeline: Timeline) -> list[str]:
    """Describe the calls, phases and requests that had not ended."""
    now = timeline.end_ns
    phases = [each for each in timeline.phases if each.end_ns is None]
    calls = [each for each in timeline.sent if each.end_ns is None]
    requests = [span for span, _ in timeline.requests if span.end_ns is None]
    parts = []
    if phases:
        named = [f"{each.name} ({seconds((now - each.begin_ns) / 1e9)})" for each in phases]
        parts.append(f"Phase at the end: {' > '.join(named)}")
    if calls:
        parts.append("Calls in flight at the end:")
        parts += [
            f"  {each.process}: {each.name} for {seconds((now - each.begin_ns) / 1e9)}"
            for each in calls[:20]
        ]
    if requests:
        parts.append(f"Generation requests open at the end: {len(requests)}")
    return parts

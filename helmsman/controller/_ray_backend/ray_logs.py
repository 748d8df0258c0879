"""Logs of Ray's processes: where they are, and the lines that tell why a process has ended."""

from __future__ import annotations

import re
from pathlib import Path

from helmsman.controller._transport.base import tail_of

_LOGS = ("gcs_server.err", "gcs_server.out", "raylet.err", "raylet.out", "dashboard_agent.log", "runtime_env_agent.log")
"""Logs of Ray's processes, in the order in which they start."""
_IS_WARNING = re.compile(r"\[?[-\d]+ [\d:,]+[ \t]+([WECF] \d|WARNING|ERROR|CRITICAL)")
_MOST_WARNINGS = 3
"""Lines of each log that are shown."""


def newest_session_logs(folder: Path, pattern: str) -> Path | None:
    """The folder of logs of the newest session below a folder.

    Args:
        folder: Ray's temporary folder.
        pattern: of the session's name.
    """
    sessions = sorted(folder.glob(f"{pattern}/logs"), key=lambda path: path.stat().st_mtime)
    return sessions[-1] if sessions else None


def newest_log(folder: Path, name: str) -> str:
    """The log of a process of Ray's that is not empty, its errors first; else the folder."""
    written = [path for suffix in ("err", "out") if (path := folder / f"{name}.{suffix}").is_file() and path.stat().st_size]
    return str(written[0] if written else folder)


def tail_without_dumps(path: str, num_lines: int = 20) -> str:
    """The last lines of a log of Ray's, without the tables of its state that it writes there every minute."""
    lines = [line for line in tail_of(path, 500).split("\n") if "[state-dump]" not in line and line.strip()]
    return "\n".join(lines[-num_lines:])


def last_warnings(folder: Path) -> list[str]:
    """The last warnings and errors in the logs of a session, each once, with the name of its log."""
    found, known = [], set[str]()
    for name in _LOGS:
        lines = [line for line in tail_of(str(folder / name), 1000).splitlines() if _IS_WARNING.match(line)]
        found += [f"{name}: {line}" for line in lines if line not in known][-_MOST_WARNINGS:]
        known |= set(lines)
    return found

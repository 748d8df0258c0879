"""Parts of messages that several errors share."""

from __future__ import annotations

import signal
from collections.abc import Sequence


def log_section(log_path: str, log_tail: str = "") -> str:
    """Lines that name a log and quote its end; empty without a log."""
    if not log_tail:
        return f"\n  log: {log_path}" if log_path else ""
    num_lines = log_tail.rstrip("\n").count("\n") + 1
    return f"\n  log: {log_path}, last {num_lines} lines:\n{quoted(log_tail)}"


def stack_section(verb: str, stack: str) -> str:
    return f"\n  its engine thread {verb} at:\n{quoted(stack)}" if stack else ""


def output_section(log_tail: str) -> str:
    return f"\nlast lines of its output:\n{indented(log_tail.strip() or '(nothing)')}"


def quoted(text: str) -> str:
    return indented(text.rstrip("\n"), "  | ")


def indented(text: str, prefix: str = "  ") -> str:
    return "\n".join(prefix + line for line in text.split("\n"))


def few(items: Sequence[str], limit: int = 8) -> str:
    """The first items, and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more or "none"


def signal_name(number: int) -> str:
    """The name of a signal number, such as ``SIGKILL``; ``signal 99`` for one that has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

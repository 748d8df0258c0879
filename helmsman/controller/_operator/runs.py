"""Selection of a run, and snapshots of it from its script or from outside."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from helmsman.api.errors import HelmsmanError
from helmsman.api.run_state import RunSnapshot
from helmsman.controller._node.control_socket import Query, Refusal, ask
from helmsman.controller._node.run_registry import UP, RunRecord, log_dirs, read_runs
from helmsman.controller._schedulers.outside import complete, is_stuck, observe_run

T = TypeVar("T")

_ANSWER_S = 2.0
"""Limit for the answer of a script; after it, its process is observed."""


class RunNotFoundError(HelmsmanError):
    """No run, or more than one, fits the command line."""


class RunSilentError(HelmsmanError):
    """A run does not answer on its control socket."""


class FoundRun(NamedTuple):
    """A run of this user."""

    record: RunRecord
    """With its id and log directory only, if it has ended normally."""
    is_alive: bool

    @property
    def run_id(self) -> str:
        return self.record.run_id

    @property
    def log_dir(self) -> Path:
        return Path(self.record.log_dir)

    @property
    def is_node(self) -> bool:
        """Whether it is a node of `helmsman up`, rather than the run of a script."""
        return self.record.scheduler == UP


def find_run(name: str | None, *, alive: bool = False) -> FoundRun:
    """Find a run by id, by the beginning of an id, or by its log directory.

    Args:
        name: None for the only run of a script that is alive, else the one that ended last, else
            the node of `helmsman up`.
        alive: Only runs that are alive.

    Raises:
        RunNotFoundError: There is no such run, or there are several.
    """
    runs = _all_runs()
    if name is not None and (os.sep in name or Path(name).is_dir()):
        path = Path(name).absolute()
        found = [each for each in runs if each.log_dir == path]
        if not found and (path / "driver.log").is_file():
            found = [_ended(path.name, path)]
    elif name is not None:
        found = [each for each in runs if each.run_id.startswith(name)]
    else:
        scripts = [each for each in runs if not each.is_node]
        found = [each for each in scripts if each.is_alive] or ([] if alive else scripts[:1])
        found = found or [each for each in runs if each.is_alive]
    if alive:
        ended = [each for each in found if not each.is_alive]
        found = [each for each in found if each.is_alive]
        if ended and not found:
            raise RunNotFoundError(
                f"run {ended[0].run_id} has ended. helmsman logs {ended[0].run_id} shows its logs."
            )
    if len(found) == 1:
        return found[0]
    if not found:
        what = f"no run {name!r}" if name is not None else "no run that is alive"
        raise RunNotFoundError(f"{what} of this user on this machine. helmsman runs lists them.")
    ids = ", ".join(each.run_id for each in found[:8])
    raise RunNotFoundError(f"{len(found)} runs fit: {ids}. Name one of them.")


def _all_runs() -> list[FoundRun]:
    """Return all runs, those alive first, then those that ended last."""
    runs = {record.run_id: FoundRun(record, alive) for record, alive in reversed(read_runs())}
    for run_id, path, _ in log_dirs():
        runs.setdefault(run_id, _ended(run_id, path))
    return sorted(runs.values(), key=lambda each: not each.is_alive)


def _ended(run_id: str, log_dir: Path) -> FoundRun:
    """Return a run whose record was removed at its normal end."""
    record = RunRecord(
        run_id=run_id, pid=0, host="", command="", scheduler="", log_dir=str(log_dir), since=0.0
    )
    return FoundRun(record, is_alive=False)


def take_snapshot(run: FoundRun, role: str | None = None, reports: bool = False) -> RunSnapshot:
    """Return the state of a run that is alive.

    If its script does not answer within a few seconds, its processes are observed from outside.

    Args:
        run: The run.
        role: Only this role.
        reports: Whether to include the stacks, memory and nodes of all processes.

    Raises:
        RunNotFoundError: The run has ended, or runs on another machine.
        HelmsmanError: The run refused the query.
    """
    if not run.is_alive:
        raise RunNotFoundError(f"run {run.run_id} has ended")
    if run.record.host != socket.gethostname():
        raise RunNotFoundError(
            f"run {run.run_id} belongs to host {run.record.host}; use the command there"
        )
    if is_stuck(run.record):
        return observe_run(run.record, reports=reports)
    query = Query(kind="snapshot", role=role, reports=reports, limit_s=_ANSWER_S)
    try:
        snapshot = ask_run(run, query, RunSnapshot)
    except RunSilentError:
        return observe_run(run.record, reports=reports)
    return complete(snapshot, reports=reports)


def take_two(run: FoundRun, role: str | None = None, apart_s: float = 1.0) -> list[RunSnapshot]:
    """Return two snapshots with reports, the later one first."""
    before = take_snapshot(run, role, reports=True)
    time.sleep(apart_s)
    return [take_snapshot(run, role, reports=True), before]


def take_here(take: Callable[..., T], name: str | None, *arguments: Any) -> T | None:
    """Return ``take(run, *arguments)`` of a run whose script runs here; None without one."""
    try:
        run = find_run(name, alive=True)
        return None if run.is_node else take(run, *arguments)
    except RunNotFoundError:
        return None


def ask_run(run: FoundRun, query: Query, kind: type[T]) -> T:
    """Send a query to a run; returns its answer, which has the type ``kind``.

    Raises:
        HelmsmanError: The run refused the query, such as for an unknown role; an action failed.
        RunSilentError: The run does not answer.
    """
    try:
        answer = ask(run.run_id, query)
    except (OSError, EOFError, ValueError) as error:
        raise RunSilentError(
            f"run {run.run_id} does not answer: {error}. helmsman why {run.run_id} observes its "
            "processes."
        ) from error
    with contextlib.suppress(msgspec.MsgspecError):
        raise HelmsmanError(msgspec.msgpack.decode(answer, type=Refusal).refused)
    return msgspec.msgpack.decode(answer, type=kind)


def take_stacks(run: FoundRun, role: str | None) -> dict[str, str]:
    """Return the stacks of all threads by worker id."""
    return ask_run(run, Query(kind="stacks", role=role, limit_s=_ANSWER_S), dict[str, str])

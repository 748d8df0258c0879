"""Selection of a run, and snapshots of it, also on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from helmsman._desk.control_socket import Query, Refusal, ask
from helmsman._desk.diagnosis import Diagnosis, diagnose_run
from helmsman._desk.outside import complete, is_stuck, observe_run
from helmsman.api.errors import HelmsmanError
from helmsman.api.run_state import RunSnapshot
from helmsman.controller._scheduler.run_registry import UP, RunRecord, log_dirs, read_runs

T = TypeVar("T")

ANSWER_S = 2.0
"""Limit for the answer of a script; after it, its process is observed."""
_NODE_ANSWER_S = 60.0
_APART_S, _AGAIN_S = 1.0, 2.0


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


def find_run(name: str | None, *, alive: bool = False) -> FoundRun:
    """Find a run by id, by the beginning of an id, or by its log directory.

    Without a name, it is the only run of a script that is alive, else the one that ended last, else
    the node of `helmsman up`.

    Raises:
        RunNotFoundError: There is no such run, or there are several.
    """
    runs = _all_runs()
    if name is not None and (os.sep in name or os.path.isdir(name)):
        path = Path(name).absolute()
        found = [each for each in runs if each.log_dir == path]
        if not found and os.path.isfile(path / "driver.log"):
            found = [_ended(path.name, path)]
    elif name is not None:
        found = [each for each in runs if each.run_id.startswith(name)]
    else:
        scripts = first_of_each_script([e for e in runs if e.record.scheduler != UP])
        found = [each for each in scripts if each.is_alive] or ([] if alive else scripts[:1])
        found = found or [each for each in runs if each.is_alive]
    chosen = [each for each in found if each.is_alive or not alive]
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        ids = ", ".join(f"{e.run_id} ({e.record.command[:40]})" for e in chosen[:8])
        raise RunNotFoundError(f"{len(chosen)} runs fit: {ids}. Name one of them.")
    if found:
        run_id = found[0].run_id
        raise RunNotFoundError(f"run {run_id} has ended. helmsman logs {run_id} shows its logs.")
    what = f"no run {name!r}" if name is not None else "no run that is alive"
    raise RunNotFoundError(f"{what} of this user on this machine. helmsman runs lists them.")


def first_of_each_script(runs: Sequence[FoundRun]) -> list[FoundRun]:
    """Leave out the other runs of a process, such as that of a recipe's RewardPool."""
    first: dict[object, FoundRun] = {}
    for each in runs:
        key = (each.record.host, each.record.pid) if each.record.pid else each.run_id
        if key not in first or each.record.since < first[key].record.since:
            first[key] = each
    return list(first.values())


def _all_runs() -> list[FoundRun]:
    """Return all runs, those alive first, then those that ended last."""
    runs = {record.run_id: FoundRun(record, alive) for record, alive in reversed(read_runs())}
    for run_id, path, _ in log_dirs():
        runs.setdefault(run_id, _ended(run_id, path))
    return sorted(runs.values(), key=lambda each: not each.is_alive)


def _ended(run_id: str, log_dir: Path) -> FoundRun:
    """Return a run whose record was removed at its normal end."""
    return FoundRun(RunRecord(run_id=run_id, log_dir=str(log_dir)), is_alive=False)


def take_snapshot(run: FoundRun, role: str | None = None, reports: bool = False) -> RunSnapshot:
    """Return the state of a run that is alive, if asked with reports of its processes.

    If its script does not answer within a few seconds, its processes are observed from outside.

    Raises:
        RunNotFoundError: The run has ended, or runs on another machine.
        HelmsmanError: The run refused the query.
    """
    if not run.is_alive:
        raise RunNotFoundError(f"run {run.run_id} has ended")
    if (host := run.record.host) != socket.gethostname():
        raise RunNotFoundError(f"run {run.run_id} belongs to host {host}; use the command there")
    if not is_stuck(run.record):
        query = Query(kind="snapshot", role=role, reports=reports, limit_s=ANSWER_S)
        with contextlib.suppress(RunSilentError):
            return complete(ask_run(run, query, RunSnapshot), reports=reports)
    return observe_run(run.record, reports=reports)


def take_two(run: FoundRun, role: str | None = None) -> list[RunSnapshot]:
    """Return two snapshots with reports, a second apart, the later one first."""
    before = take_snapshot(run, role, reports=True)
    time.sleep(_APART_S)
    return [take_snapshot(run, role, reports=True), before]


def judge(run: FoundRun, role: str | None = None) -> tuple[RunSnapshot, Diagnosis]:
    """Return the state of a run and its diagnosis, which is the verdict of all commands.

    A run with a problem is looked at again after a few seconds: progress in bursts is progress.

    Raises:
        RunNotFoundError: The run has ended, or runs on another machine.
        HelmsmanError: The run refused the query.
    """
    now, before = take_two(run, role)
    diagnosis = diagnose_run(now, before)
    if not diagnosis.is_healthy:
        time.sleep(_AGAIN_S)
        now = take_snapshot(run, role, reports=True)
        diagnosis = diagnose_run(now, before)
    return now, diagnosis


def take_here(take: Callable[..., T], name: str | None, alive: bool, *arguments: Any) -> T | None:
    """Return ``take(run, *arguments)`` of a run whose script runs here; None without one."""
    try:
        run = find_run(name, alive=alive)
        return None if alive and run.record.scheduler == UP else take(run, *arguments)
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
        with contextlib.suppress(msgspec.MsgspecError):
            raise HelmsmanError(msgspec.msgpack.decode(answer, type=Refusal).refused)
        return msgspec.msgpack.decode(answer, type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunSilentError(
            f"run {run.run_id} does not answer: {error}. helmsman why {run.run_id} observes its "
            "processes."
        ) from error


def attach(address: str | None) -> Sequence[Mapping[str, Any]]:
    """Attach to a running cluster, never start one; returns its live nodes.

    Without an address, it is that of RAY_ADDRESS, or the cluster of this machine.
    """
    from helmsman.controller._scheduler.ray.cluster_state import alive_nodes, choose_address

    chosen = choose_address(address or os.environ.get("RAY_ADDRESS") or "auto")
    if chosen is not None:
        import ray

        ray.init(
            address=chosen,
            namespace="helmsman-cli",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    return alive_nodes()


def on_all(nodes: Sequence[Mapping[str, Any]], function: Callable[..., T], *args: Any) -> list[T]:
    """Run a function on all nodes at once; returns the results in their order."""
    import ray

    from helmsman.controller._scheduler.ray.placement_groups import on_node

    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    places = [on_node(node["NodeID"]) for node in nodes]
    started = [task.options(scheduling_strategy=place).remote(*args) for place in places]
    return [ray.get(each, timeout=_NODE_ANSWER_S) for each in started]

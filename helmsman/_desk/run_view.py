"""RunView: observes a run, builds snapshots of it and answers the queries of its control socket."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from helmsman._base.event_loop import LOOP_THREAD, forbid_blocking, submit
from helmsman._desk.activity import Activity, CallAccount
from helmsman._desk.cleanup import remove_old_logs
from helmsman._desk.control_socket import ControlSocket, Query
from helmsman._desk.open_items import OpenItems, Still
from helmsman._desk.watchdog import Watchdog
from helmsman._process.guardian import mark_of
from helmsman._process.pulse import Pulse
from helmsman._process.recorder import Recorder
from helmsman._process.stack_dump import offer_stacks
from helmsman._wire.messages import Verb
from helmsman.api import errors
from helmsman.api.observer import SCRIPT, RunObserver
from helmsman.api.run_state import (
    HangPolicy,
    OpenCall,
    Operated,
    ProcessReport,
    RolloutSnapshot,
    RunSnapshot,
    WorkerSnapshot,
)
from helmsman.api.scheduler import WorkerHealth
from helmsman.controller._scheduler.argument_types import refusal
from helmsman.controller._scheduler.backend import Run
from helmsman.controller._scheduler.driver_log import story
from helmsman.controller._scheduler.roles import Role, RoleRegistry
from helmsman.controller._scheduler.run_registry import record_here
from helmsman.controller._scheduler.transport.client import WorkerClient
from helmsman.controller._scheduler.transport.health import ask_health
from helmsman.controller._scheduler.worker_requests import ask_all
from helmsman.rpc_server._host.examination import examine_script, thread_stack_of
from helmsman.rpc_server._host.threads import all_stacks

log = logging.getLogger(__name__)

_Describe = Callable[[], RolloutSnapshot | None]
_Operated = Callable[[], Operated | None]
_MOST_CALLS = 20
_LOOP_S = 1.0
"""Longer than this, the background loop is considered blocked."""


class RunView(RunObserver):
    """The operator's view of one run: its recorder, snapshots, control socket and watchdog.

    With ``shares_process``, the workers are threads of this process. ``scale`` resizes a role that
    has no controller.
    """

    def __init__(
        self,
        run: Run,
        roles: RoleRegistry,
        scheduler: str,
        *,
        shares_process: bool,
        scale: Callable[[str, int], object],
    ) -> None:
        self._run, self._roles = run, roles
        self._record = record_here(run.id, scheduler, run.log_dir)
        self._shares_process, self._scale = shares_process, scale
        self._described: dict[str, tuple[_Describe, _Operated]] = {}
        self._recorder = Recorder(SCRIPT)
        self._activity = Activity(self._recorder)
        self._open_items = OpenItems(self._recorder)
        self._pulse = Pulse(f"{run.id}/{SCRIPT}")
        self._show_life()
        self._socket = self._open_socket()
        self.hang_policy = HangPolicy()
        self._watchdog = Watchdog(run, roles, self._activity, self)
        remove_old_logs()

    def begin(self) -> None:
        self._recorder.persist_at(str(self._run.log_dir / SCRIPT), self._run.id)
        self._run.upkeep.add(f"its flight recorder in {self._run.log_dir}", self._recorder.renew)

    def close(self) -> None:
        self._watchdog.stop()
        self._pulse.stop()
        if self._socket is not None:
            self._socket.close()
        self._recorder.close()

    def _show_life(self) -> None:
        """Let ``helmsman why`` observe this process while its interpreter cannot answer."""

        def describe() -> bytes:
            self._recorder.beat()
            return b""

        try:
            self._run.upkeep.start()
            self._pulse.start(describe)
            offer_stacks()
        except (OSError, RuntimeError) as error:
            text = "other processes cannot read the script's state or stacks"
            log.warning("run %s: %s: %s", self._run.id, text, error)

    def _open_socket(self) -> ControlSocket | None:
        """Open the socket by which ``helmsman status`` and ``why`` reach the run."""
        try:
            return ControlSocket(self._run.id, self.answer)
        except OSError as error:
            text = "has no control socket, so helmsman why cannot ask it"
            log.warning("run %s %s: %s", self._run.id, text, error)
            return None

    # --- reports ----------------------------------------------------------------------------------

    def calls_of(self, role: str, worker_id: str, method: str) -> CallAccount:
        return CallAccount(self._activity, role, worker_id, method)

    def operation(
        self, kind: str, detail: str, waits_for: Callable[[], str] = lambda: ""
    ) -> contextlib.AbstractContextManager[None]:
        return self._activity.phase(kind, detail, waits_for)

    def watch(self, policy: HangPolicy) -> None:
        if not isinstance(policy, HangPolicy):
            raise refusal("watch", "policy", policy, "HangPolicy")
        self.hang_policy = policy

    def phase(self, kind: str, detail: str = "") -> contextlib.AbstractContextManager[None]:
        return self._activity.phase(kind, detail)

    def figure(self, name: str, value: object) -> None:
        self._activity.facts[str(name)] = str(value)

    def record(self, kind: int, name: str, number: int = 0, value: float = 0.0) -> None:
        self._recorder.note(kind, self._recorder.name(name), number, value)

    def describe_by(
        self, role: str, describe: _Describe, operated: _Operated = lambda: None
    ) -> None:
        self._described[role] = describe, operated

    # --- queries ----------------------------------------------------------------------------------

    def look(self) -> list[Still]:
        """Note and record the progress of episodes, sessions, tool calls and rewards."""
        return self._open_items.look()

    def answer(self, query: Query) -> Any:
        """Answer a query, from any thread except the background loop's.

        Raises:
            RoleNotFoundError: There is no such role.
        """
        if query.kind == "snapshot":
            return self.snapshot(query.role, reports=query.reports, timeout=query.limit_s)
        if query.kind == "stacks":
            return self._stacks(query.role, query.limit_s)
        if query.kind == "files":
            asked = submit(self._files(query.node, query.target, query.limit_s / 2))
            return asked.result(query.limit_s + _LOOP_S)
        return self._act(query)

    def _act(self, query: Query) -> str:
        """Execute an operator's action, recorded in driver.log, and describe its effect."""
        target, is_scale, limit_s = query.target, query.kind == "scale", query.limit_s
        role = self._roles.role(target if is_scale else target.rpartition("/")[0]).name
        client = None if is_scale else self._roles.client(target)
        controller = self._described[role][1]() if role in self._described else None
        text = f"{query.kind} {target}" + (f" to {query.number}" if is_scale else "")
        story.info("operator: %s", text)
        if query.kind == "kill" and client is not None:
            submit(client.kill("was ended by helmsman kill")).result(limit_s)
            return f"{target} was killed"
        if controller is None and is_scale:
            self._scale(role, query.number)
        elif controller is None:
            reason = f"role {role!r} has no RolloutController"
            raise errors.HelmsmanError(f"{target} cannot be drained: {reason}")
        elif is_scale:
            submit(controller.async_scale(query.number, migrate=True)).result(limit_s)
        elif query.kind == "drain":
            submit(controller.async_drain([target], migrate=True)).result(limit_s)
        else:
            submit(controller.async_undrain([target])).result(limit_s)
        return f"{text}: done"

    async def _files(self, node: str, worker_id: str, limit_s: float) -> dict[str, bytes]:
        """Return a worker's recordings and log, from it or from a worker beside it."""
        there = [each for each in self._chosen(None) if each.node == node and each.is_there]
        for client in sorted(there, key=lambda each: each.worker_id != worker_id)[:2]:
            with contextlib.suppress(errors.CallError):
                asked = client.control(Verb.FILES, worker_id, limit_s=limit_s)
                found: dict[str, bytes] = await asked
                return found
        raise errors.HelmsmanError(f"no worker on node {node} answers")

    def snapshot(
        self, role: str | None = None, *, reports: bool = False, timeout: float = 5.0
    ) -> RunSnapshot:
        forbid_blocking()
        script = None
        if reports and role in (None, SCRIPT):
            known = ((e.node, mark_of(e.pid)) for e in self._roles.clients() if e.pid)
            own = (node for node, mark in known if mark and mark.run_id == self._run.id)
            script = examine_script(next(own, ""), str(self._run.log_dir))
        loop_stack = None
        asked = submit(self._workers(role, timeout, reports=reports))
        try:
            workers, rollouts = asked.result(timeout + _LOOP_S)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            asked.cancel()
            rollouts, loop_stack = [], thread_stack_of(LOOP_THREAD)
            chosen, error = self._chosen(role).items(), "Helmsman's event loop does not run"
            workers = [self._worker(each, client, None, None, error) for client, each in chosen]
        activity, limit_s = self._activity, self.hang_policy.limit_s
        phases = [
            each
            if each.median_s is None
            else msgspec.structs.replace(each, limit_s=limit_s(each.median_s))
            for each in activity.phases(explain=reports)
        ]
        return self._record.snapshot(
            "script",
            script=script,
            loop_stack=loop_stack,
            idle_s=time.monotonic() - activity.last_at if activity.last_at else None,
            longest_idle_s=activity.longest_idle_s,
            workers=workers,
            rollouts=rollouts,
            phases=phases,
            work=self._open_items.describe(self, workers, reports=reports) if role is None else [],
            durations=activity.durations(),
            facts=dict(activity.facts),
        )

    def _stacks(self, role: str | None, limit_s: float) -> dict[str, str]:
        """Return the stacks of all threads by worker id or SCRIPT, or why one did not answer."""
        found = {SCRIPT: all_stacks()} if role in (None, SCRIPT) else {}
        clients = {client.worker_id: client for client in self._chosen(role)}
        if not self._shares_process:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                asked = submit(ask_all(clients, Verb.STACKS, limit_s))
                found |= {name: str(each) for name, each in asked.result(limit_s + _LOOP_S).items()}
        return found

    def _chosen(self, role: str | None) -> dict[WorkerClient, Role]:
        """Return the workers of a role, or all; those shared by roles only once."""
        if role not in (None, SCRIPT):
            self._roles.role(role)  # raises for an unknown one
        found: dict[WorkerClient, Role] = {}
        for each in self._roles:
            for client in each.clients.values() if role in (None, each.name) else ():
                found.setdefault(client, each)
        return found

    async def _workers(
        self, role: str | None, limit_s: float, *, reports: bool
    ) -> tuple[list[WorkerSnapshot], list[RolloutSnapshot]]:
        chosen = self._chosen(role)
        there = {client.worker_id: client for client in chosen if client.is_there}
        health, failures = await ask_health(there, min(limit_s, 1.0), "the query's limit")
        found: dict[str, Any] = {}
        if reports:
            answering = {name: there[name] for name, state in health.items() if state.answered}
            found = await ask_all(answering, Verb.EXAMINE, limit_s)
        workers = []
        for client, each in chosen.items():
            name, report = client.worker_id, found.get(client.worker_id)
            failed = isinstance(report, BaseException)
            error = str(report if failed else failures.get(name, "")).partition("\n")[0]
            report = None if failed else report
            workers.append(self._worker(each, client, health.get(name), report, error))
        names = [name for name in list(self._described) if role in (None, name)]
        described = [self._described[name][0]() for name in names]
        return workers, [each for each in described if each is not None]

    def _worker(
        self,
        role: Role,
        client: WorkerClient,
        health: WorkerHealth | None,
        report: ProcessReport | None,
        error: str,
    ) -> WorkerSnapshot:
        now = time.monotonic()
        calls = []
        for call in sorted(client.in_flight.copy().values(), key=lambda each: each.started):
            median_s = self._activity.calls_of(role.name, call.method).median_s
            limit_s = self.hang_policy.limit_s(median_s)
            age_s = now - call.started
            calls.append(OpenCall(name=call.name, age_s=age_s, median_s=median_s, limit_s=limit_s))
        is_restarting = client.worker_id in role.restarts
        return WorkerSnapshot(
            worker_id=client.worker_id,
            role=role.name,
            node=client.node,
            pid=client.pid,
            state="restarting" if is_restarting else client.state.value,
            log_path=client.log_path,
            devices=list(client.place.devices),
            world_size=len(role.clients),
            is_group=role.name not in self._described,
            num_restarts=role.num_restarts.get(client.worker_id, 0),
            calls=calls[:_MOST_CALLS],
            health=health,
            error=error or client.end_cause,
            report=report,
        )

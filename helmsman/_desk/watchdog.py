"""Watchdog: reports calls, phases and open work that take much longer than earlier ones."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from helmsman._base.event_loop import run_on_loop
from helmsman._desk.activity import Activity
from helmsman._desk.diagnosis import diagnose_run
from helmsman._desk.evidence import seconds
from helmsman._desk.open_items import Still
from helmsman._desk.outside import complete
from helmsman._desk.texts import stacks_text, why_text
from helmsman._process.safe_files import open_log
from helmsman.api.run_state import HangPolicy, RunSnapshot
from helmsman.controller._scheduler.backend import Run
from helmsman.controller._scheduler.roles import RoleRegistry
from helmsman.controller._scheduler.transport.client import PendingCall

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_MOST_REPORTS = 20


class _Overdue(NamedTuple):
    key: object
    """Identifies the operation, which is reported once."""
    text: str
    call: PendingCall | None
    age_s: float


class View(Protocol):
    """The view of a run that a watchdog reports from."""

    hang_policy: HangPolicy

    def look(self) -> list[Still]:
        """Return the open items that nothing known explains."""

    def snapshot(self, *, reports: bool) -> RunSnapshot:
        """Return the state of the run."""


class Watchdog:
    """Looks at the open calls, phases and items of a run on a thread of its own."""

    def __init__(self, run: Run, roles: RoleRegistry, activity: Activity, view: View) -> None:
        self._run, self._roles, self._activity, self._view = run, roles, activity, view
        self._reported: set[object] = set()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="helmsman-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        self._stopped.set()

    def _watch(self) -> None:
        has_failed = False
        while not self._stopped.wait(_LOOK_S):
            still = list[Still]()
            try:
                still = self._view.look()
            except Exception:  # the watchdog must go on
                if not has_failed:
                    log.exception("run %s: a look at its open work failed", self._run.id)
                has_failed = True
            overdue = [each for each in self._overdue(still) if each.key not in self._reported]
            if overdue and len(self._reported) < _MOST_REPORTS:
                self._reported |= {each.key for each in overdue}
                try:
                    self._report(overdue)
                except Exception:  # the watchdog must go on
                    log.exception("run %s: the report of a hang failed", self._run.id)

    def _overdue(self, still: list[Still]) -> Iterator[_Overdue]:
        now, activity, policy = time.monotonic(), self._activity, self._view.hang_policy
        found = list[tuple[_Overdue, float | None]]()
        for role in self._roles:
            for client in role.clients.values():
                for request_id, call in client.in_flight.copy().items():
                    text, age_s = f"{call.name} on {client.worker_id}", now - call.started
                    median_s = activity.calls_of(role.name, call.method).median_s
                    found.append((_Overdue(request_id, text, call, age_s), median_s))
        for phase in activity.phases(explain=False):
            key = phase.kind, phase.detail, round(now - phase.age_s)
            text = f"phase {phase.kind} {phase.detail}".rstrip()
            if phase.median_s is not None:
                found.append((_Overdue(key, text, None, phase.age_s), phase.median_s))
        for item in still:
            found.append((_Overdue(item.key, item.text, None, item.still_s), item.median_s))
        for each, median_s in found:
            if each.age_s > policy.limit_s(median_s):
                yield each

    def _report(self, overdue: list[_Overdue]) -> None:
        before = complete(self._view.snapshot(reports=True), reports=True)
        if self._stopped.wait(_LOOK_S):
            return
        now = complete(self._view.snapshot(reports=True), reports=True)
        diagnosis, policy = diagnose_run(now, before), self._view.hang_policy
        slow = [f"{each.text} ({seconds(each.age_s)})" for each in overdue]
        path = str(self._run.log_dir / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt")
        try:
            with os.fdopen(open_log(path, self._run.id), "a", encoding="utf-8") as file:
                shown = f"Overdue: {', '.join(slow[:8])}", why_text(diagnosis), stacks_text(now)
                file.write("\n\n".join(shown) + "\n")
        except OSError as error:
            path = f"helmsman why; {path} cannot be written: {error.strerror}"
        cause = next((each.cause for each in diagnosis.findings), diagnosis.waits_for)
        log.warning("run %s may hang: %s is overdue. %s See %s", self._run.id, slow[0], cause, path)
        if policy.notify is not None:
            try:
                policy.notify(f"{cause}\nSee {path}")
            # The user's own code; SystemExit would end this thread without a message.
            except BaseException as error:  # noqa: BLE001
                reason = f"to {policy.notify!r}: {error!r}"
                log.warning("run %s: a hang was not reported %s", self._run.id, reason)
        if policy.on_hang == "raise":
            source = "the watchdog, by on_hang='raise'"
            for each in overdue:
                if each.call is not None:
                    run_on_loop(functools.partial(each.call.give_up, each.age_s, source))

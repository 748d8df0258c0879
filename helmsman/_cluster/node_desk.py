"""NodeDesk: a supervisor's control socket, by which `helmsman status` and `why` see its node."""

from __future__ import annotations

import os
import time

import msgspec

from helmsman._cluster.async_utils import StatusPrinter
from helmsman._cluster.node_plan import NodePlan
from helmsman._desk.control_socket import ControlSocket, Query
from helmsman._desk.outside import observe_workers, observed_report
from helmsman._process.guardian import family, proc_text, process_of
from helmsman.api.environment import masked_command
from helmsman.api.errors import HelmsmanError
from helmsman.api.observer import SCRIPT
from helmsman.api.run_state import NodeSnapshot, RunSnapshot
from helmsman.controller._scheduler.run_registry import UP, record_here

_RAY = ("gcs_server", "raylet")


class NodeDesk:
    """Answers queries about this node, on its own threads; ``report`` prints a failed start."""

    def __init__(self, plan: NodePlan, report: StatusPrinter) -> None:
        self._plan, self._began = plan, time.monotonic()
        command = masked_command(plan.command)[:500]
        self._record = msgspec.structs.replace(
            record_here(plan.run_id, UP, plan.folder), command=command
        )
        rank, count = plan.identity.rank, plan.identity.count
        head = f"{plan.identity.head}:{plan.control_port}" if plan.control_port else ""
        self._node = NodeSnapshot(rank=rank, count=count, doing="starts", since_s=0.0, head=head)
        self.script_pid: int | None = None
        self._socket: ControlSocket | None = None
        try:
            self._socket = ControlSocket(plan.run_id, self.answer)
        except OSError as error:
            report(f"this node has no control socket, so helmsman why cannot ask it: {error}")

    def close(self) -> None:
        """Stop answering. Idempotent."""
        if self._socket is not None:
            self._socket.close()

    def note(self, text: str, *, missing: str = "") -> None:
        """Set the current activity of the supervisor, and the nodes that it waits for."""
        if text != self._node.doing:
            self._began = time.monotonic()
        self._node = msgspec.structs.replace(self._node, doing=text, missing=missing)

    def answer(self, query: Query) -> RunSnapshot:
        """Return the state of the node; raises HelmsmanError for other queries."""
        plan, log_dir, script = self._plan, str(self._plan.folder), self.script_pid
        if query.kind != "snapshot":
            raise HelmsmanError(
                f"{query.kind} needs the scheduler of a script; {plan.run_id} is a node of "
                "helmsman up, which answers status, why and stacks. helmsman runs lists all runs"
            )
        pids = family(os.getpid(), plan.tag)
        named = {
            name: pid for pid in pids if (name := proc_text(f"/proc/{pid}/comm").strip()) in _RAY
        }
        named |= {SCRIPT: script} if script is not None else {}
        found = {name: each for name, pid in named.items() if (each := process_of(pid))}
        workers = observe_workers(pids, plan.address, log_dir, reports=query.reports)
        is_read = query.reports and SCRIPT in found
        return self._record.snapshot(
            "supervisor",
            script=observed_report(found[SCRIPT].pid, log_dir) if is_read else None,
            node=msgspec.structs.replace(
                self._node,
                since_s=time.monotonic() - self._began,
                processes={name: (each.pid, each.state) for name, each in found.items()},
            ),
            workers=[each for each in workers if query.role in (None, each.role)],
        )

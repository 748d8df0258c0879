"""Ray's processes on this node, watched and stopped with their descendants; the head's node table.

``ray stop`` is never used: it kills processes by name, including those of other runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman._base.event_loop import Deadline
from helmsman._cluster.async_utils import StatusPrinter
from helmsman._cluster.node_plan import NodePlan, lease, ray_start
from helmsman._process.guardian import (
    TAG_VARIABLE,
    descendants,
    end_family,
    family,
    process_table,
    wait_until,
)
from helmsman._process.ports import PortLeases
from helmsman.api.errors import BootstrapError, BootstrapExit
from helmsman.controller._scheduler.ray.embedded import last_warnings, newest_session_logs
from helmsman.controller._scheduler.ray.start_limits import CORE
from helmsman.controller._scheduler.run_registry import RANK_LABEL, RUN_LABEL
from helmsman.controller._scheduler.transport.base import describe_exit, split_returncode, tail_of

_STARTED = "Ray runtime started."
_POLL_S = 0.05
_END_S = 2.0
"""Time for Ray to shut down, in seconds."""
_LOOK_S = 1.0
_ANSWER_S = 2.0


class RayProcess:
    """``ray start --block`` as a child, with its descendants."""

    def __init__(self, plan: NodePlan, environ: Mapping[str, str], report: StatusPrinter) -> None:
        self._plan, self._environ, self._report = plan, {**environ, TAG_VARIABLE: plan.tag}, report
        self._log_path = plan.folder / "ray_start.log"
        self._leases = PortLeases()
        self._watched: set[int] = set()
        self._pidfds: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when an essential process has exited; the result names the process."""

    async def start(self, run_id: str, head: str = "") -> str:
        """Start Ray to join ``head`` ('' starts a head), and wait until it reports that it is up.

        A start that fails before its deadline is repeated once.

        Returns:
            The address of the head.

        Raises:
            BootstrapError: Ray did not start; includes the end of its output, and the warnings and
                errors in its logs.
        """
        plan, limit_s = self._plan, self._plan.ray_start_s
        if not (head or plan.port):
            plan = msgspec.structs.replace(plan, port=lease(self._leases, 1)[0])
        command, deadline = ray_start(plan, run_id, self._leases, head), Deadline(limit_s)
        try:
            await self._start(command, deadline)
        except BootstrapError as error:
            if deadline.passed:
                raise
            self._report(
                f"{error}\nRay is started once more (after {deadline.elapsed_s:.1f} s of at most "
                f"{limit_s:g} s)"
            )
            await self._end()
            self.ended = asyncio.get_running_loop().create_future()
            await self._start(command, deadline)
        return head or f"{plan.address}:{plan.port}"

    async def _start(self, command: Sequence[str], deadline: Deadline) -> None:
        with self._log_path.open("wb") as log:
            # Not in a thread: a cancelled start must have the process in order to stop it.
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a few milliseconds, once in a run
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is meant for the script
            )
        self._watch(self._process.pid, "ray start")
        looked_at = time.monotonic()
        while _STARTED not in self._log_path.read_text(errors="replace"):
            if self.ended.done():
                raise self._not_started(f": {self.ended.result()}")
            if deadline.passed:
                raise self._not_started(
                    f" within {deadline.limit_s:g} s; if the node is only busy, raise "
                    "--start-timeout"
                )
            if time.monotonic() - looked_at > _LOOK_S:
                # Ray keeps waiting for a raylet that has exited.
                self._watch_core()
                looked_at = time.monotonic()
            await asyncio.sleep(_POLL_S)
        self._watch_core()

    def _not_started(self, why: str) -> BootstrapError:
        logs = newest_session_logs(self._log_path.parent / "ray", "session_2*")
        log = "\n".join([tail_of(str(self._log_path)), *(last_warnings(logs) if logs else ())])
        return BootstrapError(
            f"Ray did not start on this node{why}", exit_code=BootstrapExit.RAY_DIED, log=log
        )

    def _watch_core(self) -> None:
        for pid, name in self._core().items():
            if pid not in self._watched:
                self._watched.add(pid)
                self._watch(pid, name)

    def _core(self) -> dict[int, str]:
        """Return pid -> name of the essential processes, including exited ones not yet reaped."""
        assert self._process is not None
        found = {}
        for pid in family(self._process.pid, self._plan.tag) | descendants(
            self._process.pid, process_table()
        ):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name in CORE:
                    found[pid] = name
        return found

    def _watch(self, pid: int, name: str) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._has_ended(name)
            return
        self._pidfds.append(pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._has_ended, name, pidfd)

    def _has_ended(self, name: str, pidfd: int | None = None) -> None:
        if pidfd is not None:
            self._forget(pidfd)
        code = self._process.poll() if name == "ray start" and self._process is not None else None
        how = "has ended" if code is None else describe_exit(*split_returncode(code))
        if not self.ended.done():
            self.ended.set_result(f"{name} {how}")

    def _forget(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        self._pidfds.remove(pidfd)
        os.close(pidfd)

    async def stop(self) -> None:
        """Stop all processes: SIGTERM for the raylet, so that the head is notified, then SIGKILL.

        The other processes have no state to save.
        """
        await self._end()
        with contextlib.suppress(OSError):
            self._leases.close()

    async def _end(self) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._finish, self._process)
        for pidfd in list(self._pidfds):
            self._forget(pidfd)

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        raylets = {pid for pid, name in self._core().items() if name == "raylet"}
        for pid in raylets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not raylets & family(process.pid, self._plan.tag), _END_S, _POLL_S)
        process.kill()
        end_family(process.pid, self._plan.tag)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A process that hangs in the kernel cannot be killed.
            process.wait(_END_S)


class NodeSeen(msgspec.Struct, frozen=True):
    node_id: str
    address: str
    resources: Mapping[str, float]
    is_twice: bool = False
    """Whether Ray still counts a killed earlier node of this rank, for about half a minute, and
    would schedule work there.
    """


class NodeView:
    """The node table of Ray's head, without a driver connection.

    A driver connection takes a second and belongs to the script. The client is private in Ray.
    """

    def __init__(self, address: str, environ: Mapping[str, str]) -> None:
        self._address = address
        self._client: Any = None
        # Ray reads these at import, which happens later.
        os.environ.update(
            {name: value for name, value in environ.items() if name.startswith("RAY_")}
        )

    def _connected(self) -> Any:
        if self._client is None:
            from ray._raylet import GcsClient  # type: ignore[attr-defined]

            self._client = GcsClient(address=self._address)
        return self._client

    def nodes(self, run_id: str) -> dict[int, NodeSeen]:
        """Return the live nodes of the run by rank; {} if the head does not respond within 2 s."""
        from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]
        from ray.exceptions import RaySystemError, RpcError

        try:
            rows = self._connected().get_all_node_info(timeout=_ANSWER_S)
        except (RpcError, RaySystemError):
            return {}
        seen: dict[int, NodeSeen] = {}
        for node_id, row in rows.items():
            if row.state == GcsNodeInfo.ALIVE and row.labels.get(RUN_LABEL) == run_id:
                rank = int(row.labels[RANK_LABEL])
                seen[rank] = NodeSeen(
                    node_id.hex(),
                    row.node_manager_address,
                    dict(row.resources_total),
                    is_twice=rank in seen,
                )
        return seen

    def drain(self, node_id: str, reason: str, limit_s: float) -> None:
        """Drain a node that ends in ``limit_s`` seconds, like ``ray drain-node``.

        Raises:
            ConnectionError: The head does not respond or rejects the drain.
        """
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]
        from ray.exceptions import RaySystemError, RpcError

        until_ms = int((time.time() + limit_s) * 1000)
        try:
            client = self._connected()
            accepted, why = client.drain_node(
                node_id, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, reason, until_ms
            )
        except (RpcError, RaySystemError) as error:
            raise ConnectionError(str(error)) from error
        if not accepted:
            raise ConnectionError(why)

"""Supervisor of rank 0: the head's Ray, the table of nodes, the script and the end of the run."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

import msgspec

from helmsman._base.event_loop import Deadline
from helmsman._cluster.async_utils import (
    StatusPrinter,
    StoppedError,
    run_script,
    unless,
)
from helmsman._cluster.connection import (
    Ended,
    Hello,
    Joined,
    Leaving,
    PeerConnection,
    PeerLostError,
    Refused,
    Waiting,
    Welcome,
    proof_key,
)
from helmsman._cluster.node_desk import NodeDesk
from helmsman._cluster.node_plan import NodePlan, node_environ, ray_token
from helmsman._cluster.ray_process import NodeSeen, NodeView, RayProcess
from helmsman._process.guardian import TAG_VARIABLE, guard
from helmsman._wire.door import BACKLOG, Door
from helmsman._wire.tls import server_tls
from helmsman.api.errors import BootstrapError, BootstrapExit, PreflightError
from helmsman.api.plan import ranges
from helmsman.api.refusals import RefusalLog
from helmsman.controller._scheduler.run_registry import RUN_VARIABLE

_POLL_S = 0.1
_LEAVE_S = 3.0
"""Time for the other nodes to leave, in seconds."""


class NodeMember(msgspec.Struct):
    hello: Hello
    connection: PeerConnection
    state: Literal["arrived", "joined", "lost"] = "arrived"

    def __str__(self) -> str:
        return f"rank {self.hello.rank} ({self.hello.hostname} {self.hello.address})"


class Head:
    """The supervisor of rank 0.

    ``stop`` receives the exception that ends the run: a StoppedError, or a BootstrapError of this
    head.
    """

    def __init__(
        self,
        plan: NodePlan,
        report: StatusPrinter,
        stop: asyncio.Future[Any],
        make_view: Callable[[str, Mapping[str, str]], NodeView] = NodeView,
    ) -> None:
        self._plan, self._report, self._stop, self._make_view = plan, report, stop, make_view
        self._cluster = {setting.name: setting.value for setting in plan.cluster_settings}
        self._token = ray_token(plan.secret or secrets.token_hex(32), plan.run_id)
        self._environ = node_environ(plan, self._cluster, self._token, os.environ)
        self._ray = RayProcess(plan, self._environ, report)
        self._desk = NodeDesk(plan, report)
        self._members: dict[int, NodeMember] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """One task per connection and per draining node."""
        self._address = ""
        """Address of Ray after it is up."""
        self._view: NodeView | None = None
        self._began = self._ending = False
        self._door: Door | None = None

    async def run(self) -> int:
        """Run until the script ends.

        Returns:
            The exit code of the script, or 128 plus the number of the signal that ended the run.

        Raises:
            BootstrapError: The run failed; all nodes have received its end.
        """
        reason = "the head's supervisor has failed"
        try:
            code = await self._live()
            reason = f"the script has ended with exit code {code}"
        except StoppedError as stopped:
            code, reason = stopped.exit_code, str(stopped)
            self._report(f"{stopped}; the run ends")
        except BootstrapError as error:
            reason = str(error)
            raise
        finally:
            self._desk.note(f"ends the run: {reason}")
            await self._end(Ended(reason, failed=not self._began))
            self._desk.close()
        return code

    async def _live(self) -> int:
        plan, deadline = self._plan, Deadline(self._plan.timeout_s)
        guard(os.getpid(), plan.tag)
        if plan.identity.count > 1:
            self._listen()
        self._desk.note("starts Ray")
        self._address = await unless(self._stop, self._ray.start(plan.run_id))
        self._desk.note("waits for the other nodes")
        self._ray.ended.add_done_callback(self._ray_has_died)
        self._view = self._make_view(self._address, self._environ)
        for member in self._members.values():
            self._welcome(member)
        seen = await unless(self._stop, self._all_nodes(self._view, deadline))
        self._began = True
        self._report(
            f"{_summary(seen)} at {self._address}, all there after {deadline.elapsed_s:.1f} s; "
            "the script starts"
        )
        environ = {
            **self._environ,
            "RAY_ADDRESS": self._address,
            RUN_VARIABLE: plan.run_id,
            TAG_VARIABLE: plan.tag,
        }
        return await run_script(plan.command, environ, self._stop, plan.grace_s, self._runs)

    def _runs(self, pid: int) -> None:
        self._desk.script_pid = pid
        self._desk.note("runs the script")

    def _ray_has_died(self, ended: asyncio.Future[str]) -> None:
        self._interrupt(
            BootstrapError(
                f"Ray has died on the head: {ended.result()}", exit_code=BootstrapExit.RAY_DIED
            )
        )

    def _interrupt(self, why: StoppedError | BootstrapError) -> None:
        if not self._stop.done():
            self._stop.set_result(why)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _all_nodes(self, view: NodeView, deadline: Deadline) -> dict[int, NodeSeen]:
        """Wait until every rank has joined Ray with its devices. Raises BootstrapError."""
        reported = ""
        while True:
            seen = await asyncio.to_thread(view.nodes, self._plan.run_id)
            missing = {
                rank: why
                for rank in range(self._plan.identity.count)
                if (why := self._why_missing(rank, seen))
            }
            if not missing:
                for member in self._members.values():
                    member.connection.send(Waiting(""))
                return seen
            listed = _listed(missing)
            news = f"{len(missing)} of {self._plan.identity.count} nodes are missing: {listed}"
            self._desk.note("waits for the other nodes", missing=listed)
            if news != reported:
                reported = news
                self._report(
                    f"{news} (after {deadline.elapsed_s:.0f} s of at most {deadline.limit_s:g} s)"
                )
                for member in self._members.values():
                    member.connection.send(Waiting(news))
            if deadline.passed:
                raise BootstrapError(
                    f"{news}, after {deadline.limit_s:g} s. Check the output of the missing nodes; "
                    "if they only need more time, raise --timeout",
                    exit_code=BootstrapExit.NOT_JOINED,
                )
            await asyncio.sleep(_POLL_S)

    def _why_missing(self, rank: int, seen: Mapping[int, NodeSeen]) -> str:
        member = self._members.get(rank)
        if rank in seen and (member is None or member.state == "joined"):
            if seen[rank].is_twice:
                return f"{member}, Ray still counts the one that was killed before it"
            kind, num_devices = (
                (member.hello.device_kind, member.hello.num_devices) if member else ("", 0)
            )
            has = seen[rank].resources.get(kind, 0.0)
            return "" if has >= num_devices else f"{member}, {has:g} of {num_devices} {kind}"
        if rank == 0:
            return "rank 0, its Ray does not respond yet"
        if member is None:
            return f"rank {rank}, not connected"
        if member.state == "lost":
            return f"{member}, connection lost"
        return f"{member}, its Ray starts"

    def _listen(self) -> None:
        plan = self._plan
        try:
            listener = socket.create_server((plan.address, plan.control_port), backlog=BACKLOG)
        except OSError as error:  # the port was free when the plan was made
            raise PreflightError(
                f"port {plan.control_port}, to which the other nodes connect, cannot be bound on "
                f"{plan.address}: {os.strerror(error.errno or 0)}; set another with --control-port"
            ) from error
        self._door = Door(
            listener,
            proof_key(plan.secret, plan.job),
            tls=server_tls() if plan.tls else None,
            admit=lambda stream, host: self._spawn(
                self._serve(PeerConnection(stream, plan.timeouts))
            ),
            refusals=RefusalLog(self._report),
        )

    async def _serve(self, connection: PeerConnection) -> None:
        member: NodeMember | None = None
        try:
            while True:
                message = await connection.receive()
                if isinstance(message, Hello) and member is None:
                    member = NodeMember(message, connection)
                    if reason := self._why_not(message):
                        connection.send(Refused(reason))
                        self._report(f"{member} is rejected: {reason}")
                        return
                    self._members[message.rank] = member
                    if self._address:
                        self._welcome(member)
                elif isinstance(message, Joined) and member is not None:
                    member.state = "joined"
                elif isinstance(message, Leaving) and member is not None:
                    self._leaves(member, message)
        except PeerLostError as error:
            if member is not None and member.state != "lost":
                member.state = "lost"
                if self._began and not self._ending:
                    self._report(f"{member} is lost: {error}; the run continues without it")
        finally:
            await connection.close()

    def _why_not(self, hello: Hello) -> str:
        plan, here = self._plan, self._plan.identity
        if hello.count != here.count:
            return f"it expects {hello.count} nodes, the head expects {here.count}"
        if not 0 < hello.rank < here.count:
            last = here.count - 1
            return f"its rank is {hello.rank}; the head has rank 0, and waits for ranks 1 to {last}"
        other = self._members.get(hello.rank)
        if other is not None and other.state != "lost":
            return f"{other} is here already; every node needs a rank of its own"
        differing = [
            f"{name} {hello.versions.get(name, 'none')} there, {version} on the head"
            for name, version in plan.versions.items()
            if hello.versions.get(name) != version
        ]
        same = "Install the same on every node"
        return f"versions differ: {'; '.join(differing)}. {same}" if differing else ""

    def _welcome(self, member: NodeMember) -> None:
        token = "" if self._plan.secret else self._token
        member.connection.send(
            Welcome(
                run_id=self._plan.run_id,
                address=self._address,
                variables=self._cluster,
                token=token,
            )
        )

    def _leaves(self, member: NodeMember, message: Leaving) -> None:
        member.state = "lost"
        self._report(f"{member} leaves: {message.reason}")
        if not self._began:
            text = f"{member} left before the run began: {message.reason}"
            self._interrupt(BootstrapError(text, exit_code=BootstrapExit.NOT_JOINED))
        elif message.signal and self._plan.elastic:
            self._spawn(self._drain(member, message.reason))
        elif message.signal:
            self._interrupt(StoppedError(message.signal, str(member)))

    async def _drain(self, member: NodeMember, reason: str) -> None:
        """Drain the node in Ray, so that the script can move its work."""
        assert self._view is not None
        try:
            node = (await asyncio.to_thread(self._view.nodes, self._plan.run_id))[member.hello.rank]
            await asyncio.to_thread(self._view.drain, node.node_id, reason, self._plan.grace_s)
        except (KeyError, ConnectionError) as error:
            self._report(
                f"Ray does not drain the node of {member}, so its processes end with it: {error}"
            )

    async def _end(self, ended: Ended) -> None:
        self._ending = True
        for member in self._members.values():
            member.connection.send(ended)
        if self._door is not None:
            self._door.close()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_LEAVE_S)
        for task in list(self._tasks):
            task.cancel()
        await self._ray.stop()


def _summary(seen: Mapping[int, NodeSeen]) -> str:
    totals = {
        name: sum(node.resources.get(name, 0.0) for node in seen.values())
        for name in ("CPU", "GPU", "NPU")
    }
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in totals.items() if amount)
    return f"{len(seen)} node{'s' if len(seen) > 1 else ''} with {amounts}"


def _listed(missing: Mapping[int, str], most: int = 8) -> str:
    """List a few missing ranks with their state, and the others by number."""
    first, rest = list(missing.values())[:most], list(missing)[most:]
    ranks = ranges(rest).replace(",", ", ")
    return "; ".join([*first, f"and {len(rest)} more, ranks {ranks}"] if rest else first)

"""Rank 0: the head's Ray, the roll of the nodes, the script, and the end of it all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from helmsman.api.errors import BootstrapError, BootstrapExit, PreflightError
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._bootstrap.async_utils import StoppedError, Tell, cancelled, first, unless
from helmsman.controller._bootstrap.connection import (
    Ended,
    Hello,
    Join,
    Joined,
    Leaving,
    Link,
    LinkLostError,
    Refused,
    Waiting,
    Welcome,
    proof_key,
)
from helmsman.controller._bootstrap.node_plan import NodePlan, lease, node_environ, ray_start, ray_token
from helmsman.controller._bootstrap.ray_process import RayProcess
from helmsman.controller._bootstrap.ray_view import NodeSeen, RayHead, SeesNodes
from helmsman.controller._bootstrap.script import Script
from helmsman.controller._node.run_registry import RUN_VARIABLE
from helmsman.rpc_server._process.guardian import TAG_VARIABLE, guard
from helmsman.rpc_server._server.authenticated_server import BACKLOG, Door, RefusalLog
from helmsman.rpc_server._wire.stream import Stream
from helmsman.rpc_server._wire.tls import server_tls
from helmsman.rpc_server.ports import PortLeases

T = TypeVar("T")

_POLL_S = 0.1
_LEAVE_S = 3.0
"""How long the other nodes may take to leave."""
_ORPHANED_SCRIPT_S = 3.0
"""How long the script may go on when Ray has died under it."""


class Member(msgspec.Struct):
    """Another node, as the head sees it."""

    hello: Hello
    link: Link
    state: Literal["arrived", "joined", "lost"] = "arrived"

    def __str__(self) -> str:
        return f"rank {self.hello.rank} ({self.hello.hostname} {self.hello.address})"


class Head:
    """The supervisor of rank 0.

    Args:
        tell: prints news.
        stop: settled when this process is told to stop.
        make_view: of an address and an environment, what asks the head for its nodes.
    """

    def __init__(
        self,
        plan: NodePlan,
        tell: Tell,
        stop: asyncio.Future[StoppedError],
        make_view: Callable[[str, Mapping[str, str]], SeesNodes] = RayHead,
    ) -> None:
        self._plan, self._tell, self._stop, self._make_view = plan, tell, stop, make_view
        self._cluster = {setting.name: setting.value for setting in plan.cluster_settings}
        self._token = ray_token(plan.secret or secrets.token_hex(32), plan.run_id)
        self._environ = node_environ(plan, self._cluster, self._token, os.environ)
        self._leases = PortLeases()
        self._members: dict[int, Member] = {}
        self._left: asyncio.Future[BootstrapError] = asyncio.get_running_loop().create_future()
        """Settled when a node has left before the run began."""
        self._served: set[asyncio.Task[None]] = set()
        """One for each connection."""
        self._address = ""
        """Of Ray, once it is up."""
        self._view: SeesNodes | None = None
        self._draining: set[asyncio.Task[None]] = set()
        self._began = self._ending = False
        self._door: Door | None = None
        self._ray: RayProcess | None = None

    async def run(self) -> int:
        """Live; returns the exit code of the script, or 128 and the number of the signal that ended the run.

        Raises: BootstrapError, with all nodes told to leave.
        """
        ended = Ended(1, "the head's supervisor has failed", failed=True)
        try:
            code = await self._live()
            ended = Ended(code, f"the script has ended with exit code {code}")
        except StoppedError as stopped:
            code = stopped.exit_code
            ended = Ended(code, str(stopped), failed=not self._began)
            self._tell(f"{stopped}; the run ends")
        except BootstrapError as error:
            ended = Ended(error.exit_code, str(error), failed=not self._began)
            raise
        finally:
            await self._end(ended)
        return code

    async def _live(self) -> int:
        plan = self._plan
        guard(os.getpid(), plan.tag)
        if plan.identity.count > 1:
            self._listen()
        elif not plan.port:
            self._plan = plan = msgspec.structs.replace(plan, port=lease(self._leases, 1)[0])
        address = f"{plan.address}:{plan.port}"
        log = plan.folder / "ray_start.log"
        command = ray_start(plan, plan.run_id, self._leases)
        self._ray = RayProcess(command, self._environ, plan.tag, log, plan.ray_start_s, self._tell)
        deadline = Deadline(plan.timeout_s)
        await self._unless_ended(self._ray.start())
        self._address = address
        for member in self._members.values():
            member.link.send(Join(address))
        seen = await self._unless_ended(self._all_nodes(deadline))
        self._began = True
        self._tell(f"{_summary(seen)} at {address}, all there after {deadline.elapsed_s:.1f} s; the script starts")
        return await self._run_script()

    async def _unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """Do a part of the start, and break it off when told to stop, or when a node has left."""
        task = asyncio.ensure_future(unless(self._stop, work))
        await first(task, self._left)
        if not task.done():
            await cancelled(task)
            raise self._left.result()
        return task.result()

    # --- the roll ---------------------------------------------------------------------------------------------------------

    async def _all_nodes(self, deadline: Deadline) -> dict[int, NodeSeen]:
        """Wait until Ray knows every rank, with its devices. Raises: BootstrapError."""
        assert self._ray is not None
        view = self._view = self._make_view(self._address, self._environ)
        died = asyncio.ensure_future(self._ray.ended())
        told = ""
        try:
            while True:
                seen = await view.nodes(self._plan.run_id)
                missing = {rank: why for rank in range(self._plan.identity.count) if (why := self._why_missing(rank, seen))}
                if not missing:
                    return seen
                if died.done():
                    raise _ray_died(died.result())
                news = f"{len(missing)} of {self._plan.identity.count} nodes are missing: {_listed(missing)}"
                if news != told:
                    told = news
                    self._tell(f"{news} (after {deadline.elapsed_s:.0f} s of at most {deadline.limit_s:g} s)")
                    for member in self._members.values():
                        member.link.send(Waiting(news))
                if deadline.passed:
                    present = ", ".join(f"rank {rank} ({node.address})" for rank, node in sorted(seen.items())) or "none"
                    raise BootstrapError(
                        f"{news}, after {deadline.limit_s:g} s. There are: {present}. Look at what the missing "
                        "nodes have printed; where they only need longer, give more with --timeout",
                        exit_code=BootstrapExit.NOT_JOINED,
                    )
                await asyncio.sleep(_POLL_S)
        finally:
            await cancelled(died)

    def _why_missing(self, rank: int, seen: Mapping[int, NodeSeen]) -> str:
        member = self._members.get(rank)
        if rank in seen and (member is None or member.state == "joined"):
            if seen[rank].is_twice:
                return f"{member}, Ray still counts the one that was killed before it"
            kind, num_devices = (member.hello.device_kind, member.hello.num_devices) if member else ("", 0)
            has = seen[rank].resources.get(kind, 0.0)
            return "" if has >= num_devices else f"{member}, {has:g} of {num_devices} {kind}"
        if rank == 0:
            return "rank 0, its own Ray does not answer yet"
        if member is None:
            return f"rank {rank}, never heard of"
        if member.state == "lost":
            return f"{member}, was here and has gone"
        return f"{member}, its Ray starts" if self._address else f"{member}, waits for the head"

    # --- the other nodes --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        plan = self._plan
        try:
            listener = socket.create_server((plan.address, plan.control_port), backlog=BACKLOG)
        except OSError as error:  # it was free a moment ago, when the plan was made
            raise PreflightError(
                f"port {plan.control_port}, on which the nodes' supervisors meet, cannot be had on {plan.address}: "
                f"{os.strerror(error.errno or 0)}. Another run may have started here at the same moment: choose another by "
                "--control-port"
            ) from error
        self._door = Door(
            listener,
            proof_key(plan.secret, plan.job),
            tls=server_tls() if plan.tls else None,
            admit=self._admit,
            refusals=RefusalLog(self._tell),
        )

    def _admit(self, stream: Stream, host: str) -> None:
        task = asyncio.ensure_future(self._serve(Link(stream, self._plan.patience)))
        self._served.add(task)
        task.add_done_callback(self._served.discard)

    async def _serve(self, link: Link) -> None:
        try:
            hello = await link.receive()
            if not isinstance(hello, Hello):
                return
            if refusal := self._why_not(hello):
                link.send(refusal)
                if not refusal.ended:
                    self._tell(f"rank {hello.rank} ({hello.hostname} {hello.address}) is not taken: {refusal.reason}")
                return
            await self._attend(hello, link)
        except LinkLostError:
            return  # before it said who it is
        finally:
            await link.close()

    def _why_not(self, hello: Hello) -> Refused | None:
        plan, here = self._plan, self._plan.identity
        if hello.run_id and hello.run_id != plan.run_id:
            return Refused("the run to which it belonged has ended", ended=True)
        if hello.count != here.count:
            return Refused(f"it was told of {hello.count} nodes, the head of {here.count}")
        if not 0 < hello.rank < here.count:
            return Refused(f"its rank is {hello.rank}; the head, which has rank 0, waits for ranks 1 to {here.count - 1}")
        other = self._members.get(hello.rank)
        if other is not None and other.state != "lost" and other.hello.process != hello.process:
            return Refused(f"{other} is here already; every node needs a rank of its own")
        differing = [
            f"{name} {hello.versions.get(name, 'none')} there, {version} on the head"
            for name, version in plan.versions.items()
            if hello.versions.get(name) != version
        ]
        if differing:
            return Refused(f"versions differ: {'; '.join(differing)}. Install the same on every node")
        return None

    async def _attend(self, hello: Hello, link: Link) -> None:
        """Serve a node until it leaves or is lost."""
        if (before := self._members.get(hello.rank)) is not None:
            before.link.drop()  # the node has given that one up
        member = self._members[hello.rank] = Member(hello, link)
        token = "" if self._plan.secret else self._token
        link.send(Welcome(run_id=self._plan.run_id, variables=self._cluster, token=token))
        if hello.run_id:
            member.state = "joined"
            self._tell(f"{member} is back")
        elif self._address:
            link.send(Join(self._address))
        try:
            async for message in link.messages():
                if isinstance(message, Joined):
                    member.state = "joined"
                elif isinstance(message, Leaving):
                    self._leaves(member, message)
        except LinkLostError as error:
            if self._members.get(hello.rank) is member and member.state != "lost":
                member.state = "lost"
                if self._began and not self._ending:
                    self._tell(f"{member} is lost: {error}; the run goes on without it")

    def _leaves(self, member: Member, message: Leaving) -> None:
        member.state = "lost"
        self._tell(f"{member} leaves: {message.reason}")
        if not self._began:
            if not self._left.done():
                text = f"{member} left before the run began: {message.reason}"
                self._left.set_result(BootstrapError(text, exit_code=BootstrapExit.NOT_JOINED))
        elif message.signal and self._plan.elastic:
            draining = asyncio.ensure_future(self._drain(member, message.reason))
            self._draining.add(draining)
            draining.add_done_callback(self._draining.discard)
        elif message.signal and not self._stop.done():
            self._stop.set_result(StoppedError(message.signal, str(member)))

    async def _drain(self, member: Member, reason: str) -> None:
        """Let Ray know, and by it the script, which may move what runs there."""
        assert self._view is not None
        try:
            node = (await self._view.nodes(self._plan.run_id))[member.hello.rank]
            await self._view.drain(node.node_id, reason, self._plan.grace_s)
        except (KeyError, ConnectionError) as error:
            self._tell(f"Ray was not told that {member} leaves, so what runs there ends with it: {error}")

    # --- the script -------------------------------------------------------------------------------------------------------

    async def _run_script(self) -> int:
        assert self._ray is not None
        environ = {**self._environ, "RAY_ADDRESS": self._address, RUN_VARIABLE: self._plan.run_id, TAG_VARIABLE: self._plan.tag}
        script = await Script.start(self._plan.command, environ)
        ended, died = asyncio.ensure_future(script.ended()), asyncio.ensure_future(self._ray.ended())
        try:
            await first(ended, died, self._stop)
            if ended.done():
                return ended.result()
            if self._stop.done():
                await script.stop(self._stop.result().number, self._plan.grace_s)
                raise self._stop.result()
            await script.stop(signal.SIGTERM, _ORPHANED_SCRIPT_S)
            raise _ray_died(died.result())
        finally:
            await cancelled(ended, died)

    async def _end(self, ended: Ended) -> None:
        self._ending = True
        for member in self._members.values():
            member.link.send(ended)
        if self._door is not None:
            self._door.close()
        if self._served:
            await asyncio.wait(self._served, timeout=_LEAVE_S)
        for task in [*self._served, *self._draining]:
            task.cancel()
        if self._ray is not None:
            await self._ray.stop()
        with contextlib.suppress(OSError):
            self._leases.close()


def _summary(seen: Mapping[int, NodeSeen]) -> str:
    totals: dict[str, float] = {}
    for node in seen.values():
        for name in ("CPU", "GPU", "NPU"):
            totals[name] = totals.get(name, 0.0) + node.resources.get(name, 0.0)
    had = ", ".join(f"{amount:g} {name}" for name, amount in totals.items() if amount)
    return f"{len(seen)} node{'s' if len(seen) > 1 else ''} with {had}"


def _listed(missing: Mapping[int, str], most: int = 8) -> str:
    """Few by name and state, many by number."""
    parts = list(missing.values())
    more = len(parts) - most
    return "; ".join(parts[:most]) + (f"; and {more} more, ranks {_ranges(list(missing)[most:])}" if more > 0 else "")


def _ranges(ranks: list[int]) -> str:
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _ray_died(how: str) -> BootstrapError:
    return BootstrapError(f"Ray has died on the head: {how}", exit_code=BootstrapExit.RAY_DIED)

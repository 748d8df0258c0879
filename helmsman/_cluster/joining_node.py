"""Supervisor of a node other than the head: finds the head, joins, and leaves with it."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, TypeVar

from helmsman._base.event_loop import Deadline
from helmsman._cluster.async_utils import (
    StatusPrinter,
    StoppedError,
    cancelled,
    first,
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
    connect,
    proof_key,
)
from helmsman._cluster.node_desk import NodeDesk
from helmsman._cluster.node_plan import NodePlan, node_environ, ray_token
from helmsman._cluster.ray_process import RayProcess
from helmsman._process.guardian import guard
from helmsman.api.errors import BootstrapError, BootstrapExit, ProtocolError

M = TypeVar("M", Welcome, Ended)

_RETRY_S = 0.2


class JoiningNode:
    """The supervisor of a rank above 0; ``stop`` is done when this process receives a signal."""

    def __init__(
        self, plan: NodePlan, report: StatusPrinter, stop: asyncio.Future[StoppedError]
    ) -> None:
        self._plan, self._report, self._stop = plan, report, stop
        self._where = f"{plan.identity.head}:{plan.control_port}"
        self._connection: PeerConnection | None = None
        self._ray: RayProcess | None = None
        self._has_joined = False
        self._desk = NodeDesk(plan, report)

    async def run(self) -> int:
        """Join, and run until the head ends the run.

        Returns:
            0 if this node had joined and the head then ended the run, or 128 plus the number of the
            signal that ended this node.

        Raises:
            BootstrapError: The node could not join, its Ray died or the head was lost.
        """
        guard(os.getpid(), self._plan.tag)
        try:
            ended = await self._live()
        except StoppedError as stopped:
            self._report(f"{stopped}; it leaves")
            await self._say_goodbye(Leaving(str(stopped), stopped.number), self._plan.grace_s)
            return stopped.exit_code
        except BootstrapError as error:
            if error.exit_code in (BootstrapExit.PREFLIGHT, BootstrapExit.RAY_DIED):
                # Otherwise the head has ended the run, or is lost.
                await self._say_goodbye(Leaving(str(error)), 0.0)
            raise
        finally:
            if self._ray is not None:
                await self._ray.stop()
            if self._connection is not None:
                await self._connection.close()
            self._desk.close()
        self._report(f"the run has ended: {ended.reason}; this node has left")
        return 0

    async def _live(self) -> Ended:
        plan = self._plan
        self._desk.note("looks for the head", missing=f"rank 0 ({self._where}) does not answer")
        self._connection = connection = await unless(
            self._stop, self._reach(Deadline(plan.timeout_s))
        )
        welcome = await unless(self._stop, self._introduce(connection))
        self._desk.note("starts Ray")
        token = ray_token(plan.secret, welcome.run_id) if plan.secret else welcome.token
        self._ray = ray = RayProcess(
            plan, node_environ(plan, welcome.variables, token, os.environ), self._report
        )
        starting = asyncio.ensure_future(ray.start(welcome.run_id, welcome.address))
        attending = asyncio.ensure_future(self._receive(connection, Ended))
        try:
            await first(starting, attending, self._stop)
            if starting.done() and not self._stop.done():
                starting.result()
                self._has_joined = True
                connection.send(Joined())
                self._desk.note("is part of the run")
                self._report(f"joined the cluster at {welcome.address}")
                await first(ray.ended, attending, self._stop)
            if attending.done():
                return attending.result()
            if self._stop.done():
                raise self._stop.result()
            why = ray.ended.result()
            if connection.is_silent:  # Ray exits after its head is lost
                raise self._lost(f"it is silent, and Ray has died on this node: {why}")
            raise BootstrapError(
                f"Ray has died on this node: {why}", exit_code=BootstrapExit.RAY_DIED
            )
        finally:
            await cancelled(starting, attending)

    async def _reach(self, deadline: Deadline) -> PeerConnection:
        """Connect to the head, which may start later. Raises BootstrapError."""
        plan, reported = self._plan, set()
        key = proof_key(plan.secret, plan.job)
        while True:
            try:
                return await connect(
                    plan.identity.head, plan.control_port, key, plan.timeouts, tls=plan.tls
                )
            except ProtocolError as error:
                raise BootstrapError(
                    f"the head was not joined: {error}. Give every node of this run the same "
                    "token (--token-file, or "
                    "HELMSMAN_TOKEN), number of nodes and --control-port",
                    exit_code=BootstrapExit.REFUSED,
                ) from error
            except (OSError, PeerLostError) as error:
                news = f"the head at {self._where} does not answer ({error})"
                if news not in reported:
                    reported.add(news)
                    self._report(f"{news}; trying for {deadline.remaining_s:.0f} s more")
                if deadline.passed:
                    raise BootstrapError(
                        f"{news}, after {deadline.limit_s:g} s: rank 0 is missing. Check its "
                        "output; that host must run rank 0 and its firewall must allow the ports",
                        exit_code=BootstrapExit.NOT_JOINED,
                    ) from error
            await asyncio.sleep(_RETRY_S)

    async def _introduce(self, connection: PeerConnection) -> Welcome:
        """Wait until the head accepts this node, with its Ray up. Raises BootstrapError."""
        plan = self._plan
        connection.send(
            Hello(
                rank=plan.identity.rank,
                count=plan.identity.count,
                hostname=socket.gethostname(),
                address=plan.address,
                versions=plan.versions,
                num_devices=plan.num_devices,
                device_kind=plan.device_kind,
            )
        )
        self._report(f"the head at {self._where} answers; waiting for its Ray")
        self._desk.note("waits for the head's Ray")
        return await self._receive(connection, Welcome)

    async def _receive(self, connection: PeerConnection, kind: type[M]) -> M:
        """Return the next message of a kind, and print what the head waits for.

        Raises:
            BootstrapError: The head rejects this node, is lost, or has ended a run that this node
                was never part of.
        """
        while True:
            try:
                message = await connection.receive()
            except PeerLostError as error:
                raise self._lost(str(error)) from error
            if isinstance(message, Waiting):
                if message.text:
                    self._report(message.text)
                doing = "waits for the other nodes" if message.text else "is part of the run"
                self._desk.note(doing, missing=message.text)
            elif isinstance(message, Refused):
                raise BootstrapError(
                    f"the head at {self._where} rejected this node: {message.reason}",
                    exit_code=BootstrapExit.REFUSED,
                )
            elif isinstance(message, Ended) and (message.failed or not self._has_joined):
                how = "did not begin" if message.failed else "has ended before this node had joined"
                raise BootstrapError(
                    f"the run {how}: {message.reason}", exit_code=BootstrapExit.NOT_JOINED
                )
            elif isinstance(message, kind):
                return message

    def _lost(self, why: str) -> BootstrapError:
        return BootstrapError(
            f"the head at {self._where} is lost ({why}); whether the run continues there is "
            "unknown",
            exit_code=BootstrapExit.HEAD_LOST,
        )

    async def _say_goodbye(self, message: Leaving, wait_s: float) -> None:
        """Send the reason to the head, and wait so that it can end the run before Ray stops here.

        An elastic run drops this node earlier, after its work has moved: the head drains Ray, which
        then exits by itself.
        """
        if self._connection is None:
            return
        self._connection.send(message)
        answered = asyncio.ensure_future(self._receive(self._connection, Ended))
        waited: list[asyncio.Future[Any]] = [answered, *([self._ray.ended] if self._ray else [])]
        await asyncio.wait(waited, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        await cancelled(answered)

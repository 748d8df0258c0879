"""Supervisor of a node other than the head: finds the head, joins, and leaves with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any

from helmsman.api.errors import BootstrapError, BootstrapExit, ProtocolError
from helmsman.controller._aio.event_loop import Deadline
from helmsman.controller._bootstrap.async_utils import (
    StatusPrinter,
    StoppedError,
    cancelled,
    first,
    unless,
)
from helmsman.controller._bootstrap.connection import (
    Ended,
    Hello,
    Joined,
    Leaving,
    Message,
    PeerConnection,
    PeerLostError,
    Refused,
    Waiting,
    Welcome,
    connect,
    proof_key,
)
from helmsman.controller._bootstrap.node_desk import NodeDesk
from helmsman.controller._bootstrap.node_plan import NodePlan, node_environ, ray_token
from helmsman.controller._bootstrap.ray_process import RayProcess
from helmsman.rpc_server._process.guardian import guard

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
        self._run_id = ""
        self._has_joined = False
        self._reported: set[str] = set()
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
            if error.exit_code in (
                BootstrapExit.PREFLIGHT,
                BootstrapExit.RAY_DIED,
            ):
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
        self._desk.note("looks for the head", is_apart=True)
        welcome = await unless(self._stop, self._arrive(Deadline(plan.timeout_s)))
        assert self._connection is not None
        self._run_id = welcome.run_id
        self._desk.note("starts Ray")
        token = ray_token(plan.secret, welcome.run_id) if plan.secret else welcome.token
        self._ray = ray = RayProcess(
            plan, node_environ(plan, welcome.variables, token, os.environ), self._report
        )
        starting = asyncio.ensure_future(ray.start(welcome.run_id, welcome.address))
        attending = asyncio.ensure_future(self._attend())
        try:
            await first(starting, attending, self._stop)
            if starting.done() and not self._stop.done():
                starting.result()
                self._has_joined = True
                self._connection.send(Joined())
                self._desk.note("is part of the run")
                self._report(f"joined the cluster at {welcome.address}")
                await first(ray.ended, attending, self._stop)
                while not (
                    attending.done() or self._stop.done() or await self._connection.is_heard()
                ):
                    continue  # Ray exits after its head is lost; the head's state decides
            if attending.done():
                return attending.result()
            if self._stop.done():
                raise self._stop.result()
            raise BootstrapError(
                f"Ray has died on this node: {ray.ended.result()}", exit_code=BootstrapExit.RAY_DIED
            )
        finally:
            await cancelled(starting, attending)

    def _report_once(self, news: str, details: str = "") -> None:
        if news not in self._reported:
            self._reported.add(news)
            self._report(news + details)

    async def _arrive(self, deadline: Deadline) -> Welcome:
        """Find the head and wait until its Ray is up. Raises BootstrapError."""
        while True:
            try:
                return await self._introduce()
            except ProtocolError as error:
                raise BootstrapError(
                    f"the head was not joined: {error}. Give every node of this run the same "
                    "token (--token-file, or "
                    "HELMSMAN_TOKEN), number of nodes and --control-port",
                    exit_code=BootstrapExit.REFUSED,
                ) from error
            except (OSError, PeerLostError) as error:
                news = f"the head at {self._where} does not answer ({error})"
                self._report_once(news, f"; trying for {deadline.remaining_s:.0f} s more")
                if deadline.passed:
                    raise BootstrapError(
                        f"{news}, after {deadline.limit_s:g} s: rank 0 is missing. Check its "
                        "output; that host must run rank 0 and its firewall must allow the ports",
                        exit_code=BootstrapExit.NOT_JOINED,
                    ) from error
            await asyncio.sleep(_RETRY_S)

    async def _introduce(self) -> Welcome:
        """Connect, and wait until the head accepts this node.

        Raises:
            OSError: The head does not respond.
            PeerLostError: The head does not respond.
            ProtocolError: The listener is not the head of this run.
            BootstrapError: The head rejects this node, or has ended the run.
        """
        plan = self._plan
        key = proof_key(plan.secret, plan.job)
        connection = await connect(
            plan.identity.head, plan.control_port, key, plan.timeouts, tls=plan.tls
        )
        connection.send(
            Hello(
                rank=plan.identity.rank,
                count=plan.identity.count,
                hostname=socket.gethostname(),
                address=plan.address,
                process=plan.run_id,
                versions=plan.versions,
                num_devices=plan.num_devices,
                device_kind=plan.device_kind,
                run_id=self._run_id,
                has_joined=self._has_joined,
            )
        )
        self._connection = connection
        self._report_once(f"the head at {self._where} answers; waiting for its Ray")
        if not self._has_joined:
            self._desk.note("waits for the head's Ray")
        try:
            while not isinstance(message := await self._next(connection), Welcome):
                if isinstance(message, Refused) and message.ended:
                    raise ProtocolError(
                        f"the head at {self._where} belongs to another run: {message.reason}"
                    )
                if isinstance(message, Refused):
                    text = f"the head at {self._where} rejected this node: {message.reason}"
                    raise BootstrapError(text, exit_code=BootstrapExit.REFUSED)
        except Exception:  # a cancelled wait keeps the connection for the final message
            await connection.close()
            raise
        return message

    async def _next(self, connection: PeerConnection) -> Message:
        """Return the next message, and print Waiting. Raises PeerLostError or BootstrapError."""
        while isinstance(message := await connection.receive(), Waiting):
            if message.text:
                self._report(message.text)
            doing = "waits for the other nodes" if message.text else "is part of the run"
            self._desk.note(doing, missing=message.text)
        return self._required(message) if isinstance(message, Ended) else message

    def _required(self, ended: Ended) -> Ended:
        """Return ``ended``. Raises BootstrapError if this node was never part of the run."""
        if ended.failed or not self._has_joined:
            how = (
                "the run did not begin"
                if ended.failed
                else "the run has ended before this node had joined"
            )
            raise BootstrapError(f"{how}: {ended.reason}", exit_code=BootstrapExit.NOT_JOINED)
        return ended

    async def _attend(self) -> Ended:
        assert self._connection is not None
        while True:
            try:
                if isinstance(message := await self._next(self._connection), Ended):
                    return message
            except PeerLostError as error:
                self._desk.note("looks for the head again", is_apart=True)
                await self._connection.close()
                if ended := await self._seek_again(str(error)):
                    return ended

    async def _seek_again(self, why: str) -> Ended | None:
        """Reconnect; return None, or the end of the run if its head has exited.

        Raises:
            BootstrapError: The head is lost, or another node has taken this rank.
        """
        timeouts = self._plan.timeouts
        deadline, refusals = Deadline(timeouts.unreachable_s), Deadline(timeouts.refused_s)
        while True:
            try:
                await self._introduce()
                self._report("the connection to the head was lost and is restored")
                self._desk.note("is part of the run")
                return None
            except ConnectionRefusedError:
                if refusals.passed:
                    return self._required(Ended("its head has exited"))
            except ProtocolError:
                return self._required(
                    Ended("its head has exited, and another program has taken its port")
                )
            except (OSError, PeerLostError) as error:
                refusals = Deadline(timeouts.refused_s)
                if deadline.passed:
                    raise BootstrapError(
                        f"the head at {self._where} cannot be reached ({why}, then: {error}); "
                        "whether the run continues there is unknown",
                        exit_code=BootstrapExit.HEAD_LOST,
                    ) from error
            await asyncio.sleep(_RETRY_S)

    async def _say_goodbye(self, message: Leaving, wait_s: float) -> None:
        """Send the reason to the head, and wait so that it can end the run before Ray stops here.

        An elastic run drops this node earlier, after its work has moved: the head drains Ray, which
        then exits by itself.
        """
        if self._connection is None:
            return
        self._connection.send(message)
        answered = asyncio.ensure_future(self._until_ended(self._connection))
        waited: list[asyncio.Future[Any]] = [answered, *([self._ray.ended] if self._ray else [])]
        await asyncio.wait(waited, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        await cancelled(answered)

    async def _until_ended(self, connection: PeerConnection) -> None:
        with contextlib.suppress(PeerLostError):
            while not isinstance(await connection.receive(), Ended):
                pass

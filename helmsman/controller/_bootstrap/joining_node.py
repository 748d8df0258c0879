"""A node that is not the head: finds the head, joins, and leaves with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine
from typing import Any

from helmsman.api.errors import BootstrapError, BootstrapExit, ProtocolError
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
    connect,
    proof_key,
)
from helmsman.controller._bootstrap.node_plan import NodePlan, node_environ, ray_start, ray_token
from helmsman.controller._bootstrap.ray_process import RayProcess
from helmsman.rpc_server._process.guardian import guard
from helmsman.rpc_server.ports import PortLeases

_RETRY_S = 0.2


class Member:
    """The supervisor of a rank above 0.

    Args:
        tell: prints news.
        stop: settled when this process is told to stop.
    """

    def __init__(self, plan: NodePlan, tell: Tell, stop: asyncio.Future[StoppedError]) -> None:
        self._plan, self._tell, self._stop = plan, tell, stop
        self._where = f"{plan.identity.head}:{plan.control_port}"
        self._key = proof_key(plan.secret, plan.job)
        self._leases = PortLeases()
        self._link: Link | None = None
        self._run_id = ""
        self._ray: RayProcess | None = None

    async def run(self) -> int:
        """Live; returns 0 when this node had joined and the head then ended its run, or 128 and the number of the signal that
        ended this node.

        Raises: BootstrapError.
        """
        guard(os.getpid(), self._plan.tag)
        try:
            ended = await self._live()
        except StoppedError as stopped:
            self._tell(f"{stopped}; it leaves")
            await self._say_goodbye(Leaving(str(stopped), stopped.number), self._plan.grace_s)
            return stopped.exit_code
        except BootstrapError as error:
            if error.exit_code in (BootstrapExit.PREFLIGHT, BootstrapExit.RAY_DIED):  # else the head has ended it, or is lost
                await self._say_goodbye(Leaving(str(error)), 0.0)
            raise
        finally:
            if self._ray is not None:
                await self._ray.stop()
            if self._link is not None:
                await self._link.close()
            self._leases.close()
        self._tell(f"the run has ended: {ended.reason}; this node has left")
        return 0

    async def _live(self) -> Ended:
        """Join, and stay until the run has ended; returns how."""
        plan, deadline = self._plan, Deadline(self._plan.timeout_s)
        welcome, head = await unless(self._stop, self._arrive(deadline))
        self._run_id = welcome.run_id
        token = ray_token(plan.secret, welcome.run_id) if plan.secret else welcome.token
        environ = node_environ(plan, welcome.variables, token, os.environ)
        command = ray_start(plan, welcome.run_id, self._leases, head)
        log = plan.folder / "ray_start.log"
        self._ray = RayProcess(command, environ, self._plan.tag, log, plan.ray_start_s, self._tell)
        await unless(self._stop, self._or_died(self._ray.start()))
        assert self._link is not None
        self._link.send(Joined())
        self._tell(f"joined the cluster at {head}")
        died = asyncio.ensure_future(self._ray.ended())
        attending = asyncio.ensure_future(self._attend())
        try:
            await first(died, attending, self._stop)
            if not attending.done() and not self._stop.done() and not await self._link.is_heard():
                await first(attending, self._stop)  # Ray ends by itself where its head is gone: what matters is the head
            if attending.done():
                return attending.result()
            if self._stop.done():
                raise self._stop.result()
            raise BootstrapError(f"Ray has died on this node: {died.result()}", exit_code=BootstrapExit.RAY_DIED)
        finally:
            await cancelled(died, attending)

    # --- before it has joined ---------------------------------------------------------------------------------------------

    async def _arrive(self, deadline: Deadline) -> tuple[Welcome, str]:
        """Find the head, and wait until its Ray is up; returns its address. Raises: BootstrapError."""
        told = ""
        while True:
            try:
                welcome = await self._introduce()
                if self._run_id != welcome.run_id:
                    self._run_id = welcome.run_id
                    self._tell(f"the head at {self._where} knows this node; waiting for its Ray")
                return welcome, await self._await_join()
            except ProtocolError as error:
                raise BootstrapError(
                    f"the head was not joined: {error}. Give every node of this run the same token (--token-file, or "
                    "HELMSMAN_TOKEN), number of nodes and --control-port",
                    exit_code=BootstrapExit.REFUSED,
                ) from error
            except (OSError, LinkLostError) as error:
                news = f"the head at {self._where} does not answer ({error})"
                if news != told:
                    told = news
                    self._tell(f"{news}; it is sought for {deadline.remaining_s:.0f} s more")
                if deadline.passed:
                    raise BootstrapError(
                        f"{news}, after {deadline.limit_s:g} s: rank 0 is missing. Look at what it has printed; that host must "
                        "be the one where rank 0 runs, and let ports through",
                        exit_code=BootstrapExit.NOT_JOINED,
                    ) from error
            await asyncio.sleep(_RETRY_S)

    async def _introduce(self, run_id: str = "") -> Welcome:
        """Connect and say who this is.

        Args:
            run_id: of the run to which it belongs; '' before it has joined.

        Raises: OSError and LinkLostError (nobody answers), ProtocolError (another run's head, or no head, does),
            BootstrapError (the head refuses this node).
        """
        plan = self._plan
        link = await connect(plan.identity.head, plan.control_port, self._key, plan.patience, tls=plan.tls)
        link.send(
            Hello(
                rank=plan.identity.rank,
                count=plan.identity.count,
                hostname=socket.gethostname(),
                address=plan.address,
                process=plan.run_id,
                versions=plan.versions,
                num_devices=plan.num_devices,
                device_kind=plan.device_kind,
                run_id=run_id,
            )
        )
        try:
            answer = await link.receive()
            if isinstance(answer, Refused):
                if answer.ended:
                    raise ProtocolError(f"the head at {self._where} is another run's: {answer.reason}")
                text = f"the head at {self._where} does not take this node: {answer.reason}"
                raise BootstrapError(text, exit_code=BootstrapExit.REFUSED)
            if not isinstance(answer, Welcome):
                raise LinkLostError("the head says something else than it should")
        except BaseException:
            await link.close()
            raise
        self._link = link
        return answer

    async def _await_join(self) -> str:
        assert self._link is not None
        try:
            async for message in self._link.messages():
                if isinstance(message, Join):
                    return message.address
                if isinstance(message, Waiting):
                    self._tell(message.text)
                elif isinstance(message, Ended):
                    raise _never_part_of(message)
            raise LinkLostError
        except LinkLostError:
            await self._link.close()
            raise

    async def _or_died(self, start: Coroutine[Any, Any, None]) -> None:
        """Ray's start, unless the head gives up meanwhile."""
        assert self._link is not None
        starting, hearing = asyncio.ensure_future(start), asyncio.ensure_future(self._hear_of_failure(self._link))
        try:
            await first(starting, hearing)
            if not starting.done():
                await hearing  # raises
            await starting
        finally:
            await cancelled(starting, hearing)

    async def _hear_of_failure(self, link: Link) -> None:
        try:
            async for message in link.messages():
                if isinstance(message, Ended):
                    raise _never_part_of(message)
        except LinkLostError as error:
            text = f"the head at {self._where} was lost before this node had joined: {error}"
            raise BootstrapError(text, exit_code=BootstrapExit.NOT_JOINED) from error

    # --- once it has joined -----------------------------------------------------------------------------------------------

    async def _attend(self) -> Ended:
        """Stay with the head until it ends the run; returns how. Raises: BootstrapError."""
        assert self._link is not None
        while True:
            try:
                async for message in self._link.messages():
                    if isinstance(message, Waiting):
                        self._tell(message.text)
                    elif isinstance(message, Ended):
                        if message.failed:
                            raise _never_part_of(message)
                        return message
            except LinkLostError as error:
                await self._link.close()
                ended = await self._seek_again(str(error))
                if ended is not None:
                    return ended

    async def _seek_again(self, why: str) -> Ended | None:
        """Connect again; None once that is done, or how the run has ended when its head is no more.

        Raises: BootstrapError: the head is lost, or another node has taken this rank.
        """
        patience = self._plan.patience
        deadline, refusals = Deadline(patience.unreachable_s), Deadline(patience.refused_s)
        while True:
            try:
                await self._introduce(self._run_id)
                self._tell("the connection to the head was lost, and is back")
                return None
            except ConnectionRefusedError:
                if refusals.passed:
                    return Ended(0, "its head is gone")
            except ProtocolError:
                return Ended(0, "its head is gone, and another program has taken its port")
            except (OSError, LinkLostError) as error:
                refusals = Deadline(patience.refused_s)
                if deadline.passed:
                    raise BootstrapError(
                        f"the head at {self._where} cannot be reached ({why}, then: {error}); whether the run goes on there is "
                        "not known here",
                        exit_code=BootstrapExit.HEAD_LOST,
                    ) from error
            await asyncio.sleep(_RETRY_S)

    async def _say_goodbye(self, message: Leaving, wait_s: float) -> None:
        """Tell the head, and let it end the run on its side for so long before Ray leaves here. A run that goes on is rid of
        this node earlier, when nothing of it is left here: then Ray, which the head has told, ends by itself."""
        if self._link is None:
            return
        self._link.send(message)
        answered = asyncio.ensure_future(self._until_ended(self._link))
        left = asyncio.ensure_future(self._ray.ended()) if self._ray is not None else answered
        await asyncio.wait([answered, left], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        await cancelled(answered, left)

    async def _until_ended(self, link: Link) -> None:
        with contextlib.suppress(LinkLostError):
            async for answer in link.messages():
                if isinstance(answer, Ended):
                    return


def _never_part_of(ended: Ended) -> BootstrapError:
    """Of a run that has ended before this node was part of it."""
    how = "the run did not begin" if ended.failed else "the run has ended before this node had joined"
    return BootstrapError(f"{how}: {ended.reason}", exit_code=BootstrapExit.NOT_JOINED)

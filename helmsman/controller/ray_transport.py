"""The way from the controller to one worker on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import ray

from helmsman.api import errors
from helmsman.controller import placement_group as placement
from helmsman.controller import ray_state
from helmsman.controller.channel import Channel, Posted, open_channel
from helmsman.controller.client import Ending, Transport, TransportLostError, Turn, describe_exit, tail_of
from helmsman.controller.embedded_ray import bounded
from helmsman.controller.loop import in_thread
from helmsman.controller.places import Place
from helmsman.rpc_server.channel import CHANNEL_BYTES
from helmsman.rpc_server.codec import Payload
from helmsman.rpc_server.frames import is_small, pack, unpack_reply
from helmsman.rpc_server.guardian import read_record
from helmsman.rpc_server.messages import ENGINE_WORK, Reply, Request, WorkerIdentity
from helmsman.rpc_server.ray_server import Greeting

log = logging.getLogger(__name__)

_RAY_CALL_S = 2.0
"""Longest wait for a call of Ray's while things are taken down; it is milliseconds unless the cluster's head is gone."""
_DEATH_S = 3.0
"""Longest wait for Ray to know that an actor which it was told to kill is dead."""
_REMAINS_S = 1.5
"""Longest wait for what a guardian records; milliseconds, but Ray's workers run at low priority, and it with them."""
_PUT_IN_THREAD_BYTES = 1 << 20


class RayTransport(Transport):
    """Requests as actor tasks, each sent once (no task retries, no restarts)."""

    def __init__(self, actor: Any, place: Place, here: str) -> None:
        self._actor = actor
        self.place = place
        self._here = here
        self._worker_id = "a worker that starts"
        self.log_path = ""
        self._pid = 0
        self._reason: BaseException | None = None
        self._killed = False
        self._channel: Channel | None = None
        self._watch: asyncio.Future[None] | None = None
        self._turn = Turn()
        self._num_sent = 0
        """Engine work sent; Ray starts the tasks of an async actor in any order, so each bears its number."""

    async def greet(self) -> Greeting:
        """The worker's first answer. Raises TransportLostError with the reason."""
        greeting: Greeting = await self._await(self._actor.greet.remote())
        self._pid = greeting.pid
        return greeting

    async def adopt(self, identity: WorkerIdentity, key: bytes) -> None:
        """Make it this worker, and open the direct channel to it. Raises TransportLostError."""
        self._worker_id, self.log_path = identity.worker_id, identity.log_path
        await self._await(self._actor.adopt.remote(identity))
        if not key:
            return
        try:
            address = await self._await(self._actor.open_channel.remote(key))
        except errors.ProtocolError as error:  # no socket could be had there
            log.warning("%s: no direct connection, its calls go by way of Ray: %s", self._worker_id, error)
            return
        self._channel = await open_channel(self._worker_id, address, key, self._collect)
        self._watch = asyncio.ensure_future(self._watch_end())

    async def _watch_end(self) -> None:
        """A connection to a node that vanishes does not end by itself; Ray tells of it."""
        try:
            await self._await(self._actor.live.remote())
        except (TransportLostError, errors.ProtocolError):
            if self._channel is not None:
                self._channel.close()

    async def pending(self) -> str:
        """Why its actor may not have started, as far as Ray tells."""
        state = await in_thread(ray_state.actor_state, self._actor._actor_id.hex())
        return f"Ray has it as {state or 'unknown'} on node {self.place.node}"

    def post(self, request: Request, payload: Payload) -> asyncio.Future[tuple[Reply, Payload]]:
        channel = self._channel
        in_order = request.verb in ENGINE_WORK
        by_ray = channel is None or not channel.is_open or not is_small(payload, CHANNEL_BYTES)
        if by_ray or (in_order and not self._turn.is_free):
            turn = self._turn.claim() if in_order else None
            return asyncio.ensure_future(self._send(request, payload, turn))
        assert channel is not None
        number = 0
        if in_order:
            number = self._num_sent
            self._num_sent += 1
        return channel.post(request, payload, number)

    async def _collect(self, posted: Posted) -> tuple[Reply, Payload]:
        """The answer to a request that did not come back by the channel. One that never arrived is sent by way of Ray; it is
        refused if it still comes, so that this is the first time."""
        packed = await self._await(self._actor.collect.remote(posted.serial))
        if packed is None:
            packed = await self._await(self._remote(posted.request, posted.payload, posted.number))
        return unpack_reply(packed)

    async def _send(
        self, request: Request, payload: Payload, turn: contextlib.AbstractAsyncContextManager[None] | None
    ) -> tuple[Reply, Payload]:
        if turn is None:
            return unpack_reply(await self._await(self._remote(request, payload)))
        async with turn:
            if payload.nbytes >= _PUT_IN_THREAD_BYTES:  # copied into the object store
                reference = await asyncio.to_thread(self._remote, request, payload, self._num_sent)
            else:
                reference = self._remote(request, payload, self._num_sent)
            self._num_sent += 1  # not before: the worker waits for every number
        return unpack_reply(await self._await(reference))

    def _remote(self, request: Request, payload: Payload, number: int = 0) -> Any:
        return getattr(self._actor, request.verb.value).remote(*pack(request, payload, number=number))

    async def _await(self, reference: Any) -> Any:
        try:
            return await reference
        except ray.exceptions.RayTaskError as error:
            raise errors.ProtocolError(f"{self._worker_id}: the server in the worker failed: {error}") from error
        except ray.exceptions.RayError as error:
            self._reason = error
            raise TransportLostError(_reason_text(error)) from error

    async def ending(self) -> Ending:
        if self.place.node_id != self._here and (loss := await in_thread(ray_state.loss_of_node, self.place.node_id)):
            return Ending(f"was lost with its node: {loss}")
        record, tail = await self._remains()
        if record is None:
            cause = describe_exit(None, None)
            if isinstance(self._reason, ray.exceptions.OutOfMemoryError):
                cause = "was ended by Ray's memory monitor, because its node ran out of memory"
            return Ending(cause, log_tail=tail)
        code, number = record["exit_code"], record["exit_signal"]
        return Ending(describe_exit(code, number), code, number, tail)

    async def _remains(self) -> tuple[dict[str, int | None] | None, str]:
        """What the worker's guardian recorded and the end of its log, read on the worker's node."""
        if self.place.node_id == self._here:
            return await in_thread(_read_remains, self.log_path, self._pid)
        reader = ray.remote(num_cpus=0, max_retries=0)(_read_remains)
        reference = reader.options(scheduling_strategy=placement.on_node(self.place.node_id)).remote(self.log_path, self._pid)
        try:
            async with asyncio.timeout(_REMAINS_S):
                remains: tuple[dict[str, int | None] | None, str] = await reference
                return remains
        except (TimeoutError, ray.exceptions.RayError) as error:
            log.warning("%s: the remains on its node could not be read: %s", self._worker_id, error)
            return None, ""

    async def kill(self) -> None:
        if self._killed:
            return
        if self._channel is not None:
            self._channel.close()
        with contextlib.suppress(TimeoutError):
            await bounded(lambda: ray.kill(self._actor, no_restart=True), limit_s=_RAY_CALL_S)
        with contextlib.suppress(TransportLostError, TimeoutError):
            async with asyncio.timeout(_DEATH_S):
                await self._await(self._actor.greet.remote())  # fails as soon as the actor is known to be dead
        self._killed = True


def _reason_text(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


def _read_remains(log_path: str, pid: int) -> tuple[dict[str, int | None] | None, str]:
    """The record of a worker's end, for which its guardian needs a moment, and its log's tail."""
    from helmsman.rpc_server.guardian import wait_until

    wait_until(lambda: read_record(log_path, pid) is not None, _REMAINS_S)
    return read_record(log_path, pid), tail_of(log_path)

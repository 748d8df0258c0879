"""The Ray adapter: an EngineHost inside a Ray actor. Ray carries the bytes; large buffers reach its object store directly."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import os
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import ray

from helmsman.api.errors import HandleLostError
from helmsman.api.platform_kinds import PLATFORMS
from helmsman.api.scheduler import ResultHandle
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost
from helmsman.rpc_server._host.threads import share_interpreter
from helmsman.rpc_server._process import guardian
from helmsman.rpc_server._process.environment import extend_search_path
from helmsman.rpc_server._process.oom import OomCount, oom_count
from helmsman.rpc_server._process.pulse import Pulse
from helmsman.rpc_server._process.safe_files import open_log
from helmsman.rpc_server._server import channel
from helmsman.rpc_server._server.observer import start_observer
from helmsman.rpc_server._wire.codec import Payload
from helmsman.rpc_server._wire.frames import ReplyFrame, decode_request, encode_frame
from helmsman.rpc_server._wire.messages import Reply, WorkerIdentity
from helmsman.rpc_server._wire.payload import INLINE_BYTES, to_wire
from helmsman.rpc_server._wire.segments import SegmentLocation, can_attach
from helmsman.rpc_server._wire.tls import server_tls


class RayHandleStore:
    """Keeps results: in segments for processes of this machine, and in Ray's object store once another machine needs them, or
    from the start where the controller is on another machine.

    A handle carries the location of a segment, or a reference, which Ray counts as a borrowed one.
    """

    def __init__(self, *, in_segments: bool = False) -> None:
        self.in_segments = in_segments
        self._segments = SegmentStore()
        self._references: dict[str, ray.ObjectRef[Payload]] = {}
        self._lock = threading.Lock()

    def put(self, handle_id: str, payload: Payload) -> Any:
        """Keep a payload; returns its location."""
        if self.in_segments:
            return self._segments.put(handle_id, payload)
        self._references[handle_id] = ray.put(payload)
        return self._references[handle_id]

    def fetch(self, handle: ResultHandle) -> Payload:
        """The payload of a handle, mapped from its segment or from this node's object store, where Ray brings it."""
        if isinstance(handle.location, bytes):
            return self._segments.fetch(handle)
        try:
            payload: Payload = ray.get(handle.location)
        except ray.exceptions.RayError as error:
            raise HandleLostError(worker_id=handle.worker_id, handle_id=handle.id, reason=str(error)) from error
        return payload

    def publish(self, handle: ResultHandle) -> ray.ObjectRef[Payload]:
        """A reference to what is kept here in a segment, for other machines; copied into Ray's store the first time. Raises
        HandleLostError."""
        with self._lock:
            if handle.id not in self._references:
                self._references[handle.id] = ray.put(self._segments.fetch(handle))
            return self._references[handle.id]

    def drop(self, handle_id: str) -> None:
        """Forget a value."""
        self._segments.drop(handle_id)
        self._references.pop(handle_id, None)


_PUT_FROM_BYTES = 1 << 20

RayReply = bytes | tuple[Reply, "Payload | ray.ObjectRef[Payload]"]
"""A reply by way of Ray: an encoded ReplyFrame, which costs Ray least, or its parts, with a reference where the payload is
large."""


def _frozen(payload: Payload) -> Payload | ray.ObjectRef[Payload]:
    """The same payload without the engine's own memory, which the engine may write to as soon as it has replied."""
    if payload.nbytes >= _PUT_FROM_BYTES:
        return ray.put(payload)
    return Payload(payload.data, [bytes(buffer) for buffer in payload.buffers], payload.handles)


def _packed(reply: Reply, payload: Payload) -> RayReply:
    if payload.handles or payload.nbytes >= INLINE_BYTES:
        return reply, _frozen(payload)
    return encode_frame(ReplyFrame(reply, to_wire(payload, segments=False)[0]))


class ChannelAddress(msgspec.Struct, frozen=True):
    """Where a worker listens for the direct connection."""

    where: str | tuple[str, int]
    """A Unix socket's path, or address and port."""
    shares_memory: bool
    """Whether worker and controller can map each other's segments."""
    observer_port: int = 0
    """Where an observer of the worker listens, on the same host; 0 for none."""


class Granted(msgspec.Struct, frozen=True):
    """The accelerators that Ray has granted to the task or actor that asks."""

    ids: dict[str, list[str]]
    """By Ray resource; physical ones, in any order."""
    masks: dict[str, str]
    """The visibility variables under which the raylet itself runs."""


class Greeting(msgspec.Struct, frozen=True):
    """What a new worker tells of itself."""

    pid: int
    node_id: str
    granted: Granted
    oom: OomCount | None
    """OOM kills in the worker's cgroup so far; None where they are not known."""


def granted_here() -> Granted:
    """What this process was granted."""
    return Granted(ray.get_runtime_context().get_accelerator_ids(), _masks_of_raylet())


def _masks_of_raylet() -> dict[str, str]:
    """Ray has changed the worker's own variables by now, or not, as its settings are."""
    variables = {info.visibility_env_var for info in PLATFORMS.values()} - {""}
    try:
        with open(f"/proc/{os.environ['RAY_RAYLET_PID']}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    pairs = [entry.decode(errors="replace").split("=", 1) for entry in entries if b"=" in entry]
    return {name: value for name, value in pairs if name in variables}


def _control(method: Any) -> Any:
    return ray.method(concurrency_group="control")(method)


class RayRPCServer:
    """A worker. Control verbs have a concurrency group of their own; engine work waits here for the host's threads, so a
    running call delays neither.

    Args:
        search_path: the driver's ``sys.path``.
    """

    def __init__(self, search_path: Sequence[str] = ()) -> None:
        extend_search_path(search_path)
        self._turn = threading.Lock()
        self._num_begun = 0
        self._channel: channel.ChannelServer | None = None
        self._early: dict[int, Callable[[], None]] = {}
        """Engine work that arrived before its turn, by number."""

    @_control
    async def greet(self) -> Greeting:
        """Say where this is, and which devices Ray has granted."""
        return Greeting(os.getpid(), ray.get_runtime_context().get_node_id(), granted_here(), oom_count())

    @_control
    async def adopt(self, identity: WorkerIdentity) -> int:
        """Become this worker. This follows the start, since ranks are given in the order of devices, which Ray decides.

        Returns: bytes that earlier processes have written to its log.
        """
        log = open_log(identity.log_path, identity.run_id)
        print(f"helmsman: the output of {identity.worker_id} goes to {identity.log_path}", flush=True)
        log_start = _redirect_output(log)
        faulthandler.enable(all_threads=False)  # the thread that crashed; all would push it out of the log's tail
        share_interpreter()
        # Unique per process: the guardian must not take a successor of the same name for the family of this one.
        tag = f"{identity.run_id}/{identity.worker_id}/{secrets.token_hex(4)}"
        os.environ[guardian.TAG_VARIABLE] = tag
        guardian.spawn_guardian(tag, identity.log_path)
        self._store = RayHandleStore()
        self._pulse = Pulse(f"{identity.run_id}/{identity.worker_id}")
        self._host = EngineHost(identity, self._store, pulse=self._pulse)
        self._host.engine_thread.start("engine")
        return log_start

    @_control
    async def open_channel(self, key: bytes, sample: SegmentLocation | None, tls: bool) -> ChannelAddress:
        """Listen for the controller's direct connection: on a Unix socket where they share a machine, else on this node's own
        address.

        Args:
            key: for connections to this worker alone.
            sample: a segment of the controller, to see whether it can be mapped here.
            tls: whether a connection between machines uses TLS.

        Raises: OSError.
        """
        if self._channel is not None:
            self._channel.close()
        shares_memory = sample is not None and can_attach(sample)
        self._store.in_segments = shares_memory
        if shares_memory:
            listener, certificate = channel.listen_abstract(), None
        else:
            certificate = await asyncio.to_thread(server_tls) if tls else None
            listener = channel.listen_tcp(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._channel = channel.ChannelServer(
            listener, key, self._host, shares_memory=shares_memory, tls=certificate, in_turn=self._in_turn, keep_apart=_frozen
        )
        name = listener.getsockname()
        self._channel.start()
        where = name.decode() if shares_memory else name[:2]
        observer_port = 0 if shares_memory else self._start_observer(where[0], key, tls)
        return ChannelAddress(where, shares_memory, observer_port)

    def _start_observer(self, host: str, key: bytes, tls: bool) -> int:
        """Start an observer of this worker for a controller on another machine; returns its port."""
        with channel.listen_tcp(host) as listener:
            start_observer(listener, key, self._pulse, tls=tls)
            return int(listener.getsockname()[1])

    @_control
    async def collect(self, request_id: int) -> tuple[Reply, Any] | None:
        """The reply to a request that came by the channel; None when it has not come, and now never will."""
        assert self._channel is not None
        outcome = self._channel.collect(request_id)
        if outcome is None:
            return None
        return await asyncio.wrap_future(outcome)

    @_control
    async def forget(self, request_ids: list[int]) -> None:
        """The controller has the replies that it collected."""
        assert self._channel is not None
        self._channel.forget(request_ids)

    @_control
    async def publish(self, handle: ResultHandle) -> list[ray.ObjectRef[Payload]]:
        """The reference of what a handle stands for, in a list, since Ray would resolve a bare one."""
        return [await asyncio.to_thread(self._store.publish, handle)]

    @_control
    async def live(self) -> None:
        """Never answered, so that its failure tells the controller at once that this process has ended."""
        await asyncio.get_running_loop().create_future()

    async def _ask(self, message: bytes, payload: Payload | None) -> RayReply:
        try:
            arrival = channel.understood(self._host, *decode_request(message), payload)
        except channel.UNDECODABLE as error:
            arrival = channel.refused(message, error)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[RayReply] = loop.create_future()

        def reply(answer: Reply, result: Payload) -> None:
            loop.call_soon_threadsafe(answered.set_result, _packed(answer, result))

        begin = functools.partial(arrival.answer, reply)
        if arrival.in_order:
            self._in_turn(arrival.number, begin)
        else:
            begin()
        return await answered

    def _in_turn(self, number: int, begin: Callable[[], None]) -> None:
        """Begin engine work in the order in which it was sent, whichever way it came."""
        with self._turn:
            self._early[number] = begin
            while (first := self._early.pop(self._num_begun, None)) is not None:
                self._num_begun += 1
                first()

    async def create_engine(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.CREATE_ENGINE."""
        return await self._ask(message, payload)

    async def call(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.CALL."""
        return await self._ask(message, payload)

    async def destroy(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.DESTROY."""
        return await self._ask(message, payload)

    @_control
    async def health(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.HEALTH."""
        return await self._ask(message, payload)

    @_control
    async def stacks(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.STACKS."""
        return await self._ask(message, payload)

    @_control
    async def configure(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.CONFIGURE."""
        return await self._ask(message, payload)

    @_control
    async def set_env(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.SET_ENV."""
        return await self._ask(message, payload)

    @_control
    async def environment(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.ENVIRONMENT."""
        return await self._ask(message, payload)

    @_control
    async def listen(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.LISTEN."""
        return await self._ask(message, payload)

    @_control
    async def reach(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.REACH."""
        return await self._ask(message, payload)

    @_control
    async def lease_ports(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.LEASE_PORTS."""
        return await self._ask(message, payload)

    @_control
    async def inspect(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.INSPECT."""
        return await self._ask(message, payload)

    @_control
    async def cancel(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.CANCEL."""
        return await self._ask(message, payload)

    @_control
    async def release(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.RELEASE."""
        return await self._ask(message, payload)

    @_control
    async def fault(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.FAULT."""
        return await self._ask(message, payload)

    @_control
    async def shutdown(self, message: bytes, payload: Payload | None = None) -> RayReply:
        """Verb.SHUTDOWN; the process itself is ended by the controller through Ray, which then knows that it was meant."""
        return await self._ask(message, payload)


def _redirect_output(log: int) -> int:
    """Append the output of this process to an open file; returns how many bytes it had."""
    log_start = os.fstat(log).st_size
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    return log_start

"""Ray adapter: an EngineHost inside a Ray actor."""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import ray

from helmsman._process import guardian
from helmsman._process.child_processes import prepare_for_children
from helmsman._process.environment import extend_search_path, redirect_output
from helmsman._process.main_thread import runs_on_main_thread
from helmsman._process.oom import OomCount, oom_count
from helmsman._process.ports import RANGE_VARIABLE, port_range
from helmsman._process.pulse import Pulse
from helmsman._process.safe_files import open_log
from helmsman._process.stack_dump import offer_stacks
from helmsman._wire.codec import Payload, decode, encode
from helmsman._wire.messages import Reply, Request, Verb, WorkerConfig, WorkerIdentity
from helmsman._wire.segments import SegmentLocation, can_attach
from helmsman._wire.tls import server_tls
from helmsman.api.errors import HandleLostError
from helmsman.api.platforms import PLATFORMS
from helmsman.api.scheduler import ResultHandle, WorkerHealth
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost
from helmsman.rpc_server._host.journal import write_to_stderr
from helmsman.rpc_server._host.threads import share_interpreter
from helmsman.rpc_server._server import channel
from helmsman.rpc_server._server.observer import start_observer
from helmsman.rpc_server._server.ray_nodes import RayNodes


class RayHandleStore:
    """Keeps results in segments or in Ray's object store.

    A segment serves processes of this machine, and is copied to the object store once another
    machine needs it. A handle's location is that of a segment, or an object reference.

    Args:
        in_segments: Keep results in segments; False if the controller is on another machine.
    """

    def __init__(self, *, in_segments: bool = False) -> None:
        self.in_segments = in_segments
        self._segments = SegmentStore()
        self._references: dict[str, ray.ObjectRef[Payload]] = {}
        self._lock = threading.Lock()

    def put(self, handle_id: str, payload: Payload) -> Any:
        if self.in_segments:
            return self._segments.put(handle_id, payload)
        self._references[handle_id] = ray.put(payload)
        return self._references[handle_id]

    def fetch(self, handle: ResultHandle) -> Payload:
        """Return the payload of a handle, from its segment or through this node's object store."""
        if isinstance(handle.location, bytes):
            return self._segments.fetch(handle)
        try:
            payload: Payload = ray.get(handle.location)
        except ray.exceptions.RayError as error:
            raise HandleLostError(
                worker_id=handle.worker_id, handle_id=handle.id, reason=str(error)
            ) from error
        return payload

    def publish(self, handle: ResultHandle) -> ray.ObjectRef[Payload]:
        """Return a reference, for other machines, to a result in a segment of this process.

        The first call copies the result to Ray's store. Raises HandleLostError.
        """
        with self._lock:
            if handle.id not in self._references:
                self._references[handle.id] = ray.put(self._segments.fetch(handle))
            return self._references[handle.id]

    def drop(self, handle_id: str) -> None:
        self._segments.drop(handle_id)
        self._references.pop(handle_id, None)


_PUT_FROM_BYTES = 1 << 20


def _frozen(payload: Payload) -> Payload | ray.ObjectRef[Payload]:
    """Copy a payload out of the engine's memory, which the engine may change after the reply."""
    if payload.nbytes >= _PUT_FROM_BYTES:
        return ray.put(payload)
    return Payload(payload.data, [bytes(buffer) for buffer in payload.buffers], payload.handles)


class RaySidePath:
    """Arguments and results transferred by Ray's object store beside the channel, by request id."""

    def __init__(self) -> None:
        self.arguments: dict[int, Payload] = {}
        self.results: dict[int, Payload | ray.ObjectRef[Payload]] = {}

    def take(self, request_id: int) -> Payload:
        return self.arguments.pop(request_id)

    def keep(self, request_id: int, payload: Payload) -> None:
        self.results[request_id] = _frozen(payload)


class ChannelAddress(msgspec.Struct, frozen=True):
    """Address at which a worker listens for its controller."""

    where: str | tuple[str, int]
    """Path of a Unix socket, or address and port."""
    shares_memory: bool
    """Whether worker and controller can map each other's segments."""
    observer_port: int = 0
    """Port of the worker's observer on the same host; 0 for none."""


class Granted(msgspec.Struct, frozen=True):
    """Accelerators that Ray has granted to the current task or actor."""

    ids: dict[str, list[str]]
    """Physical ids by Ray resource, in any order."""
    masks: dict[str, str]
    """Visibility variables in the environment of the raylet."""


class Greeting(msgspec.Struct, frozen=True):
    pid: int
    node_id: str
    granted: Granted
    oom: OomCount | None
    """OOM kills so far in the worker's cgroup; None if unknown."""


def granted_here() -> Granted:
    return Granted(ray.get_runtime_context().get_accelerator_ids(), _masks_of_raylet())


def _masks_of_raylet() -> dict[str, str]:
    """Read the raylet's variables: depending on its settings, Ray has changed the worker's own."""
    variables = {info.visibility_env_var for info in PLATFORMS.values()} - {""}
    try:
        with open(f"/proc/{os.environ['RAY_RAYLET_PID']}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    pairs = [entry.decode(errors="replace").split("=", 1) for entry in entries if b"=" in entry]
    return {name: value for name, value in pairs if name in variables}


def _channel_ports() -> range | None:
    """Return the ports at which this worker may listen; None for any.

    They come from HELMSMAN_PORT_RANGE, else from Ray's range of worker ports.
    """
    if os.environ.get(RANGE_VARIABLE, "").strip():
        first, last = port_range(os.environ)
        return range(first, last + 1)
    try:
        with open(f"/proc/{os.environ['RAY_RAYLET_PID']}/cmdline", "rb") as file:
            return worker_ports_of(file.read().split(b"\0"))
    except (OSError, KeyError):
        return None


def worker_ports_of(command: Sequence[bytes]) -> range | None:
    """Return the range of worker ports in a raylet's command line; None if it sets no range."""
    options = dict(part.lstrip(b"-").split(b"=", 1) for part in command if b"=" in part)
    try:
        first, last = int(options[b"min_worker_port"]), int(options[b"max_worker_port"])
    except (KeyError, ValueError):
        return None
    return range(first, last + 1) if 0 < first <= last else None


def _control(method: Any) -> Any:
    return ray.method(concurrency_group="control")(method)


class RayRPCServer:
    """A worker. Its controller starts and watches it as an actor, and calls it by its channel.

    The methods ``health``, ``configure``, ``set_env``, ``create_engine`` and ``call`` are for tools
    and other actors.

    Args:
        search_path: The driver's ``sys.path``.
    """

    def __init__(self, search_path: Sequence[str] = ()) -> None:
        extend_search_path(search_path)
        self._channel: channel.ChannelServer | None = None
        self._side_path = RaySidePath()
        self._request_ids = itertools.count(-1, -1)
        """For the actor methods: negative, since the controller's are positive."""

    @_control
    async def greet(self) -> Greeting:
        return Greeting(
            os.getpid(), ray.get_runtime_context().get_node_id(), granted_here(), oom_count()
        )

    @_control
    async def adopt(self, identity: WorkerIdentity) -> int:
        """Become this worker.

        Separate from the start, since ranks follow the order of devices, which Ray decides.

        Returns:
            Size in bytes of its log, from earlier processes.
        """
        log = open_log(identity.log_path, identity.run_id)
        print(
            f"helmsman: the output of {identity.worker_id} goes to {identity.log_path}", flush=True
        )
        log_start = redirect_output(log)
        write_to_stderr()
        # Only the crashed thread: the stacks of all threads would fill the log's tail.
        faulthandler.enable(all_threads=False)
        offer_stacks()
        prepare_for_children()
        share_interpreter()
        # Unique per process: the guardian must not end a successor of the same name as part of this
        # process's family.
        tag = f"{identity.run_id}/{identity.worker_id}/{secrets.token_hex(4)}"
        os.environ[guardian.TAG_VARIABLE] = tag
        guardian.spawn_guardian(tag, identity.log_path)
        self._store = RayHandleStore()
        self._pulse = Pulse(f"{identity.run_id}/{identity.worker_id}")
        # Ends with Ray's own title, by which tools recognise its workers.
        title_end = " (ray::RayRPCServer)"
        self._host = EngineHost(
            identity, self._store, pulse=self._pulse, title_end=title_end, nodes=RayNodes()
        )
        if not runs_on_main_thread(self._host.engine_thread.run):
            self._host.engine_thread.start("engine")
        return log_start

    @_control
    async def open_channel(
        self, key: bytes, sample: SegmentLocation | None, tls: bool
    ) -> ChannelAddress:
        """Listen for the controller's connection.

        Args:
            key: Key of this worker's channel alone.
            sample: A segment of the controller. If it can be mapped here, the worker listens on a
                Unix socket, else on this node's own address.
            tls: Whether connections between machines use TLS.

        Raises:
            OSError: No port is free, or the observer cannot be started.
        """
        if self._channel is not None:
            self._channel.close()
        shares_memory = sample is not None and can_attach(sample)
        self._store.in_segments = shares_memory
        if shares_memory:
            listener, certificate = channel.listen_abstract(), None
        else:
            certificate = await asyncio.to_thread(server_tls) if tls else None
            listener = channel.listen_tcp(ray.util.get_node_ip_address(), _channel_ports())  # type: ignore[no-untyped-call]
        self._channel = channel.ChannelServer(
            listener,
            key,
            self._host,
            shares_memory=shares_memory,
            tls=certificate,
            side_path=self._side_path,
            engine_thread=self._host.engine_thread,
        )
        name = listener.getsockname()
        self._channel.start()
        where = name.decode() if shares_memory else name[:2]
        observer_port = 0 if shares_memory else self._start_observer(where[0], key, tls)
        return ChannelAddress(where, shares_memory, observer_port)

    def _start_observer(self, host: str, key: bytes, tls: bool) -> int:
        with channel.listen_tcp(host, _channel_ports()) as listener:
            start_observer(listener, key, self._pulse, tls=tls)
            return int(listener.getsockname()[1])

    @_control
    async def bring(self, request_id: int, arguments: Payload) -> None:
        self._side_path.arguments[request_id] = arguments

    @_control
    async def fetch(self, request_id: int) -> list[Payload | ray.ObjectRef[Payload]]:
        """Return a result that did not fit into the channel, in a list.

        Ray would resolve a bare reference.
        """
        return [self._side_path.results.pop(request_id)]

    @_control
    async def publish(self, handle: ResultHandle) -> list[ray.ObjectRef[Payload]]:
        """Return a reference to a handle's value, in a list: Ray would resolve a bare reference."""
        return [await asyncio.to_thread(self._store.publish, handle)]

    @_control
    async def live(self) -> None:
        """Never return, so that its failure reports the end of this process at once."""
        await asyncio.get_running_loop().create_future()

    # --- for tools and other actors ---------------------------------------------------------------

    @_control
    async def health(self) -> WorkerHealth:
        """Return the worker's current activity."""
        return self._host.health()

    @_control
    async def configure(self, config: WorkerConfig) -> None:
        """Set the environment, and seed from (seed, role, rank)."""
        await self._handle(Verb.CONFIGURE, config)

    @_control
    async def set_env(self, env: Mapping[str, str]) -> None:
        """Set environment variables of the worker."""
        await self._handle(Verb.SET_ENV, dict(env))

    async def create_engine(
        self, engine: Any, engine_name: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Create an engine.

        Args:
            engine: Import path or class.
            engine_name: Its name; None for the worker's id.
            *args: Arguments of its constructor.
            **kwargs: Keyword arguments of its constructor.

        Raises:
            HelmsmanError: The engine could not be created; a subclass gives the reason.
        """
        name = engine_name or self._host.identity.worker_id
        await self._handle(Verb.CREATE_ENGINE, engine, args, kwargs, engine_name=name)

    async def call(
        self, method: str, engine_name: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Call an engine's method, in order with the controller's calls.

        Args:
            method: Name of the method.
            engine_name: Name of the engine; None for the worker's id.
            *args: Arguments of the method.
            **kwargs: Keyword arguments of the method.

        Returns:
            The method's result.

        Raises:
            HelmsmanError: The call failed; EngineCallError if the method raised.
        """
        return await self._handle(Verb.CALL, args, kwargs, engine_name=engine_name, method=method)

    async def _handle(
        self, verb: Verb, *arguments: Any, engine_name: str | None = None, method: str = ""
    ) -> Any:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[tuple[bool, Payload]] = loop.create_future()

        def reply(answer: Reply, result: Payload) -> None:
            frozen = Payload(
                result.data, [bytearray(buffer) for buffer in result.buffers], result.handles
            )
            loop.call_soon_threadsafe(answered.set_result, (answer.ok, frozen))

        self._host.handle(
            Request(next(self._request_ids), verb, engine_name, method), encode(arguments), reply
        )
        ok, payload = await answered
        if not ok:
            raise decode(payload)
        return decode(payload)

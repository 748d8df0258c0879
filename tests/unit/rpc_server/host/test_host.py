"""Test EngineHost: replies that cannot be sent, and calls that have not begun."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from helmsman._wire.codec import Payload, decode, encode
from helmsman._wire.messages import CallState, Reply, Request, Verb, WorkerIdentity
from helmsman.api.engines import InferenceEngine
from helmsman.api.errors import EngineCallError
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost
from tests.controller.engines import CountingRollout

LIMIT_S = 30.0


class CountingStore(SegmentStore):
    """Counts the values that it keeps; a full store raises an error of its own, as Ray's does."""

    num_kept = 0
    is_full = False

    def put(self, handle_id: str, payload: Payload) -> Any:
        if self.is_full:
            raise RuntimeError("the object store is full")
        self.num_kept += 1
        return super().put(handle_id, payload)

    def drop(self, handle_id: str) -> None:
        self.num_kept -= 1
        super().drop(handle_id)


class Unobservable(CountingRollout, InferenceEngine):  # type: ignore[misc]
    """Fails when its state is requested."""

    def failure(self) -> str | None:
        raise LookupError("no state")


class Blocking:
    """Occupies its thread, or its event loop, until the test releases it."""

    started = threading.Semaphore(0)
    released = threading.Semaphore(0)
    noted: ClassVar[list[str]] = []

    def __init__(self) -> None:
        Blocking.started, Blocking.released = threading.Semaphore(0), threading.Semaphore(0)
        self.noted.clear()

    def block(self) -> None:
        """Occupy the engine thread."""
        self.started.release()
        self.released.acquire(timeout=LIMIT_S)

    async def async_block(self) -> None:
        """Occupy the event loop."""
        self.block()

    def note(self, name: str) -> list[str]:
        """Note that this call ran."""
        self.noted.append(name)
        return [*self.noted]

    async def async_note(self, name: str) -> list[str]:
        """Note that this call ran."""
        return self.note(name)


class SlowToDestroy:
    """Its async destroy lasts until the test releases it."""

    started = threading.Event()
    released = threading.Event()

    async def destroy(self) -> None:
        """Wait for the test."""
        self.started.set()
        await asyncio.to_thread(self.released.wait, LIMIT_S)


class Requests:
    """Requests to a host, and its replies."""

    def __init__(self, host: EngineHost, store: CountingStore) -> None:
        self.host = host
        self.store = store
        self.replies: dict[int, queue.SimpleQueue[tuple[bool, Any]]] = {}

    def begin(
        self,
        request_id: int,
        verb: Verb,
        arguments: Any,
        method: str = "",
        *,
        engine: str = "engine",
        keep: bool = False,
    ) -> None:
        """Send a request."""
        replies = self.replies[request_id] = queue.SimpleQueue()
        request = Request(request_id, verb, engine, method, keep)
        self.host.handle(
            request,
            encode(arguments),
            lambda reply, payload: replies.put((reply.ok, decode(payload))),
        )

    def reply(self, request_id: int) -> tuple[bool, Any]:
        """Wait for the reply to a request."""
        return self.replies[request_id].get(timeout=LIMIT_S)

    def result(self, request_id: int, verb: Verb, arguments: Any, method: str = "") -> Any:
        """Send a request and return its result."""
        self.begin(request_id, verb, arguments, method)
        is_ok, result = self.reply(request_id)
        assert is_ok, result
        return result


@pytest.fixture
def requests() -> Iterator[Requests]:
    """Requests to a host with an engine of class Blocking."""
    identity = WorkerIdentity(
        run_id="run", worker_id="a/0", role="a", rank=0, node="127.0.0.1", log_path=""
    )
    store = CountingStore()
    host = EngineHost(identity, store, seeding=False)
    host.engine_thread.start("engine")
    made = Requests(host, store)
    made.result(1, Verb.CREATE_ENGINE, (Blocking, (), {}))
    try:
        yield made
    finally:
        Blocking.released.release(2)
        host.close()
        host.join()


@pytest.mark.parametrize("prefix", ["", "async_"])
def test_cancel_withdraws_queued_call(requests: Requests, prefix: str) -> None:
    requests.begin(2, Verb.CALL, ((), {}), f"{prefix}block")
    assert Blocking.started.acquire(timeout=LIMIT_S)
    requests.begin(3, Verb.CALL, (("withdrawn",), {}), f"{prefix}note")
    (seen,) = requests.result(4, Verb.INSPECT, ([3],)).values()
    assert (seen.state, seen.running) == ("waiting", f"engine.{prefix}block")
    cancelled: CallState = requests.result(5, Verb.CANCEL, (3,))
    assert (cancelled.state, cancelled.running) == ("withdrawn", f"engine.{prefix}block")
    assert "self.released.acquire" in cancelled.stack
    assert not requests.reply(3)[0], "the transport receives a reply"
    Blocking.released.release()
    assert requests.reply(2) == (True, None)
    assert requests.result(6, Verb.CALL, (("later",), {}), f"{prefix}note") == ["later"]


@pytest.mark.parametrize("prefix", ["", "async_"])
def test_close_begins_no_queued_call(requests: Requests, prefix: str) -> None:
    requests.begin(2, Verb.CALL, ((), {}), f"{prefix}block")
    assert Blocking.started.acquire(timeout=LIMIT_S)
    requests.begin(3, Verb.CALL, ((), {}), f"{prefix}block")
    requests.begin(4, Verb.CALL, (("too late",), {}), f"{prefix}note")
    Blocking.released.release()
    assert Blocking.started.acquire(timeout=LIMIT_S), "the loop runs the second call"
    thread = requests.host.engine_thread.thread
    requests.host.close()
    Blocking.released.release()
    requests.host.join()
    assert thread is not None
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert Blocking.noted == []
    assert requests.replies[4].empty()


def test_health_engine_failure_raises(requests: Requests) -> None:
    requests.begin(2, Verb.CREATE_ENGINE, (Unobservable, (), {}), engine="unobservable")
    assert requests.reply(2) == (True, None)
    assert requests.host.health().failed_engines == {
        "unobservable": "unobservable.failure raised LookupError: no state"
    }


def test_destroy_async_hangs(requests: Requests) -> None:
    class Hanging:
        async def destroy(self) -> None:
            await asyncio.Event().wait()

    requests.begin(2, Verb.CREATE_ENGINE, (Hanging, (), {}), engine="hanging")
    assert requests.reply(2) == (True, None)
    assert requests.result(3, Verb.DESTROY, (["hanging"], 0.05)) == (
        ["hanging.destroy did not end within 0.05 s; it continues in the background"],
        ["hanging"],
    )
    assert requests.result(4, Verb.CALL, (("later",), {}), "note") == ["later"]
    requests.begin(5, Verb.CREATE_ENGINE, (Hanging, (), {}), engine="hanging")
    assert requests.reply(5) == (True, None)


def test_destroy_frees_name_before_it_ends(requests: Requests) -> None:
    requests.begin(2, Verb.CREATE_ENGINE, (SlowToDestroy, (), {}), engine="slow")
    assert requests.reply(2) == (True, None)
    requests.begin(3, Verb.DESTROY, (["slow"], LIMIT_S))
    assert SlowToDestroy.started.wait(LIMIT_S)
    assert "slow" not in requests.host.health().engines
    SlowToDestroy.released.set()
    assert requests.reply(3) == (True, ([], []))


@pytest.mark.parametrize("method", ["note", "async_note"])
def test_handle_unsendable_drops_kept_value(requests: Requests, method: str) -> None:
    replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def refuse_results(reply: Reply, payload: Payload) -> None:
        if reply.ok:
            raise OSError("no file descriptor is left")
        replies.put(reply)

    requests.host.handle(
        Request(2, Verb.CALL, "engine", method, True), encode((("kept",), {})), refuse_results
    )
    assert not replies.get(timeout=LIMIT_S).ok
    assert not requests.store.num_kept


@pytest.mark.parametrize("method", ["note", "async_note"])
def test_call_store_full(requests: Requests, method: str) -> None:
    requests.store.is_full = True
    requests.begin(2, Verb.CALL, (("first",), {}), method, keep=True)
    is_ok, error = requests.reply(2)
    assert not is_ok
    assert isinstance(error, EngineCallError)
    assert "the object store is full" in str(error)
    assert requests.result(3, Verb.CALL, (("second",), {}), method) == ["first", "second"]

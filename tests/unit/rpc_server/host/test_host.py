"""EngineHost: replies that cannot be carried, and calls that have not begun."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from helmsman.api.engines import InferenceEngine
from helmsman.api.errors import EngineCallError
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost
from helmsman.rpc_server._wire.codec import Payload, decode, encode
from helmsman.rpc_server._wire.messages import CallState, Reply, Request, Verb, WorkerIdentity
from tests.controller.engines import CountingRollout

LIMIT_S = 30.0


class CountingStore(SegmentStore):
    """Counts what it keeps; a full one has no room left, which it says as Ray does: with an error
    of its own.
    """

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


class Unsure(CountingRollout, InferenceEngine):  # type: ignore[misc]
    """Cannot even say whether it can serve."""

    def failure(self) -> str | None:
        raise LookupError("who knows?")


class Blocking:
    """Occupies its thread, or its event loop, until the test releases it."""

    started = threading.Semaphore(0)
    released = threading.Semaphore(0)

    def __init__(self) -> None:
        Blocking.started, Blocking.released = threading.Semaphore(0), threading.Semaphore(0)
        self.noted: list[str] = []

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
        return self.noted

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


class Asked:
    """A host and the answers to what it is asked."""

    def __init__(self, host: EngineHost, store: CountingStore) -> None:
        self.host = host
        self.store = store
        self.answers: dict[int, queue.SimpleQueue[tuple[bool, Any]]] = {}

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
        answer = self.answers[request_id] = queue.SimpleQueue()
        request = Request(request_id, verb, engine, method, keep)
        self.host.handle(
            request,
            encode(arguments),
            lambda reply, payload: answer.put((reply.ok, decode(payload))),
        )

    def answer(self, request_id: int) -> tuple[bool, Any]:
        """Wait for the answer to a request."""
        return self.answers[request_id].get(timeout=LIMIT_S)

    def ask(self, request_id: int, verb: Verb, arguments: Any, method: str = "") -> Any:
        """The result of a request."""
        self.begin(request_id, verb, arguments, method)
        is_ok, result = self.answer(request_id)
        assert is_ok, result
        return result


@pytest.fixture
def asked() -> Iterator[Asked]:
    """A host with an engine of class Blocking."""
    identity = WorkerIdentity(
        run_id="run", worker_id="a/0", role="a", rank=0, node="127.0.0.1", log_path=""
    )
    store = CountingStore()
    host = EngineHost(identity, store, seeding=False)
    host.engine_thread.start("engine")
    made = Asked(host, store)
    made.ask(1, Verb.CREATE_ENGINE, (Blocking, (), {}))
    try:
        yield made
    finally:
        Blocking.released.release(2)
        host.close()
        host.join()


@pytest.mark.parametrize("prefix", ["", "async_"])
def test_cancel_withdraws_queued_call(asked: Asked, prefix: str) -> None:
    asked.begin(2, Verb.CALL, ((), {}), f"{prefix}block")
    assert Blocking.started.acquire(timeout=LIMIT_S)
    asked.begin(3, Verb.CALL, (("withdrawn",), {}), f"{prefix}note")
    (seen,) = asked.ask(4, Verb.INSPECT, ([3],)).values()
    assert (seen.state, seen.running) == ("waiting", f"engine.{prefix}block")
    cancelled: CallState = asked.ask(5, Verb.CANCEL, (3,))
    assert (cancelled.state, cancelled.running) == ("withdrawn", f"engine.{prefix}block")
    assert "self.released.acquire" in cancelled.stack
    assert not asked.answer(3)[0], "the transport can forget it"
    Blocking.released.release()
    assert asked.answer(2) == (True, None)
    assert asked.ask(6, Verb.CALL, (("later",), {}), f"{prefix}note") == ["later"]


@pytest.mark.parametrize("prefix", ["", "async_"])
def test_close_begins_no_queued_call(asked: Asked, prefix: str) -> None:
    asked.begin(2, Verb.CALL, ((), {}), f"{prefix}block")
    assert Blocking.started.acquire(timeout=LIMIT_S)
    asked.begin(3, Verb.CALL, ((), {}), f"{prefix}block")
    asked.begin(4, Verb.CALL, (("too late",), {}), f"{prefix}note")
    Blocking.released.release()
    assert Blocking.started.acquire(timeout=LIMIT_S), "the loop has begun a round with both calls"
    engine, _ = asked.host._engines.find(Request(0, Verb.CALL, "engine", "note"))
    thread = asked.host.engine_thread.thread if not prefix else asked.host._loop.thread
    asked.host.close()
    Blocking.released.release()
    assert thread is not None
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert engine.noted == []
    assert asked.answers[4].empty(), "its caller learns of the worker's end"


def test_health_engine_failure_raises(asked: Asked) -> None:
    asked.begin(2, Verb.CREATE_ENGINE, (Unsure, (), {}), engine="unsure")
    assert asked.answer(2) == (True, None)
    assert asked.host.health().failed_engines == {
        "unsure": "unsure.failure raised LookupError: who knows?"
    }


def test_destroy_async_hangs(asked: Asked) -> None:
    class Hanging:
        async def destroy(self) -> None:
            await asyncio.Event().wait()

    asked.begin(2, Verb.CREATE_ENGINE, (Hanging, (), {}), engine="hanging")
    assert asked.answer(2) == (True, None)
    assert asked.ask(3, Verb.DESTROY, (["hanging"], 0.05)) == (
        ["hanging.destroy did not end within 0.05 s; it continues in the background"],
        ["hanging"],
    )
    assert asked.ask(4, Verb.CALL, (("later",), {}), "note") == ["later"]
    asked.begin(5, Verb.CREATE_ENGINE, (Hanging, (), {}), engine="hanging")
    assert asked.answer(5) == (True, None)


def test_destroy_frees_name_before_it_ends(asked: Asked) -> None:
    asked.begin(2, Verb.CREATE_ENGINE, (SlowToDestroy, (), {}), engine="slow")
    assert asked.answer(2) == (True, None)
    asked.begin(3, Verb.DESTROY, (["slow"], LIMIT_S))
    assert SlowToDestroy.started.wait(LIMIT_S)
    assert "slow" not in asked.host.health().engines
    SlowToDestroy.released.set()
    assert asked.answer(3) == (True, ([], []))


@pytest.mark.parametrize("method", ["note", "async_note"])
def test_handle_unsendable_drops_kept_value(asked: Asked, method: str) -> None:
    replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def refuse_results(reply: Reply, payload: Payload) -> None:
        if reply.ok:
            raise OSError("no file descriptor is left")
        replies.put(reply)

    asked.host.handle(
        Request(2, Verb.CALL, "engine", method, True), encode((("kept",), {})), refuse_results
    )
    assert not replies.get(timeout=LIMIT_S).ok
    assert not asked.store.num_kept


@pytest.mark.parametrize("method", ["note", "async_note"])
def test_call_store_full(asked: Asked, method: str) -> None:
    asked.store.is_full = True
    asked.begin(2, Verb.CALL, (("first",), {}), method, keep=True)
    is_ok, error = asked.answer(2)
    assert not is_ok
    assert isinstance(error, EngineCallError)
    assert "the object store is full" in str(error)
    assert asked.ask(3, Verb.CALL, (("second",), {}), method) == ["first", "second"]

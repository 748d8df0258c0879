"""Tests of the threads that write requests and read replies."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helmsman._base.event_loop import run_sync, threads_awaited
from helmsman._wire.memory import populate
from helmsman._wire.wire import ReplyFrame, decode_reply
from helmsman.api.scheduler import Call, Job, Scheduler
from helmsman.controller._groups.call_all import call_all
from helmsman.controller._scheduler.local import LocalScheduler
from helmsman.controller._scheduler.transport import channel as channel_module
from helmsman.controller._scheduler.transport.channel import Channel
from tests.contract.engines import Counter
from tests.contract.helpers import LIMIT_S, Engine, Gate, wait_until

LOOP_THREAD = "helmsman-loop"


class Loaded:
    """Value that unpickles to the name of the unpickling thread."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _thread_name, ()


def _thread_name() -> str:
    return threading.current_thread().name


class Giving(Counter):
    """Returns a value that depends on the thread that unpickles it."""

    def give(self) -> Loaded:
        """Return a value whose unpickling runs code."""
        return Loaded()


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    """Scheduler with a role "giving" of three workers."""
    with LocalScheduler(log_dir=tmp_path_factory.mktemp("logs"), preload=()) as made:
        for worker in made.create_workers(Job(role="giving", replicas=3)):
            Engine.create(made, worker, Giving, worker)
        yield made


def test_call_all_unpickles_off_the_event_loop(scheduler: Scheduler) -> None:
    names = run_sync(
        call_all(scheduler, "giving", "give", {f"giving/{index}": Call() for index in range(2)})
    )
    assert len(names) == 2
    assert LOOP_THREAD not in names


def test_call_engine_maps_large_results_off_the_event_loop(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def mapped(views: Sequence[Any]) -> None:
        names.append(_thread_name())
        populate(views)

    monkeypatch.setattr(channel_module, "populate", mapped)
    assert scheduler.call_engine("giving/0", "make", None, 1 << 21).sum() == 7 << 21
    assert len(names) == 1
    assert LOOP_THREAD not in names


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that read replies."""
    names: list[str] = []

    def noted(body: memoryview) -> ReplyFrame:
        names.append(_thread_name())
        return decode_reply(body)

    monkeypatch.setattr(channel_module, "decode_reply", noted)
    return names


def test_call_engine_reads_its_reply_itself(scheduler: Scheduler, readers: list[str]) -> None:
    for value in (0, bytes(1 << 18)):
        assert scheduler.call_engine("giving/0", "echo", None, value) == value
    assert readers == ["MainThread"] * 2


def test_call_engine_beside_other_requests(
    scheduler: Scheduler, gate: Gate, readers: list[str]
) -> None:
    """The event loop reads for all, so that none depends on the thread of another caller."""
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(scheduler.call_engine, "giving/2", "wait", None, *gate.files)
        gate.wait_started()
        assert run_sync(scheduler.check_health("giving/2")).running == "giving/2.wait"
        gate.open()
        waiting.result(LIMIT_S)
    assert readers == [LOOP_THREAD] * 2
    scheduler.call_engine("giving/2", "echo", None, 0)
    assert readers[-1] == "MainThread"


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Sets the handler of SIGUSR1."""
    disposition = signal.getsignal(signal.SIGUSR1)
    yield lambda handle: signal.signal(signal.SIGUSR1, lambda *_: handle()) and None
    signal.signal(signal.SIGUSR1, disposition)


def test_call_engine_interrupted_while_it_reads(
    scheduler: Scheduler,
    on_signal: Callable[[Callable[[], object]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt() -> None:
        raise TimeoutError("it is time")

    def interrupted(body: memoryview) -> ReplyFrame:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return decode_reply(body)

    on_signal(interrupt)
    start = scheduler.call_engine("giving/2", "add", None, 0)
    monkeypatch.setattr(channel_module, "decode_reply", interrupted)
    with pytest.raises(TimeoutError, match="it is time"):
        scheduler.call_engine("giving/2", "add")
    assert scheduler.call_engine("giving/2", "add") == start + 2, "each ran once"
    client = scheduler._roles.client("giving/2")  # type: ignore[attr-defined]
    wait_until(lambda: not client.in_flight, "the interrupted call has ended")


def test_call_engine_in_a_signal_handler(
    scheduler: Scheduler, gate: Gate, on_signal: Callable[[Callable[[], object]], None]
) -> None:
    """The handler interrupts the wait of a call to the same worker."""
    results: list[Any] = []

    def handle() -> None:
        gate.open()
        workers = ("giving/2", "giving/1", "giving/2")
        results.extend(scheduler.call_engine(each, "echo", None, each) for each in workers)

    def interrupt() -> None:
        gate.wait_started()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    on_signal(handle)
    other = threading.Thread(target=interrupt)
    other.start()
    scheduler.call_engine("giving/2", "wait", None, *gate.files, rpc_timeout=LIMIT_S)
    other.join()
    assert results == ["giving/2", "giving/1", "giving/2"]


@pytest.fixture
def signal_while_writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interrupt the next request by SIGUSR1 while its thread writes it."""
    send = Channel._send

    def interrupted(channel: Channel, sock: socket.socket, message: bytes) -> bool:
        if threading.current_thread() is threading.main_thread():
            monkeypatch.undo()
            signal.raise_signal(signal.SIGUSR1)
        return send(channel, sock, message)

    monkeypatch.setattr(Channel, "_send", interrupted)
    disposition = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, disposition)


@pytest.mark.usefixtures("signal_while_writing")
def test_call_engine_refuses_calls_in_signal_handlers(scheduler: Scheduler) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: scheduler.status())
    with pytest.raises(RuntimeError, match="a signal handler made a blocking Helmsman call"):
        scheduler.call_engine("giving/0", "add")
    assert scheduler.call_engine("giving/0", "add") == 2, "the interrupted request is sent once"


@pytest.mark.usefixtures("signal_while_writing")
def test_call_engine_interrupted_runs_once(scheduler: Scheduler) -> None:
    def note(number: int) -> None:
        scheduler.call_engine("giving/0", "note_number", None, number, None)

    other = threading.Thread(target=note, args=[2])

    def interrupt(*_: object) -> None:
        other.start()
        while other.ident not in threads_awaited:  # until it waits for the write lock
            time.sleep(0.001)
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        note(1)
    other.join()
    note(3)
    assert scheduler.call_engine("giving/0", "numbers") == [1, 2, 3]


@pytest.mark.usefixtures("signal_while_writing")
def test_call_engine_passes_on_signal_handler_errors(scheduler: Scheduler) -> None:
    def give_up(*_: object) -> None:
        raise TimeoutError("it is time")

    signal.signal(signal.SIGUSR1, give_up)
    with pytest.raises(TimeoutError, match="it is time"):
        scheduler.call_engine("giving/1", "add")
    assert scheduler.call_engine("giving/1", "add") == 2, "the interrupted request is sent once"

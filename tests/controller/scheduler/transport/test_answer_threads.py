"""Tests of the threads that write requests and read replies."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from helmsman._base.event_loop import run_sync, threads_awaited
from helmsman._wire.memory import populate
from helmsman.api.scheduler import Call, Job, Scheduler
from helmsman.controller._groups.call_all import call_all
from helmsman.controller._scheduler.local import LocalScheduler
from helmsman.controller._scheduler.transport import channel as channel_module
from helmsman.controller._scheduler.transport.channel import Channel
from tests.contract.engines import Counter
from tests.contract.helpers import Engine

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
    """Scheduler with a role "giving" of two workers."""
    with LocalScheduler(log_dir=tmp_path_factory.mktemp("logs"), preload=()) as made:
        for worker in made.create_workers(Job(role="giving", replicas=2)):
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

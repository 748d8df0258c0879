"""Test a worker whose threads cannot be started, and signals to its waiting main thread."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from helmsman._wire.auth import connect
from helmsman._wire.messages import WorkerIdentity
from helmsman.rpc_server._host import connectivity
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost
from helmsman.rpc_server._host.threads import EngineLoop
from helmsman.rpc_server._server.channel import ChannelServer, abstract_address, listen_abstract

LIMIT_S = 30.0
KEY = b"k" * 32


@pytest.fixture
def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let new threads fail as if the system refused them; ``monkeypatch.undo`` ends that."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    # The name depends on the version of Python.
    names = ("_start_joinable_thread", "_start_new_thread")
    name = next(each for each in names if hasattr(threading, each))
    return lambda: monkeypatch.setattr(threading, name, refuse)


def test_engine_loop_after_failed_start(
    refuse_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, ran = EngineLoop("a/0 async"), threading.Event()

    async def run() -> None:
        ran.set()

    gc.collect()
    refuse_threads()
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        RuntimeError,
        match="no thread for async methods can be started .a/0 async.: can't start new thread",
    ):
        loop.submit(1, "engine.method", run)
    assert loop.failure is not None
    assert len(os.listdir("/proc/self/fd")) == num_open, "the loop without a thread is closed"
    monkeypatch.undo()
    try:
        loop.submit(2, "engine.method", run)
        assert ran.wait(LIMIT_S)
        assert loop.failure is None
    finally:
        loop.stop()
        loop.join()


def test_listener_after_failed_start(
    refuse_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    listener = connectivity.PortListener()
    refuse_threads()
    assert listener.listen(port, b"proof", LIMIT_S) == "can't start new thread"
    monkeypatch.undo()
    try:
        assert listener.listen(port, b"proof", LIMIT_S) == ""
        assert connectivity.reach("127.0.0.1", port, b"proof", LIMIT_S) == ""
    finally:
        listener.close()


def test_server_after_failed_start(
    tmp_path: Path,
    refuse_threads: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = abstract_address()
    host = EngineHost(
        WorkerIdentity(run_id="run", worker_id="a/0", role="a", rank=0),
        SegmentStore(),
        seeding=False,
    )
    server = ChannelServer(listen_abstract(path), KEY, host, shares_memory=True)
    server.start()
    try:
        refuse_threads()
        with asyncio.run(connect(path, KEY, LIMIT_S)) as lost:
            lost.settimeout(LIMIT_S)
            assert lost.recv(1) == b""
        monkeypatch.undo()
        asyncio.run(connect(path, KEY, LIMIT_S)).close()
        assert "no thread can be started for it (can't start new thread)" in capfd.readouterr().err
    finally:
        server.close()
        host.close()


IDLE = """
import signal, threading
from helmsman.rpc_server._host.threads import EngineThread

thread = EngineThread()
signal.signal(signal.SIGTERM, lambda *_: (print("received", flush=True), thread.stop()))

def send():
    while thread.thread is None:
        pass
    for _ in range(100_000):  # lets the main thread wait for work
        pass
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=send).start()
thread.run()
"""


def test_engine_thread_handles_signals_while_it_waits() -> None:
    """A signal that another thread receives does not interrupt the wait of the main thread."""
    ended = subprocess.run(
        [sys.executable, "-c", IDLE], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "received\n"), ended.stderr

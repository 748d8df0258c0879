"""Tests of the progress that this process reports of its threads, tasks and connections."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from helmsman.api.run_state import Progress
from helmsman.rpc_server._host import progress
from helmsman.rpc_server._host.threads import awaited_frames

Watch = Callable[[Callable[[], object]], int]
Peer = tuple[socket.socket, socket.socket]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def peers() -> Iterator[Peer]:
    """Two ends of a TCP connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        yield ours, theirs


@pytest.fixture
def watched() -> Iterator[Watch]:
    """A function that starts a thread and returns its native id."""
    threads = []

    def start(work: Callable[[], object]) -> int:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        threads.append(thread)
        assert thread.native_id is not None
        return thread.native_id

    yield start
    for each in threads:
        each.join(30.0)


def test_thread_that_receives_from_a_local_socket(watched: Watch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def read() -> None:
            while ours.recv(1):
                pass

        thread = watched(read)
        until(lambda: progress.of_thread(thread).waits_in == "recvfrom on a socket")
        before = progress.of_thread(thread)
        assert progress.of_thread(thread) == before, "nothing has come"
        theirs.send(b"x")
        until(lambda: progress.of_thread(thread).num_wakes > before.num_wakes)
        theirs.close()


def test_thread_that_receives(peers: Peer, watched: Watch) -> None:
    ours, theirs = peers
    port = ours.getpeername()[1]
    thread = watched(lambda: ours.recv(1))
    until(lambda: progress.of_thread(thread).waits_in == f"recvfrom with 127.0.0.1:{port}")
    until(lambda: (progress.of_thread(thread).quiet_s or 0.0) > 0.1)
    theirs.send(b"x")


def test_thread_that_polls(peers: Peer, watched: Watch) -> None:
    """A socket with a timeout is polled; the kernel shows only the address of its descriptor."""
    ours, theirs = peers
    ours.settimeout(60.0)
    thread = watched(lambda: ours.recv(1))
    until(lambda: progress.of_thread(thread).waits_in.startswith("poll with 127.0.0.1:"))
    assert progress.of_thread(thread).quiet_s is not None
    theirs.send(b"x")


def test_thread_that_waits_for_many(peers: Peer, watched: Watch) -> None:
    """An event loop waits for sockets of all kinds."""
    left, right = socket.socketpair()
    is_woken = threading.Event()
    with left, right, select.epoll() as several:
        several.register(left, select.EPOLLIN)
        several.register(peers[0], select.EPOLLIN)

        def wait() -> None:
            several.poll()
            is_woken.set()

        thread = watched(wait)
        until(lambda: progress.of_thread(thread).waits_in.startswith("epoll"))
        assert progress.of_thread(thread).quiet_s is not None
        right.send(b"x")
        assert is_woken.wait(30.0)


def test_thread_that_waits_for_a_lock(
    watched: Watch,
) -> None:
    event = threading.Event()
    thread = watched(event.wait)
    until(lambda: progress.of_thread(thread).waits_in == "futex")
    assert progress.of_thread(thread).quiet_s is None
    event.set()


def test_thread_that_reads_and_computes(
    watched: Watch,
) -> None:
    reads, writes = os.pipe()
    ends = threading.Event()

    def work() -> None:
        os.read(reads, 100)
        while not ends.is_set():
            pass

    thread = watched(work)
    until(lambda: progress.of_thread(thread).waits_in.startswith("read on pipe:"))
    before, all_before = progress.of_thread(thread), progress.moved_bytes()
    os.write(writes, bytes(100))
    until(lambda: (progress.of_thread(thread).cpu_s or 0.0) > (before.cpu_s or 0.0) + 0.1)
    assert progress.of_thread(thread).moved_bytes == before.moved_bytes + 100
    assert progress.moved_bytes() >= all_before + 100
    ends.set()
    for each in (reads, writes):
        os.close(each)


def test_thread_that_has_ended() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert thread.native_id is not None
    number = thread.native_id  # the kernel's thread may end later than Python's
    until(lambda: progress.of_thread(number) == Progress(number=number))


def test_connections_of_engines() -> None:
    """Older connections and incoming ones are not those of engines."""
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket() as older:
        older.connect(other.getsockname())
        connections = progress.Connections()
        assert connections.quiet_s() is None
        # Both ends are in this process, so that the other end is the incoming one.
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as ours,
            server.accept()[0],
        ):
            assert connections.quiet_s() is not None
            ours.close()
            assert connections.quiet_s() is None


def test_task_that_waits_for_a_stream(peers: Peer) -> None:
    ours, theirs = peers

    def of(task: asyncio.Task[None]) -> Progress:
        return progress.of_task(task, awaited_frames(task))

    async def read() -> None:
        reader, writer = await asyncio.open_connection(sock=ours)
        await reader.readexactly(2)
        writer.close()

    async def main() -> None:
        task = asyncio.create_task(read())
        while (made := of(task)).quiet_s is None:  # noqa: ASYNC110 - the task does not report
            await asyncio.sleep(0.01)
        assert of(task).num_wakes == made.num_wakes
        theirs.send(b"x")
        while of(task).num_wakes == made.num_wakes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        theirs.send(b"x")
        await task

    asyncio.run(asyncio.wait_for(main(), 30.0))


def test_run_queue_of_ended_process() -> None:
    queue = progress.RunQueue()
    assert queue.waited_s(["/proc/self"]) == 0.0
    assert queue.waited_s(["/proc/0"]) == 0.0


def test_look_at_a_pipe_keeps_no_descriptor() -> None:
    reading, writing = os.pipe()
    thread = threading.Thread(target=os.read, args=(reading, 1))
    thread.start()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        progress.of_thread(thread.native_id or 0)
    os.write(writing, b"x")
    thread.join()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(reading)
    os.close(writing)

"""A run with one worker for each staged call: ``python staged_calls.py SCHEDULER NAME ...``.

It prints the id of the run. SCHEDULER is local or ray.

Each call is the method of that name of Faulty or Healthy. A peer that they talk to is a thread of
the script.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import fcntl
import hashlib
import http.client
import multiprocessing
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from helmsman import Job, LocalScheduler, RayScheduler, Scheduler, SchedulingSpec

FOREVER_S = 3600.0


def _spin() -> None:
    while True:
        pass


class Base:
    """An engine with the ports of the peers."""

    def __init__(self, ports: dict[str, int]) -> None:
        self.ports = ports

    def connect(self, peer: str) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.ports[peer]))

    def moves_beside(self) -> None:
        """Receive bytes of another connection in a thread."""
        other = self.connect("trickle")
        threading.Thread(target=lambda: [None for _ in iter(lambda: other.recv(9), b"")]).start()


class Faulty(Base):
    """Calls that never end. A method with an argument is called with "quick" three times before."""

    # --- unknown waits --------------------------------------------------------------------------

    def native_mutex(self) -> None:
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)

    def native_pause(self) -> None:
        ctypes.CDLL(None).pause()

    def native_semaphore(self) -> None:
        gate = ctypes.create_string_buffer(32)
        ctypes.CDLL(None).sem_init(gate, 0, 0)
        ctypes.CDLL(None).sem_wait(gate)

    def waits_for_signal(self) -> None:
        signal.sigwait({signal.SIGUSR2})

    def counts_events(self) -> None:
        os.eventfd_read(os.eventfd(0))

    def meets_at_barrier(self) -> None:
        meets = threading.Barrier(2).wait
        meets()

    def enters_gate(self) -> None:
        gate = multiprocessing.get_context("fork").Semaphore(0)
        with gate:
            pass

    def crossed_threads(self) -> None:
        left, right = threading.Lock(), threading.Lock()

        def cross(one: Any, other: Any) -> None:
            with one:
                time.sleep(1.0)
                with other:
                    pass

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            pool.submit(cross, left, right)
            pool.submit(cross, right, left)

    def empty_box(self) -> None:
        import queue

        box: queue.Queue[int] = queue.Queue()
        box.get()

    def never_set(self) -> None:
        async def wait() -> None:
            await asyncio.Event().wait()

        asyncio.run(wait())

    def sleeps_first(self) -> None:
        time.sleep(FOREVER_S)

    def looks_for_file(self) -> None:
        while not os.path.exists("/nonexistent"):
            time.sleep(0.1)

    # --- files and processes --------------------------------------------------------------------

    def reads_pipe(self) -> None:
        pick = os.read
        pick(os.pipe()[0], 1)

    def opens_fifo(self) -> None:
        path = os.path.join(tempfile.mkdtemp(), "fifo")
        os.mkfifo(path)
        fcntl.fcntl(os.open(path, os.O_RDONLY), fcntl.F_GETFD)

    def locks_file(self) -> None:
        path = os.path.join(tempfile.mkdtemp(), "file")
        claim = fcntl.lockf
        with open(path, "w") as file:
            if os.fork() == 0:
                claim(file, fcntl.LOCK_EX)
                time.sleep(FOREVER_S)
            time.sleep(1.0)
            claim(file, fcntl.LOCK_EX)

    def waits_for_child(self) -> None:
        child = subprocess.Popen(["sleep", "3600"])
        os.waitid(os.P_PID, child.pid, os.WEXITED)

    def stopped_child(self) -> None:
        child = subprocess.Popen(["sleep", "3600"])
        os.kill(child.pid, signal.SIGSTOP)
        child.wait()

    # --- connections ----------------------------------------------------------------------------

    def peer_answers_nothing(self) -> None:
        """Wait for the answer of an HTTP server, while bytes of another connection move."""
        self.moves_beside()
        peer = http.client.HTTPConnection("127.0.0.1", self.ports["silent"], timeout=FOREVER_S)
        peer.request("GET", "/")
        peer.getresponse()

    def body_ends_early(self) -> None:
        self.moves_beside()
        peer = http.client.HTTPConnection("127.0.0.1", self.ports["head"])
        peer.request("GET", "/")
        peer.getresponse().read()

    def peer_reads_nothing(self) -> None:
        self.connect("silent").sendall(bytes(64 << 20))

    def selects(self) -> None:
        select.select([self.connect("silent")], [], [])

    def accepts_no_one(self) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        accept = server.accept
        accept()

    async def stream_is_silent(self) -> None:
        """Wait for a peer, while bytes of another connection of the same loop move."""

        async def receive() -> None:
            reader, _ = await asyncio.open_connection("127.0.0.1", self.ports["trickle"])
            while await reader.read(9):
                pass

        self.other = asyncio.create_task(receive())
        reader, _ = await asyncio.open_connection("127.0.0.1", self.ports["silent"])
        await reader.readexactly(1)

    async def blocks_loop(self) -> None:
        threading.Event().wait()

    def tries_again(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        while True:
            try:
                socket.create_connection(("127.0.0.1", port))
            except OSError:
                time.sleep(0.2)

    async def awaits_event(self) -> None:
        await asyncio.Event().wait()

    async def awaits_thread(self) -> None:
        await asyncio.to_thread(threading.Event().wait)

    async def gathers_silence(self) -> None:
        """Wait for three peers, of which one answers."""

        async def receive(peer: str) -> None:
            reader, _ = await asyncio.open_connection("127.0.0.1", self.ports[peer])
            while await reader.read(9):
                pass

        await asyncio.gather(*map(receive, ("silent", "silent", "silent")))

    def writes_full_pipe(self) -> None:
        os.write(os.pipe()[1], bytes(1 << 20))

    def holds_interpreter(self) -> None:
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)

    def returns_what_waits(self) -> object:
        class Waits:
            def __reduce__(self) -> Any:
                threading.Event().wait()

        return Waits()

    # --- calls that take longer than their median ----------------------------------------------

    def spins(self, ends: bool) -> None:
        while not ends:
            pass

    def spins_in_helper(self, ends: bool) -> None:
        def is_ready() -> bool:
            return ends

        while not is_ready():
            pass

    def native_loop(self, ends: bool) -> None:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1 if ends else (1 << 31) - 1)

    def lock_beside_spin(self, ends: bool) -> None:
        gate = threading.Semaphore(0)
        if not ends:
            threading.Thread(target=_spin, daemon=True).start()
            enter = gate.acquire
            enter()

    def stopped_again_and_again(self, ends: bool) -> None:
        """Compute while another process stops and continues this one."""
        if not ends:
            script = "import os, signal, sys, time\nwhile True:\n"
            for name, seconds in (("STOP", 0.9), ("CONT", 0.1)):
                script += f" os.kill(int(sys.argv[1]), signal.SIG{name}); time.sleep({seconds})\n"
            subprocess.Popen([sys.executable, "-c", script, str(os.getpid())])
            while True:
                time.sleep(0.01)


class Healthy(Base):
    """Calls that take long, and make progress."""

    def slow_download(self) -> None:
        peer = self.connect("trickle")
        while peer.recv(9):
            pass

    def slow_download_by_http(self) -> None:
        peer = http.client.HTTPConnection("127.0.0.1", self.ports["file"], timeout=60.0)
        peer.request("GET", "/")
        peer.getresponse().read()

    def bursts(self) -> None:
        peer = self.connect("bursts")
        while peer.recv(1 << 16):
            pass

    def download_in_pool(self) -> None:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: self.slow_download(), range(2)))

    async def download_stream(self) -> None:
        reader, _ = await asyncio.open_connection("127.0.0.1", self.ports["trickle"])
        while await reader.read(9):
            pass

    async def downloads_together(self) -> None:
        await asyncio.gather(*(self.download_stream() for _ in range(3)))

    def slow_reader(self) -> None:
        """Receive at most twenty times a second."""
        peer = self.connect("trickle")
        while peer.recv(9):
            time.sleep(0.05)

    def download_in_child(self) -> None:
        command = f"exec 3<>/dev/tcp/127.0.0.1/{self.ports['file']}; "
        command += "printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3 >/dev/null"
        subprocess.run(["bash", "-c", command])

    def long_first_call(self) -> None:
        end = time.monotonic() + FOREVER_S
        while time.monotonic() < end:
            pass

    def long_native_call(self) -> None:
        hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)

    def compiles(self) -> None:
        subprocess.run([sys.executable, "-c", "while True: pass"])

    def writes_checkpoint(self) -> None:
        with tempfile.TemporaryFile() as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
                os.fsync(file.fileno())
                time.sleep(0.3)
                file.seek(0)

    def reads_output(self) -> None:
        child = subprocess.Popen("while sleep 0.7; do echo x; done", shell=True, stdout=-1)
        for _ in child.stdout or ():
            pass

    def steps(self) -> None:
        time.sleep(random.uniform(0.1, 4.0))

    def sleeps_as_usual(self) -> None:
        time.sleep(12.0)

    def quick(self) -> None:
        return


def _serve(answer: Callable[[socket.socket], None]) -> int:
    """Start a peer; returns its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            peer, _ = server.accept()
            threading.Thread(target=answer, args=(peer,), daemon=True, name="helmsman-peer").start()

    threading.Thread(target=accept, daemon=True, name="helmsman-peer").start()
    return int(server.getsockname()[1])


def _trickle(peer: socket.socket, every_s: float = 0.4, size: int = 9, head: bytes = b"") -> None:
    with peer:
        peer.sendall(head)
        while every_s:
            time.sleep(every_s)
            peer.sendall(bytes(size))
        time.sleep(FOREVER_S)


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
_PEERS: dict[str, Callable[[socket.socket], None]] = {
    "silent": lambda peer: _trickle(peer, every_s=0.0),
    "head": lambda peer: _trickle(peer, every_s=0.0, head=_HEAD + b"x"),
    "trickle": _trickle,
    "bursts": lambda peer: _trickle(peer, every_s=4.0, size=1 << 12),
    "file": lambda peer: _trickle(peer, every_s=0.5, size=200, head=_HEAD),
}
REPEATED = {"steps": 1000, "sleeps_as_usual": 1000, "quick": 1}
"""Healthy methods that are called more than once."""
TRAINED = ("spins", "spins_in_helper", "native_loop", "lock_beside_spin", "stopped_again_and_again")
"""Faulty methods that have a median."""


def _call(scheduler: Scheduler, worker_id: str, method: str) -> None:
    arguments = [False] if method in TRAINED else []
    if method in TRAINED:
        for _ in range(3):
            scheduler.call_engine(worker_id, method, None, True)
    for _ in range(REPEATED.get(method, 1)):
        scheduler.call_engine(worker_id, method, None, *arguments)


def main(kind: str, *names: str) -> None:
    ports = {name: _serve(answer) for name, answer in _PEERS.items()}
    if kind == "ray":
        import ray

        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with RayScheduler() if kind == "ray" else LocalScheduler(preload=()) as scheduler:
        for name in names:
            engine = Faulty if hasattr(Faulty, name) else Healthy
            job = Job(role=name, tasks=[SchedulingSpec(cpu=0.01)])
            ids = scheduler.create_workers(job)
            scheduler.create_engines(ids, engine, None, ports)
            threading.Thread(target=_call, args=(scheduler, ids[0], name), daemon=True).start()
        print(f"run {scheduler.run_id}", flush=True)
        time.sleep(FOREVER_S)


if __name__ == "__main__":
    main(*sys.argv[1:])

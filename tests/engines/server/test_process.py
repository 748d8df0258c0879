"""Test that a server process starts or reports why it fails, and leaves nothing behind."""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman._process.ports import PortLeases
from helmsman.api.errors import ServerStartError
from helmsman.engines._server.process import ServerProcess
from helmsman.engines._server.protocol import ServerConfig
from helmsman.engines._server.weights import make_exchange, warn_without_room
from helmsman.engines.server_engine import ServerEngine
from tests.engines.little_servers import PROGRAM, engine_of, write_model

LIMIT_S = 30.0


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path / "model", 0.0)


@pytest.fixture
def port() -> Iterator[int]:
    leases = PortLeases()
    yield leases.lease(1)[0]
    leases.close()


Start = Callable[..., ServerProcess]


@pytest.fixture
def started() -> Iterator[Start]:
    """Start Python programs as servers, which end with the test."""
    processes: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        processes.append(ServerProcess([sys.executable, *arguments], {}, stop_timeout_s=1.0))
        return processes[-1]

    yield start
    for process in processes:
        process.stop()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids_in(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()]


def start(engine: ServerEngine) -> ServerStartError:
    """Return the error of an engine that cannot start; check that nothing is left."""
    with pytest.raises(ServerStartError) as raised:
        engine.initialize()
    assert engine._process is not None
    assert engine._process.has_ended
    assert not is_alive(engine._process.pid)
    assert not os.path.exists(engine._exchange)
    return raised.value


def test_initialize_server_exits(model: str) -> None:
    """The error hides the key, which is an argument in this dialect."""
    with engine_of("sglang", model, mode="exit") as engine:
        error = start(engine)
    assert error.exit_code == 1
    assert "ended with exit code 1" in error.reason
    assert "there is no room for the model" in error.log_tail
    assert PROGRAM.name in error.command
    assert f"--port {engine._port}" in error.command
    assert re.search(r"--api-key '?\*\*\*", error.command)
    assert error.elapsed_s < error.limit_s == 60.0


def test_initialize_server_hangs(model: str) -> None:
    with engine_of("vllm", model, mode="hang", start_timeout_s=1.5) as engine:
        error = start(engine)
    assert error.exit_code is None
    assert "was still not ready" in error.reason
    assert "refused" in error.reason  # its port is not bound
    assert "start_timeout_s" in str(error)


def test_wait_ready_malformed_answers(model: str, port: int, started: Start) -> None:
    process = started(
        str(PROGRAM), "vllm", "babble", "--model", model, "--host", "127.0.0.1", "--port", str(port)
    )
    until(lambda: "it babbles" in process.log_tail())
    with pytest.raises(ServerStartError, match="BadStatusLine"):
        process.wait_ready(f"127.0.0.1:{port}", "/health", {}, 0.5)


def test_initialize_program_missing(model: str) -> None:
    with engine_of("vllm", model, command=("/no/such/server",)) as engine:
        error = start(engine)
    assert "/no/such/server" in error.log_tail
    assert error.exit_code not in (0, None)


def test_destroy_ends_server_family(model: str, tmp_path: Path) -> None:
    others = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        with engine_of(
            "vllm", model, "--family", str(tmp_path / "family"), "--stubborn", stop_timeout_s=0.5
        ) as engine:
            engine.initialize()
            pids = [engine.server_pid(), *pids_in(tmp_path / "family")]
            assert len(pids) == 3
            assert all(map(is_alive, pids))
            folder = engine._exchange
            assert os.path.isdir(folder)
            engine.destroy()
            assert not any(map(is_alive, pids))
            assert not os.path.exists(folder)
            engine.destroy()
        assert others.poll() is None  # other processes run on
    finally:
        others.kill()
        others.wait()


def test_server_killed_ends_its_family(model: str, tmp_path: Path) -> None:
    with engine_of("vllm", model, "--family", str(tmp_path / "family")) as engine:
        engine.initialize()
        pids = pids_in(tmp_path / "family")
        os.kill(engine.server_pid(), signal.SIGKILL)
        until(lambda: engine.failure() is not None)
        assert not any(map(is_alive, pids))
        assert "SIGKILL" in str(engine.failure())


def test_guard_killed_ends_its_server(started: Start) -> None:
    process = started("-c", "import time; time.sleep(1000)")
    os.kill(process._guard.pid, signal.SIGKILL)
    assert process.wait(LIMIT_S)
    until(lambda: not is_alive(process.pid))
    assert process.exit_code is None
    assert "guard was killed" in process.how_it_ended()


def test_guard_ignores_group_signals(started: Start) -> None:
    process = started("-c", "import time; time.sleep(1000)")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process._guard.pid, number)
    assert os.getpgid(process.pid) == process.pid
    assert not process.wait(0.2)


def test_server_default_signal_handlers(started: Start) -> None:
    code = (
        "import signal; print(*[int(signal.getsignal(n)) for n in (signal.SIGTERM, "
        "signal.SIGHUP)], flush=True)"
    )
    process = started("-c", code)
    assert process.wait(LIMIT_S)
    assert process.log_tail().strip() == "0 0"
    assert process.exit_code == 0


WORKER = """
import sys, time
from helmsman.engines._server.process import ServerProcess
address, folder, *command = sys.argv[1:]
process = ServerProcess(command, {}, stop_timeout_s=5.0, folder=folder)
process.wait_ready(address, "/health", {}, 60.0)
print(process.pid, process._guard.pid, flush=True)
time.sleep(1000)
"""


def test_worker_killed_leaves_no_server(model: str, port: int, tmp_path: Path) -> None:
    """The guard ends the server, since no other process looks after this worker."""
    folder = tmp_path / "exchange"
    folder.mkdir()
    serve = ["vllm", "serve", "--model", model, "--host", "127.0.0.1", "--port", str(port)]
    serve += ["--family", str(tmp_path / "family"), "--stubborn"]
    command = [
        sys.executable,
        "-c",
        WORKER,
        f"127.0.0.1:{port}",
        str(folder),
        sys.executable,
        str(PROGRAM),
        *serve,
    ]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert worker.stdout is not None
        server, guard = worker.stdout.readline().split()
        pids = [int(server), int(guard), *pids_in(tmp_path / "family")]
        assert all(map(is_alive, pids))
    finally:
        worker.kill()
        worker.wait()
    until(lambda: not any(map(is_alive, pids)))
    assert not folder.exists()


def test_initialize_removes_abandoned_folders(model: str, tmp_path: Path) -> None:
    with (
        # not ready at first
        engine_of("sglang", model, "--busy", "3", exchange_folder=str(tmp_path)) as engine,
        engine_of("vllm", model, exchange_folder=str(tmp_path)) as other,
    ):
        abandoned = tmp_path / "helmsman-weights.abandoned"
        abandoned.mkdir()
        (abandoned / "model-00000.safetensors").write_bytes(b"half")
        engine.initialize()
        assert engine.failure() is None
        assert not abandoned.exists()
        other.initialize()
        assert os.path.isdir(engine._exchange)  # its engine is in use
        assert os.path.isdir(other._exchange)
    assert not [entry.name for entry in tmp_path.iterdir() if "weights" in entry.name]


def test_server_engine_without_port(model: str) -> None:
    with pytest.raises(RuntimeError, match=r"SchedulingSpec\(port_count=1\)"):
        ServerEngine(model=model)


def test_make_exchange_concurrently(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"helmsman-weights.{number}").mkdir()
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: make_exchange(str(tmp_path)), range(8)))
    assert sorted(path for path, _ in made) == sorted(str(path) for path in tmp_path.iterdir())
    for _, lock in made:
        os.close(lock)


def test_initialize_exchange_folder_small(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", 0.0)
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    for free in (num_bytes, num_bytes - 1):
        usage = shutil._ntuple_diskusage(num_bytes, 0, free)  # type: ignore[attr-defined]
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        assert not caplog.messages
        warn_without_room(model, "/dev/shm")
    (message,) = caplog.messages
    assert f"/dev/shm has {num_bytes - 1} bytes free" in message
    assert f"take {num_bytes}: " in message
    assert "set ServerConfig.exchange_folder" in message


def test_initialize_exchange_folder_missing(model: str) -> None:
    said = pytest.raises(
        ValueError, match=r"'/no/such/folder' on this worker; set ServerConfig\.exchange_folder"
    )
    with engine_of("vllm", model, exchange_folder="/no/such/folder") as engine, said:
        engine.initialize()


@pytest.mark.parametrize(
    ("arg", "instead"),
    [
        ("--port=1", "leased"),
        ("--host", r"ServerConfig\.host"),
        ("--api_key", "its own"),
        ("--model", "model"),
        ("--max_loras", r"ServerConfig\.max_loras"),
        ("--max-lora-rank=8", r"ServerConfig\.max_lora_rank"),
    ],
)
def test_server_config_reserved_args(arg: str, instead: str) -> None:
    with pytest.raises(ValueError, match=f"args has --.*{instead}"):
        ServerConfig(model="m", args=("--other", arg))


@pytest.mark.parametrize(
    "wrong",
    [
        {"dialect": "tgi"},
        {"tensor_parallel_size": 0},
        {"start_timeout_s": 0.0},
        {"models": "x"},
        {"model": 1},
    ],
)
def test_server_config_invalid_fields(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ServerEngine(**{"model": "m", **wrong})

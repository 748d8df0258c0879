"""Tests of ``helmsman up`` as a command: refusals, settings, and an existing cluster."""

from __future__ import annotations

import os
import pty
import re
import secrets
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from helmsman._cluster.settings import NODE_DEFAULTS, cluster_defaults
from helmsman._process.observation import address_towards
from tests.cluster.up_command import PROGRAM, PROGRAMS, UP, Up, address, up
from tests.contract.helpers import ROOT, wait_until

__all__ = ["address", "up"]


# --- refusals -------------------------------------------------------------------------------------


BEAKER = {
    "BEAKER_REPLICA_RANK": "1",
    "BEAKER_REPLICA_COUNT": "2",
    "BEAKER_LEADER_REPLICA_HOSTNAME": "a",
}
DSTACK = {"DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "a"}


@pytest.mark.parametrize(
    ("code", "arguments", "environ", "facts"),
    [
        (90, "", {}, ("rank 0, ", "there is no program to run: helmsman up [options] -- python")),
        (90, "--env A -- true", {}, ("--env 'A' is not NAME=VALUE",)),
        (90, "--resources { -- true", {}, ("--resources '{' is not a JSON object",)),
        (90, "--object-store 99999 -- true", {}, ("--object-store 99999 GiB", "Ask for less")),
        (90, "--gpus 77 -- true", {}, ("77 accelerators are expected", "(--gpus)", "nvidia-smi")),
        (
            90,
            "--interface ib7 -- true",
            {},
            ("--interface 'ib7' is not an interface of this node",),
        ),
        (90, "--port 70000 -- true", {}, ("port 70000, of the head's Ray, is invalid",)),
        (90, "--token-file /none -- true", {}, ("--token-file /none", "No such file")),
        (90, "--token-file /dev/null -- true", {}, ("/dev/null is empty", "openssl rand -hex 32")),
        (90, "-- true", {"HELMSMAN_TLS": "off"}, ("HELMSMAN_TLS is 'off', expected 1 (TLS",)),
        (
            90,
            "--show-settings",
            {"RAY_TMPDIR": "/dev/null/below"},
            ("the folder for Ray's files", "Not a directory", "/dev/null/below", "RAY_TMPDIR"),
        ),
        (2, "--timeout nan -- true", {}, ("argument --timeout: 'nan' is not a non-negative",)),
        (2, "--grace -1 -- true", {}, ("argument --grace: '-1' is not a non-negative number of",)),
        (2, "--start-timeout x -- true", {}, ("argument --start-timeout: 'x' is not a non-neg",)),
        (
            2,
            "-- true",
            {**BEAKER, **DSTACK},
            ("node rank", "BEAKER_REPLICA_RANK=1", "DSTACK_NODE_RANK=0", "--node-rank"),
        ),
    ],
)
def test_up_refuses(
    up: Up, code: int, arguments: str, environ: dict[str, str], facts: tuple[str, ...]
) -> None:
    up(*arguments.split(), **environ).ends(code, *facts)


def test_up_without_a_place_for_the_record_of_the_run(up: Up, tmp_path: Path) -> None:
    (tmp_path / "helmsman-someone").touch()
    run = up("--show-settings", TMPDIR=str(tmp_path), USER="someone", LOGNAME="someone")
    run.ends(90, "the run's record", str(tmp_path), "TMPDIR")


def test_up_port_that_is_held(up: Up, address: str) -> None:
    port = address.partition(":")[2]
    fact = f"port {port}, of the head's Ray, is held by process {os.getpid()} ("
    up("--port", port, "--", "true").ends(90, fact)


def test_up_one_port_for_two_things(up: Up) -> None:
    if address_towards("").startswith("127.") or not address_towards(""):
        pytest.skip("this machine has no route, and several nodes need one")
    place = ("--node-rank", "0", "--num-nodes", "2")
    run = up(*place, "--port", "7000", "--control-port", "7000", "--", "true")
    run.ends(90, "--port and --control-port are both 7000")


# --- settings -------------------------------------------------------------------------------------


def test_up_show_settings(up: Up) -> None:
    """Nothing is started; the folder for Ray's files is made."""
    place = Path("/tmp") / secrets.token_hex(4)
    arguments = (
        "--env",
        "NCCL_DEBUG=INFO",
        "--env",
        "MINE=1",
        "--resources",
        '{"NPU": 8}',
        "--start-timeout",
        "240",
    )
    environ = {"RAY_worker_niceness": "5", "SLURM_CPUS_ON_NODE": "1", "RAY_TMPDIR": str(place)}
    try:
        run = up("--show-settings", *arguments, **environ)
        run.ends(0, "this machine alone; address ", "1 CPU, 8 NPU, object store")
        assert list(place.iterdir()) == []
    finally:
        shutil.rmtree(place, ignore_errors=True)
    lines = [re.split(r"\s{2,}", line.strip()) for line in run.output.splitlines()]
    sources = {
        setting: source
        for setting, source, *_ in (line for line in lines if len(line) > 1 and "=" in line[0])
    }
    assert {
        "RAY_worker_niceness=5": "your environment",
        "NCCL_DEBUG=INFO": "--env",
        "MINE=1": "--env",
        "HCCL_HOST_SOCKET_PORT_RANGE=auto": "default",
        "HCCL_NPU_SOCKET_PORT_RANGE=auto": "default",
        "RAY_gcs_server_port_wait_time_s=240": "default",
        "RAY_agent_register_timeout_ms=240000": "default",
        "RAY_gcs_rpc_server_connect_timeout_s=240": "default",
    }.items() <= sources.items()
    names = {setting.partition("=")[0] for setting in sources}
    assert names >= {default.name for default in (*cluster_defaults(1), *NODE_DEFAULTS)}
    assert "NCCL_CUMEM_ENABLE" not in names  # 0 turns off NVLink SHARP


# --- an existing cluster --------------------------------------------------------------------------


def test_up_on_an_existing_cluster(up: Up, address: str) -> None:
    source = (
        "import os, sys; print(os.environ['RAY_ADDRESS'], 'HELMSMAN_UP_RUN' in os.environ); "
        "sys.exit(7)"
    )
    facts = (f"{address} False\n", f"RAY_ADDRESS={address}: the program runs on that cluster")
    up(*PROGRAM, source, RAY_ADDRESS=address).ends(7, *facts)
    # The cluster keeps its settings; flags precede the address.
    fact = f"RAY_ADDRESS={address}: the program runs on that cluster, and nothing is set here"
    up("--show-settings", "--", "no-such-program", RAY_ADDRESS=address).ends(0, fact)
    up("--num-nodes", "1", "--show-settings", RAY_ADDRESS=address).ends(
        0, "flags: node 0 of 1; address "
    )


def test_up_goes_on_when_its_output_is_closed(up: Up, address: str) -> None:
    """The output is a full device, as a pipe whose reader has ended."""
    below = [
        sys.executable,
        "-c",
        (
            "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 2); os.execv(sys.argv[1], "
            "sys.argv[1:])"
        ),
    ]
    up(*PROGRAM, "raise SystemExit(7)", below=below, RAY_ADDRESS=address).ends(7)


def test_up_passes_signals_on_an_existing_cluster(up: Up, address: str) -> None:
    source = (
        "import signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "print('runs', flush=True)\n"
        "signal.sigwait({signal.SIGTERM})\n"
        "print('stopped', flush=True)"
    )
    run = up(*PROGRAM, source, RAY_ADDRESS=address)
    run.said("runs\n")
    run.signal(signal.SIGTERM)
    run.ends(143, "stopped")


def test_up_where_no_cluster_answers(up: Up, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    run = up("--", "touch", str(tmp_path / "ran"), RAY_ADDRESS=address)
    run.ends(2, f"there is no Ray cluster at '{address}': nothing answers there")
    assert not (tmp_path / "ran").exists()


def test_up_interrupts_a_script_once(tmp_path: Path, address: str) -> None:
    """Ctrl-C reaches the whole process group of a terminal, and the script receives it once."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        environ = {
            **os.environ,
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": address,
        }
        os.execve(sys.executable, [*UP, *PROGRAMS, "interrupts"], environ)
    printed = b""

    def says(text: bytes) -> bool:
        nonlocal printed
        if text not in printed:
            printed += os.read(terminal, 4096)
        return text in printed

    try:
        wait_until(lambda: says(b"waits"), "the script runs", 60)
        os.write(terminal, b"\x03")
        wait_until(lambda: says(b"interrupted once"), "the script was interrupted once", 20)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130

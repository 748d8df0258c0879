"""``helmsman up`` as a user runs it, without a Ray of its own: what it refuses and shows, and a cluster that is there."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from helmsman.controller._bootstrap.settings import MANY_NODES, NODE_DEFAULTS, cluster_defaults
from helmsman.controller._bootstrap.up import make_plan
from helmsman.controller._node.checks import address_towards
from helmsman.controller._node.launchers import ALONE, NodeIdentity
from helmsman.controller.cli import _parser
from tests.contract.helpers import ROOT, wait_until
from tests.controller.bootstrap.hosts import why_not_here

NUM_WORKERS = 100 if "HELMSMAN_SOAK_ROUNDS" in os.environ else 6
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start it with these arguments, below a program, in an environment where no launcher is."""
    started: list[subprocess.Popen[str]] = []
    temporary = tempfile.mkdtemp(prefix="hu-")  # short, or the run's folder would not be there

    def up(*arguments: str, below: Sequence[str] = (), **environ: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [*below, sys.executable, "-m", "helmsman.controller.cli", "up", *arguments],
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(tmp_path),
                    "TMPDIR": temporary,
                    "PYTHONPATH": str(ROOT),
                    **environ,
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield up
    for process in started:
        process.kill()
        process.communicate()
    left = [path for path in Path(temporary).rglob("*") if not path.is_dir() or path.name.startswith("hm-")]
    shutil.rmtree(temporary)
    assert not left, "the run's folder, or its record"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Something that listens."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def ended(process: subprocess.Popen[str], limit_s: float = 60) -> tuple[int, str, str]:
    """Exit code, what was printed, and what was told."""
    out, told = process.communicate(timeout=limit_s)
    assert "Traceback" not in told, told
    return process.returncode, out, told


PROGRAM = ("--", sys.executable, "-I", "-S", "-c")


# --- what is refused ----------------------------------------------------------------------------------------------------


BEAKER = {"BEAKER_REPLICA_RANK": "1", "BEAKER_REPLICA_COUNT": "2", "BEAKER_LEADER_REPLICA_HOSTNAME": "a"}
DSTACK = {"DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "a"}


@pytest.mark.parametrize(
    ("code", "arguments", "environ", "facts"),
    [
        (90, (), {}, ("rank 0, ", "there is no program to run", "helmsman up [options] -- python train.py")),
        (90, ("--env", "A", "--", "true"), {}, ("--env 'A' is not NAME=VALUE",)),
        (90, ("--resources", "{", "--", "true"), {}, ("--resources '{' is not a JSON object",)),
        (90, ("--object-store", "99999", "--", "true"), {}, ("--object-store 99999 GiB", "Ask for less")),
        (90, ("--gpus", "77", "--", "true"), {}, ("77 accelerators are expected on this node (--gpus)", "nvidia-smi, npu-smi")),
        (90, ("--interface", "ib7", "--", "true"), {}, ("--interface 'ib7' is no interface of this node",)),
        (90, ("--port", "70000", "--", "true"), {}, ("port 70000, of the head's Ray, is none",)),
        (90, ("--token-file", "/no/such/file", "--", "true"), {}, ("--token-file /no/such/file", "No such file")),
        (90, ("--token-file", "/dev/null", "--", "true"), {}, ("/dev/null is empty", "openssl rand -hex 32 > /dev/null")),
        (90, ("--", "true"), {"HELMSMAN_TLS": "off"}, ("HELMSMAN_TLS is 'off', expected 1 (TLS between machines",)),
        (
            90,
            ("--show-settings",),
            {"RAY_TMPDIR": "/dev/null/below"},
            ("there is no place for Ray's files", "Not a directory", "/dev/null/below", "RAY_TMPDIR"),
        ),
        (2, ("--timeout", "nan", "--", "true"), {}, ("argument --timeout: 'nan' is no number of seconds from 0 on",)),
        (2, ("--grace", "-1", "--", "true"), {}, ("argument --grace: '-1' is no number of seconds",)),
        (2, ("--start-timeout", "soon", "--", "true"), {}, ("argument --start-timeout: 'soon' is no number of seconds",)),
        (2, ("--", "true"), {**BEAKER, **DSTACK}, ("node rank", "BEAKER_REPLICA_RANK=1", "DSTACK_NODE_RANK=0", "--node-rank")),
    ],
)
def test_up_refuses(
    start: Start, code: int, arguments: tuple[str, ...], environ: dict[str, str], facts: tuple[str, ...]
) -> None:
    found, _, told = ended(start(*arguments, **environ))
    assert found == code
    for fact in facts:
        assert fact in told


@pytest.mark.slow
def test_up_shows_why_ray_does_not_start(start: Start, tmp_path: Path) -> None:
    """The reason is in the log of Ray's head alone; a run that fails keeps its logs."""
    arguments = ("--start-timeout", "50", "--env", "RAY_gcs_storage=nonsense", "--", "true")
    code, _, told = ended(start(*arguments, TMPDIR=str(tmp_path)), 100)
    assert code == 93
    assert told.count("Ray did not start on this node: gcs_server has ended") == 2
    assert "Unsupported GCS storage type: nonsense" in told
    assert told.count("Ray is started once more (after ") == 1
    assert "of at most 50 s" in told


def test_no_place_for_the_record_of_the_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "helmsman-somebody").touch()
    code, _, told = ended(start("--show-settings", TMPDIR=str(tmp_path), USER="somebody", LOGNAME="somebody"))
    assert code == 90
    for fact in ("the record of the run", str(tmp_path), "TMPDIR"):
        assert fact in told


def test_up_makes_the_folder_for_rays_files(start: Start) -> None:
    place = Path(tempfile.gettempdir()) / secrets.token_hex(4)
    try:
        code, _, told = ended(start("--show-settings", RAY_TMPDIR=str(place)))
        assert (code, told) == (0, "")
        assert list(place.iterdir()) == []
    finally:
        shutil.rmtree(place, ignore_errors=True)


def test_up_port_that_is_held(start: Start, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    code, _, told = ended(start("--port", str(port), "--", "true"))
    assert code == 90
    assert f"port {port}, of the head's Ray, is held by a foreign program (pid {os.getpid()}: " in told


def test_up_one_port_for_two_things(start: Start) -> None:
    if address_towards("").startswith("127.") or not address_towards(""):
        pytest.skip("this machine has no route, and several nodes need one")
    arguments = ("--node-rank", "0", "--num-nodes", "2", "--port", "7000", "--control-port", "7000", "--", "true")
    code, _, told = ended(start(*arguments))
    assert code == 90
    assert "--port and --control-port are both 7000" in told


def test_up_secret_of_a_file_and_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes hands a secret that was made of a file to the container with its last line end."""
    file = tmp_path / "token"
    file.write_text("one two\n")
    identity = NodeIdentity(launcher=ALONE, rank=0, count=1)
    monkeypatch.setenv("HELMSMAN_TOKEN", "one two\n")
    for arguments in (["up"], ["up", "--token-file", str(file)]):
        assert make_plan(_parser().parse_args(arguments), identity, ["true"], "run", tmp_path).secret == "one two"


def in_control_group(folder: Path, limit: int, used: int) -> list[str]:
    """A program that runs another as in a container with this much memory, which Ray and Helmsman read from these files."""
    for name, text in (("max", limit), ("current", used), ("stat", "inactive_file 0\nactive_file 0")):
        (folder / f"memory.{name}").write_text(f"{text}\n")
    mount = f"mount --bind {folder} /sys/fs/cgroup && exec " + '"$@"'
    return ["unshare", "--mount", "--fork", "--kill-child", "sh", "-c", mount, "sh"]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(bool(why_not_here()), reason="no mounts can be made here")
def test_up_follows_the_memory_of_a_container(start: Start, tmp_path: Path) -> None:
    """Without enough, Ray itself would start some processes and then print a traceback."""
    below = in_control_group(tmp_path, 1 << 30, 800 << 20)
    code, _, told = ended(start("--", "true", below=below))
    assert code == 90
    for fact in ("Ray cannot start on this node", "224.0 MiB of memory are available, expected 530.0 MiB", "helmsman doctor"):
        assert fact in told
    code, _, told = ended(start("--object-store", "0.2", "--", "true", below=below))
    assert code == 90
    assert "--object-store 0.2 GiB" in told
    (tmp_path / "more").mkdir()
    code, _, told = ended(start("--", "true", below=in_control_group(tmp_path / "more", 4 << 30, 3 << 30)))
    assert code == 0, told
    assert "object store 307.2 MiB" in told, "30 % of all memory, 1.2 GiB, would leave Ray nothing"


# --- a head that is busy ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_up_survives_a_head_that_stops_while_workers_start(start: Start) -> None:
    """As a head that is flooded by registrations. With the settings of few nodes, 20 s would end the run."""
    program = str(Path(__file__).with_name("program.py"))
    runs = []
    for num_nodes, stopped_s in ((1, "8"), (MANY_NODES, "20")):
        settings = [f"--env={each.name}={each.value}" for each in cluster_defaults(num_nodes)]
        runs.append(start(*settings, "--", sys.executable, program, "burst", str(NUM_WORKERS), stopped_s))
    for run in runs:
        code, out, told = ended(run, 500)
        assert code == 0, told
        assert f"True that workers were starting, and then {NUM_WORKERS} are up\n" in out


# --- what is shown ------------------------------------------------------------------------------------------------------


def test_up_show_settings(start: Start, tmp_path: Path) -> None:
    arguments = ("--env", "NCCL_DEBUG=INFO", "--env", "MINE=1", "--resources", '{"NPU": 8}', "--start-timeout", "240")
    code, out, told = ended(start("--show-settings", *arguments, RAY_worker_niceness="5", SLURM_CPUS_ON_NODE="1"))
    assert (code, told) == (0, "")
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    sources = {setting: source for setting, source, *_ in (line for line in lines if len(line) > 1 and "=" in line[0])}
    assert sources["RAY_worker_niceness=5"] == "your environment"
    assert sources["NCCL_DEBUG=INFO"] == "--env"
    assert sources["MINE=1"] == "--env"
    assert {"RAY_gcs_server_port_wait_time_s=240", "RAY_agent_register_timeout_ms=240000"} <= sources.keys()
    assert "RAY_gcs_rpc_server_connect_timeout_s=240" in sources
    assert sources["NCCL_CUMEM_ENABLE=0"] == "default"
    names = {setting.partition("=")[0] for setting in sources}
    assert names >= {default.name for default in (*cluster_defaults(1), *NODE_DEFAULTS)}
    assert "node 0 of 1 (this machine alone)" in out
    assert "Ray is told of 1 CPU, 8 NPU" in out
    assert "object store" in out


# --- who listens --------------------------------------------------------------------------------------------------------


def test_up_goes_on_when_its_output_is_closed(listener: socket.socket, tmp_path: Path) -> None:
    """As with a pipe whose reader has gone; a run that ended there would end with 0, too."""
    theirs, ours = os.pipe()
    os.close(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "helmsman.controller.cli", "up", *PROGRAM, "raise SystemExit(7)"],
        env={
            "PATH": os.environ["PATH"],
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": f"127.0.0.1:{listener.getsockname()[1]}",
        },
        stdin=subprocess.DEVNULL,
        stderr=ours,
    )
    os.close(ours)
    assert process.wait(60) == 7


# --- a cluster that is there --------------------------------------------------------------------------------------------


def test_up_uses_a_cluster_that_is_there(start: Start, listener: socket.socket) -> None:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    source = "import os, sys; print(os.environ['RAY_ADDRESS'], 'HELMSMAN_UP_RUN' in os.environ); sys.exit(7)"
    code, out, told = ended(start(*PROGRAM, source, RAY_ADDRESS=address))
    assert (code, out) == (7, f"{address} False\n")
    assert f"RAY_ADDRESS={address}: the program runs on that cluster" in told


def test_up_passes_a_signal_to_a_program_on_a_cluster_that_is_there(
    start: Start, listener: socket.socket, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    source = (
        "import pathlib, signal, sys\n"
        "def stop(*_):\n    pathlib.Path(sys.argv[2]).touch()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while True: signal.pause()"
    )
    process = start(*PROGRAM, source, str(tmp_path / "runs"), str(tmp_path / "told"), RAY_ADDRESS=address)
    wait_until((tmp_path / "runs").exists, "the program runs")
    process.send_signal(signal.SIGTERM)
    code, _, _ = ended(process)
    assert code == 143
    assert (tmp_path / "told").exists()


def test_up_where_no_cluster_answers(start: Start, listener: socket.socket, tmp_path: Path) -> None:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    code, _, told = ended(start("--", "touch", str(tmp_path / "ran"), RAY_ADDRESS=address))
    assert code == 2
    assert f"there is no Ray cluster at '{address}': nobody answers there" in told
    assert not (tmp_path / "ran").exists()


def test_up_show_settings_of_a_cluster_that_is_there(start: Start) -> None:
    """They are not ours; flags come before the address."""
    code, out, _ = ended(start("--show-settings", "--", "no-such-program", RAY_ADDRESS="10.255.0.1:6379"))
    assert code == 0
    assert "RAY_ADDRESS=10.255.0.1:6379: the program runs on that cluster, and nothing is set here" in out
    code, out, _ = ended(start("--num-nodes", "1", "--show-settings", RAY_ADDRESS="10.255.0.1:6379"))
    assert code == 0
    assert "node 0 of 1 (flags)" in out

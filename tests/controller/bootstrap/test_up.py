"""``helmsman up`` as a user runs it: refusals, settings, a cluster that is there, and the folder
and logs of a run.
"""

from __future__ import annotations

import os
import pty
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from helmsman.controller._bootstrap.settings import MANY_NODES, NODE_DEFAULTS, cluster_defaults
from helmsman.controller._bootstrap.up import keep_logs, make_plan, run_folder
from helmsman.controller._node.launchers import ALONE, NodeIdentity
from helmsman.controller._node.observation import address_towards
from helmsman.controller._node.run_registry import default_log_dir, read_runs, user_dir
from helmsman.controller.cli import _parser
from tests.contract.helpers import ROOT, wait_until
from tests.controller.bootstrap.hosts import why_not_here
from tests.controller.bootstrap.nodes import Running, execute
from tests.controller.bootstrap.zygote import Zygote

NUM_WORKERS = 100 if "HELMSMAN_SOAK_ROUNDS" in os.environ else 6
UP = (sys.executable, "-m", "helmsman.controller.cli", "up")
PROGRAM = ("--", sys.executable, "-I", "-S", "-c")
PROGRAMS = ("--", sys.executable, str(Path(__file__).with_name("program.py")))
Up = Callable[..., Running]


@pytest.fixture
def up(tmp_path: Path, zygote: Zygote) -> Iterator[Up]:
    """Run it with these arguments, below a program, in an environment where no launcher is."""
    started: list[Running] = []
    temporary = tempfile.mkdtemp(prefix="hu-")  # short, or the run's folder would not be there
    usual = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "TMPDIR": temporary,
        "PYTHONPATH": str(ROOT),
    }

    def start(*arguments: str, below: Sequence[str] = (), **environ: str) -> Running:
        output = tmp_path / f"output-{len(started)}"
        started.append(
            Running(
                [*below, *UP, *arguments],
                {**usual, **environ},
                output,
                start=execute if below else zygote.start,
            )
        )
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.wait()
        assert "Traceback" not in running.output, running.output
    left = [
        path
        for path in Path(temporary).rglob("*")
        if not path.is_dir() or path.name.startswith("hm-")
    ]
    shutil.rmtree(temporary)
    assert not left, "the run's folder, or its record"


@pytest.fixture
def address() -> Iterator[str]:
    """Of a listener, which answers as a Ray cluster that is there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


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
        (
            90,
            (),
            {},
            ("rank 0, ", "there is no program to run", "helmsman up [options] -- python train.py"),
        ),
        (90, ("--env", "A", "--", "true"), {}, ("--env 'A' is not NAME=VALUE",)),
        (90, ("--resources", "{", "--", "true"), {}, ("--resources '{' is not a JSON object",)),
        (
            90,
            ("--object-store", "99999", "--", "true"),
            {},
            ("--object-store 99999 GiB", "Ask for less"),
        ),
        (
            90,
            ("--gpus", "77", "--", "true"),
            {},
            ("77 accelerators are expected on this node (--gpus)", "nvidia-smi, npu-smi"),
        ),
        (
            90,
            ("--interface", "ib7", "--", "true"),
            {},
            ("--interface 'ib7' is not an interface of this node",),
        ),
        (90, ("--port", "70000", "--", "true"), {}, ("port 70000, of the head's Ray, is invalid",)),
        (
            90,
            ("--token-file", "/no/such/file", "--", "true"),
            {},
            ("--token-file /no/such/file", "No such file"),
        ),
        (
            90,
            ("--token-file", "/dev/null", "--", "true"),
            {},
            ("/dev/null is empty", "openssl rand -hex 32 > /dev/null"),
        ),
        (
            90,
            ("--", "true"),
            {"HELMSMAN_TLS": "off"},
            ("HELMSMAN_TLS is 'off', expected 1 (TLS between machines",),
        ),
        (
            90,
            ("--show-settings",),
            {"RAY_TMPDIR": "/dev/null/below"},
            (
                "the folder for Ray's files",
                "Not a directory",
                "/dev/null/below",
                "RAY_TMPDIR",
            ),
        ),
        (
            2,
            ("--timeout", "nan", "--", "true"),
            {},
            ("argument --timeout: 'nan' is not a non-negative number of seconds",),
        ),
        (
            2,
            ("--grace", "-1", "--", "true"),
            {},
            ("argument --grace: '-1' is not a non-negative number of seconds",),
        ),
        (
            2,
            ("--start-timeout", "soon", "--", "true"),
            {},
            ("argument --start-timeout: 'soon' is not a non-negative number of seconds",),
        ),
        (
            2,
            ("--", "true"),
            {**BEAKER, **DSTACK},
            ("node rank", "BEAKER_REPLICA_RANK=1", "DSTACK_NODE_RANK=0", "--node-rank"),
        ),
    ],
)
def test_up_refuses(
    up: Up, code: int, arguments: tuple[str, ...], environ: dict[str, str], facts: tuple[str, ...]
) -> None:
    up(*arguments, **environ).ends(code, *facts)


@pytest.mark.slow
def test_up_shows_why_ray_does_not_start(up: Up, tmp_path: Path) -> None:
    """The reason is in the log of Ray's head alone; a run that fails keeps its logs."""
    run = up(
        "--start-timeout",
        "50",
        "--env",
        "RAY_gcs_storage=nonsense",
        "--",
        "true",
        TMPDIR=str(tmp_path),
    )
    run.ends(93, "Unsupported GCS storage type: nonsense", "of at most 50 s", limit_s=100.0)
    assert run.output.count("Ray did not start on this node: gcs_server has ended") == 2
    assert run.output.count("Ray is started once more (after ") == 1


def test_up_without_a_place_for_the_record_of_the_run(up: Up, tmp_path: Path) -> None:
    (tmp_path / "helmsman-somebody").touch()
    run = up("--show-settings", TMPDIR=str(tmp_path), USER="somebody", LOGNAME="somebody")
    run.ends(90, "the run's record", str(tmp_path), "TMPDIR")


def test_up_port_that_is_held(up: Up, address: str) -> None:
    port = address.partition(":")[2]
    fact = f"port {port}, of the head's Ray, is held by a foreign program (pid {os.getpid()}: "
    up("--port", port, "--", "true").ends(90, fact)


def test_up_one_port_for_two_things(up: Up) -> None:
    if address_towards("").startswith("127.") or not address_towards(""):
        pytest.skip("this machine has no route, and several nodes need one")
    place = ("--node-rank", "0", "--num-nodes", "2")
    run = up(*place, "--port", "7000", "--control-port", "7000", "--", "true")
    run.ends(90, "--port and --control-port are both 7000")


def test_up_secret_of_a_file_and_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes hands a secret that was made of a file to the container with its last line end."""
    file = tmp_path / "token"
    file.write_text("one two\n")
    identity = NodeIdentity(launcher=ALONE, rank=0, count=1)
    monkeypatch.setenv("HELMSMAN_TOKEN", "one two\n")
    for arguments in (["up"], ["up", "--token-file", str(file)]):
        assert (
            make_plan(_parser().parse_args(arguments), identity, ["true"], "run", tmp_path).secret
            == "one two"
        )


def in_control_group(folder: Path, limit: int, used: int) -> list[str]:
    """A program that runs another as in a container with this much memory, which Ray and Helmsman
    read from these files.
    """
    folder.mkdir()
    for name, text in (
        ("max", limit),
        ("current", used),
        ("stat", "inactive_file 0\nactive_file 0"),
    ):
        (folder / f"memory.{name}").write_text(f"{text}\n")
    mount = f"mount --bind {folder} /sys/fs/cgroup && exec " + '"$@"'
    return ["unshare", "--mount", "--fork", "--kill-child", "sh", "-c", mount, "sh"]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(bool(why_not_here()), reason="no mounts can be made here")
def test_up_follows_the_memory_of_a_container(up: Up, tmp_path: Path) -> None:
    """Without enough, Ray itself would start some processes and then print a traceback."""
    below = in_control_group(tmp_path / "little", 1 << 30, 800 << 20)
    facts = (
        "Ray cannot start on this node",
        "224.0 MiB of memory are available, expected 530.0 MiB",
        "helmsman doctor",
    )
    up("--", "true", below=below).ends(90, *facts)
    up("--object-store", "0.2", "--", "true", below=below).ends(90, "--object-store 0.2 GiB")
    # 30 % of all memory, 1.2 GiB, would leave Ray nothing.
    run = up("--", "true", below=in_control_group(tmp_path / "more", 4 << 30, 3 << 30))
    run.ends(0, "object store 307.2 MiB", limit_s=100.0)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_up_survives_a_stopped_head_among_starts(up: Up) -> None:
    """As a head that is flooded by registrations. With the settings of few nodes, 15 s would end
    the run.
    """
    settings = [f"--env={each.name}={each.value}" for each in cluster_defaults(MANY_NODES)]
    run = up(*settings, *PROGRAMS, "burst", str(NUM_WORKERS), "15")
    run.ends(0, f"True that workers were starting, and then {NUM_WORKERS} are up\n", limit_s=500.0)


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
        run.ends(
            0, "node 0 of 1 (this machine alone)", "resources for Ray: 1 CPU, 8 NPU", "object store"
        )
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


# --- a cluster that is there ----------------------------------------------------------------------


@pytest.mark.slow
def test_up_on_an_existing_cluster(up: Up, address: str) -> None:
    source = (
        "import os, sys; print(os.environ['RAY_ADDRESS'], 'HELMSMAN_UP_RUN' in os.environ); "
        "sys.exit(7)"
    )
    facts = (f"{address} False\n", f"RAY_ADDRESS={address}: the program runs on that cluster")
    up(*PROGRAM, source, RAY_ADDRESS=address).ends(7, *facts)
    # Its settings are not ours; flags come before the address.
    fact = f"RAY_ADDRESS={address}: the program runs on that cluster, and nothing is set here"
    up("--show-settings", "--", "no-such-program", RAY_ADDRESS=address).ends(0, fact)
    up("--num-nodes", "1", "--show-settings", RAY_ADDRESS=address).ends(0, "node 0 of 1 (flags)")


@pytest.mark.slow
def test_up_goes_on_when_its_output_is_closed(up: Up, address: str) -> None:
    """As with a pipe whose reader has gone; a run that ended there would end with 0, too."""
    below = [
        sys.executable,
        "-c",
        (
            "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 2); os.execv(sys.argv[1], "
            "sys.argv[1:])"
        ),
    ]
    up(*PROGRAM, "raise SystemExit(7)", below=below, RAY_ADDRESS=address).ends(7)


@pytest.mark.slow
def test_up_passes_signals_on_an_existing_cluster(up: Up, address: str) -> None:
    source = (
        "import signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "print('runs', flush=True)\n"
        "signal.sigwait({signal.SIGTERM})\n"
        "print('was told', flush=True)"
    )
    run = up(*PROGRAM, source, RAY_ADDRESS=address)
    run.said("runs\n")
    run.signal(signal.SIGTERM)
    run.ends(143, "was told")


@pytest.mark.slow
def test_up_where_no_cluster_answers(up: Up, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    run = up("--", "touch", str(tmp_path / "ran"), RAY_ADDRESS=address)
    run.ends(2, f"there is no Ray cluster at '{address}': nothing answers there")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_up_interrupts_a_script_once(tmp_path: Path, address: str) -> None:
    """Ctrl-C goes to the whole process group of a terminal; a second one would interrupt the
    clean-up of the script.
    """
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


# --- folder and logs ------------------------------------------------------------------------------


def test_run_folder(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_folder({}) as (run_id, folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [(record.run_id, alive) for record, alive in read_runs()] == [(run_id, True)]
    assert not folder.exists()
    assert read_runs() == []
    monkeypatch.chdir("/tmp")
    with run_folder({"RAY_TMPDIR": "."}) as (_, folder):
        assert folder.parent == Path("/tmp"), "Ray would take it from a folder of its own"


def test_keep_logs(temporary: Path) -> None:
    folder = temporary / "run"
    logs = folder / "ray" / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("why")
    reported: list[str] = []
    keep_logs("0123456789", folder, reported.append)
    kept = default_log_dir("0123456789")
    assert (kept / "logs" / "raylet.out").read_text() == "why"
    assert reported.pop() == f"Ray's logs of this node are kept in {kept}"
    (folder / "ray_start.log").touch()
    os.rename(user_dir(), temporary / "elsewhere")
    user_dir().touch()  # a file, where a folder should be
    keep_logs("0123456789", folder, reported.append)
    assert "cannot be kept in" in reported.pop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become a user without a name")
def test_user_dir_of_a_user_without_a_name(temporary: Path) -> None:
    """As in a container that runs under an unknown id."""
    pid = os.fork()
    if pid == 0:
        for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
            os.environ.pop(variable, None)
        os.setuid(54_321)
        os._exit(0 if user_dir() == temporary / "helmsman-54321" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

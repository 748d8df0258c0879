"""Run Python programs in forks of one process, which has imported their modules: to import torch
and transformers costs four seconds.

The zygote serves all processes of a test session. The first one that starts a program starts it,
and it ends with the session, together with every program that still runs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
SESSION_ENV_VAR = "HELMSMAN_TEST_SESSION"
"""tests/conftest.py recognises the processes of a test session by it."""
PR_SET_PDEATHSIG = 1
_NO_SESSION = "0" * 32
_HEADER_BYTES = 8


class Program:
    """A started program, with the part of ``subprocess.Popen`` that the tests need."""

    def __init__(self, command: Sequence[str], pid: int, connection: socket.socket) -> None:
        self.args, self.pid, self.returncode = list(command), pid, None
        self._connection = connection

    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; minus the number of a signal that ended the program."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                received = self._connection.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._connection.close()
            if not received:
                raise RuntimeError(f"the zygote has ended before its program {self.args}")
            self.returncode = int(received)
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL to the program, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    preload: Sequence[str] = (),
) -> Program:
    """Start ``python -m MODULE ...`` or ``python -c CODE ...`` in a session of its own.

    Args:
        command: of the program; its first word, the interpreter, is not used, and no options of the
            interpreter but these are known.
        env: its environment, by default that of the caller.
        stdout: a file, by default /dev/null.
        stderr: a file, by default that of stdout.
        preload: modules that the zygote imports before it forks, if it has not yet.
    """
    request = {
        "argv": list(command[1:]),
        "cwd": os.getcwd(),
        "env": dict(os.environ if env is None else env),
        "session": os.environ.get(SESSION_ENV_VAR, _NO_SESSION),
        "preload": list(preload),
    }
    connection = _connect()
    message = json.dumps(request).encode()
    header = len(message).to_bytes(_HEADER_BYTES, "big")
    with open(os.devnull, "wb") as null:
        output = stdout or null
        files = [output.fileno(), (stderr or output).fileno()]
        socket.send_fds(connection, [header], files)
    connection.sendall(message)
    answer = connection.recv(1 << 16).decode()
    if not answer.isdigit():
        raise RuntimeError(f"the zygote cannot start {list(command)}: {answer or 'it has ended'}")
    return Program(command, int(answer), connection)


def run(
    command: Sequence[str], *, timeout: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run(..., capture_output=True, text=True)`` does.

    Args:
        command: as of :func:`start`.
        timeout: seconds after which the program is killed.
        options: ``env`` and ``preload`` of :func:`start`.

    Raises:
        subprocess.TimeoutExpired: with the output of the program until then.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        program = start(command, stdout=stdout, stderr=stderr, **options)

        def printed(file: IO[str]) -> str:
            file.seek(0)
            return file.read()

        try:
            code = program.wait(timeout)
        except subprocess.TimeoutExpired as error:
            error.stdout, error.stderr = printed(stdout), printed(stderr)  # type: ignore[assignment]
            raise
        finally:
            program.kill()
        return subprocess.CompletedProcess(list(command), code, printed(stdout), printed(stderr))


def _connect() -> socket.socket:
    """Connect to the zygote of this test session, and start it if this is the first connection."""
    # pytest-xdist sets the id in all of its processes, which its controller starts.
    shared = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    owner = os.getppid() if shared else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"helmsman-zygote-{shared or os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if (found := folder.stat()).st_uid != os.getuid() or found.st_mode & 0o077:
        raise RuntimeError(f"{folder} is not private to this user, remove it")
    connection = socket.socket(socket.AF_UNIX)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(str(folder / "socket"))
        except OSError:
            _start_zygote(folder, owner)
            connection.connect(str(folder / "socket"))
    return connection


def _start_zygote(folder: Path, owner: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        (folder / "socket").unlink()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    # This process exits once it has forked the zygote, which must not end with its first user.
    subprocess.run(
        [sys.executable, "-m", __name__, str(listener.fileno()), str(owner), str(folder)],
        cwd=ROOT,
        env={**os.environ, SESSION_ENV_VAR: _NO_SESSION, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        start_new_session=True,
        check=True,
    )
    listener.close()


# --- the zygote -----------------------------------------------------------------------------------


def _serve(listener: socket.socket, owner: int, folder: str) -> tuple[dict[str, Any], list[int]]:
    """Fork a program for each request until the owner has ended.

    Returns in each child: its request, and its descriptors of stdout and stderr.
    """
    selector, running = selectors.DefaultSelector(), dict[int, socket.socket]()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(os.pidfd_open(owner), selectors.EVENT_READ, owner)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request, descriptors = _receive(connection)
                try:
                    pid = _fork(request["preload"])
                except ImportError as error:
                    connection.sendall(str(error).encode())
                    continue
                if not pid:
                    selector.close()
                    for each in (listener, connection, *running.values()):
                        each.close()
                    return request, descriptors
                for descriptor in descriptors:
                    os.close(descriptor)
                connection.sendall(str(pid).encode())
                running[pid] = connection
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            elif key.data == owner:
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(0)
            else:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                with running.pop(key.data) as connection, contextlib.suppress(OSError):
                    connection.sendall(str(code).encode())


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    header, descriptors, _, _ = socket.recv_fds(connection, _HEADER_BYTES, 2)
    with connection.makefile("rb") as file:
        return json.loads(file.read(int.from_bytes(header, "big"))), descriptors


def _fork(preload: Sequence[str]) -> int:
    if any(name not in sys.modules for name in preload):
        for name in preload:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # a collection in a child would copy every page of these modules
    sys.stdout.flush()
    return os.fork()


def _exit_after(function: Callable[..., None], *args: Any) -> NoReturn:
    """Exit as Python does after a program, but without the deletion of all modules, which takes
    longer than many programs.
    """
    code: Any = 0
    try:
        function(*args)
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:  # noqa: BLE001 - the end of the process
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _become(zygote: int, request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this child what the request asks for, and run the program."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote:  # the zygote ended before this child had its own session
        os._exit(1)
    _mark(request["session"])
    null = os.open(os.devnull, os.O_RDONLY)
    for target, descriptor in enumerate((null, *descriptors)):
        os.dup2(descriptor, target)
    for descriptor in {null, *descriptors}:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None
    os.chdir(request["cwd"])
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    first, program, *rest = request["argv"]
    sys.orig_argv = [sys.executable, first, program, *rest]
    sys.argv = [first, *rest]
    own = [each for each in sys.path[1:] if each != str(ROOT)]
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [os.getcwd(), *given, *own]
    if first == "-m":
        if not hasattr(sys.modules.get(program), "__path__"):
            sys.modules.pop(program, None)  # runpy would warn that the module exists twice
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)


def _mark(session: str) -> None:
    """Write the session into the environment that /proc shows, which is that of the zygote's start;
    the length is the same.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if len(session) == len(_NO_SESSION) and (address := getenv(SESSION_ENV_VAR.encode())):
        ctypes.memmove(address, session.encode(), len(session))


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    _zygote = os.getpid()
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        _asked = _serve(_listener, int(sys.argv[2]), sys.argv[3])
    _exit_after(_become, _zygote, *_asked)

"""Configuration of all tests; among others, it fails a session whose processes outlive it."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import hypothesis
import psutil
import pytest

# Imports make no garbage. Without collections, the tests are collected a third faster.
gc.disable()

pytest.register_assert_rewrite("helmsman.testing.contract")

# The duration of an example depends on the load of the machine.
hypothesis.settings.register_profile(
    "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")

SESSION_ENV_VAR = "HELMSMAN_TEST_SESSION"
SESSION = uuid.uuid4().hex
GRACE_S = 10.0

# A shell starts background jobs with SIGINT ignored. Child processes inherit only that, and would
# not react to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup ignores SIGHUP. The kernel sends SIGHUP, then SIGCONT, to stopped workers whose raylet has
# exited, and the first signal must end them.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Every process that a test causes inherits this variable, even after it has left the process group
# or init has adopted it.
os.environ[SESSION_ENV_VAR] = SESSION

# Workers have the same setting: threads that wait leave the cores to other processes.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Scripts whose libraries install uvloop run the controllers on its event loops. `make nightly` runs
# tests/contract so.
if os.environ.get("HELMSMAN_TEST_UVLOOP"):
    import uvloop

    uvloop.install()

# Without these variables, records and logs of the tests lie below TMPDIR, apart from those of the
# user's own runs.
for _name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
    os.environ.pop(_name, None)

SHARED = ("tests/agents/", "tests/multinode/", "tests/nightly/multinode/")
"""Folders that one process of pytest-xdist runs."""

BACKENDS = ("inline", "local", "ray", "ray-smoke")


def _backends(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in BACKENDS]:
        raise argparse.ArgumentTypeError(
            f"unknown backend {', '.join(map(repr, unknown))}, expected some of "
            f"{', '.join(BACKENDS)}, separated by commas"
        )
    return names


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that selects the schedulers of tests/contract."""
    parser.addoption(
        "--backends",
        type=_backends,
        default="inline,local,ray",
        help="schedulers on which tests/contract run: a comma-separated list of inline, local, ray "
        "and ray-smoke, which runs only the tests with the mark ray_smoke on Ray",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest folders first, so that no process runs one of them alone in the end."""
    items.sort(key=lambda item: not {"multinode", "contract"} & set(item.path.parts))


def pytest_collection_finish() -> None:
    """Exempt the imported modules from garbage collections, which engines and tests wait for."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by file, or by folder where its files share a Ray cluster or workers with a
    model, which take seconds to start.
    """
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class ByFixture(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            if file.startswith("tests/contract/"):
                return "tests/contract on Ray" if "[ray" in nodeid else "tests/contract"
            return next((folder for folder in SHARED if file.startswith(folder)), file)

    return ByFixture(config, log)


def processes_of_this_session() -> list[psutil.Process]:
    """Find the running processes that the tests caused, without this one and without zombies."""
    found = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _environ(process).get(SESSION_ENV_VAR) == SESSION:
            found[process.pid] = process
    return [process for process in found.values() if _is_left_over(process)]


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


def _is_left_over(process: psutil.Process) -> bool:
    try:
        # Python's own tracker of shared memory ends with this process.
        tracker = process.ppid() == os.getpid() and "multiprocessing.resource_tracker" in " ".join(
            process.cmdline()
        )
        return process.status() != psutil.STATUS_ZOMBIE and not tracker
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        run = _environ(process).get("HELMSMAN_RUN", "none")
        return (
            f"pid {process.pid} (parent {process.ppid()}, run {run}): "
            f"{' '.join(process.cmdline())[:200]}"
        )
    except psutil.Error:
        return f"pid {process.pid}"


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_session() -> Iterator[None]:
    """Fail the session if a process of the tests still runs after the 10 s that Helmsman promises.

    This fixture is set up before all other session fixtures, so it ends after them.
    """
    yield
    deadline = time.monotonic() + GRACE_S
    while (left := processes_of_this_session()) and time.monotonic() < deadline:
        time.sleep(0.1)
    described = [_describe(process) for process in left]
    for process in left:
        process.kill()
    if described:
        pytest.fail(
            "processes outlived the test session (now killed):\n  " + "\n  ".join(described),
            pytrace=False,
        )


@pytest.fixture
def young_heap() -> Iterator[None]:
    """Limit garbage collections to new objects, because with torch and Ray each takes a second."""
    gc.freeze()
    yield
    gc.unfreeze()

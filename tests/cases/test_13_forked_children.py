"""Engines and rewards start processes and threads as a script does, on every scheduler."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest

from helmsman import Job, RewardPool, Scheduler
from tests.cases.conftest import OPTIONS

STARTS = ("fork", "spawn", "forkserver")
FORK = multiprocessing.get_context("fork")


def double(number: int) -> int:
    return 2 * number


def wait_for_ever() -> NoReturn:
    while True:
        signal.pause()


def refuse(ready: Connection) -> None:
    """Send a word for each SIGTERM that does not end this process."""
    signal.signal(signal.SIGTERM, lambda *_: ready.send("refused"))
    ready.send("ready")
    wait_for_ever()


def ended(target: Callable[[], object] = wait_for_ever) -> int | None:
    """Terminate a forked child at once; returns its exit code, None if it outlives SIGTERM."""
    child = FORK.Process(target=target)
    child.start()
    child.terminate()
    child.join(30)
    code = child.exitcode
    child.kill()
    return code


def scored(text: str) -> float:
    with FORK.Pool(1) as pool:
        return float(pool.apply(double, (len(text),)))


class Parent:
    """An engine that starts processes and threads."""

    def terminates(self, times: int) -> set[int | None]:
        return {ended() for _ in range(times)}

    def terminates_in_thread(self, times: int) -> set[int | None]:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:  # Process is not thread-safe
            return set(threads.map(lambda _: ended(), range(times)))

    def terminates_grandchild(self) -> int | None:
        """A child terminates its own child."""
        ours, theirs = FORK.Pipe()
        child = FORK.Process(target=lambda: theirs.send(ended()))
        child.start()
        code = ours.recv() if ours.poll(60) else None
        child.join()
        return code

    async def terminates_async(self) -> int | None:
        return ended()

    def refuses(self) -> list[object]:
        """A child's own handler of SIGTERM works."""
        ours, theirs = FORK.Pipe()
        child = FORK.Process(target=refuse, args=(theirs,))
        child.start()
        words = [ours.recv()]
        child.terminate()
        words.append(ours.recv())
        child.kill()
        child.join()
        return words

    def inherited(self) -> bool:
        """A handler that this engine installs is inherited; afterwards the worker's is back."""
        ours, theirs = FORK.Pipe()
        before = signal.signal(signal.SIGTERM, mine)
        child = FORK.Process(target=lambda: theirs.send(signal.getsignal(signal.SIGTERM) is mine))
        child.start()
        child.join()
        signal.signal(signal.SIGTERM, before)
        return bool(ours.recv()) and ended() == -signal.SIGTERM

    def mask(self) -> set[int]:
        """The blocked signals of this thread, of a child, and of a program."""
        ours, theirs = FORK.Pipe()
        child = FORK.Process(
            target=lambda: theirs.send(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        )
        child.start()
        child.join()
        code = "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
        program = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, text=True
        )
        blocked = {*ours.recv(), *signal.pthread_sigmask(signal.SIG_BLOCK, ())}
        return {*map(int, blocked), *map(int, program.stdout.split())}

    def pools(self, start: str) -> list[int]:
        context = multiprocessing.get_context(start)
        with context.Pool(1) as pool:
            found = pool.map(double, [1, 2])
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
            return found + list(executor.map(double, [3, 4]))

    def many_pools(self, times: int) -> int:
        for _ in range(times):
            with FORK.Pool(2) as pool:
                pool.map(abs, [1, -2])
        return times

    def manager(self) -> list[int]:
        with FORK.Manager() as manager:
            shared = manager.list()
            child = FORK.Process(target=shared.append, args=(1,))
            child.start()
            child.join()
            return list(shared)

    def exit_codes(self) -> list[int]:
        """The exit codes of a fork, of programs, and of a program with a hook of ours."""
        pid = os.fork()
        if not pid:
            os._exit(5)
        commands = ["exit 3", "kill -TERM $$"]
        codes = [subprocess.run(["sh", "-c", command], check=False) for command in commands]
        codes.append(subprocess.run(["true"], preexec_fn=os.getpid, check=False))
        status = os.waitpid(pid, 0)[1]
        return [os.waitstatus_to_exitcode(status), *(each.returncode for each in codes)]

    def overtime(self) -> bool:
        try:
            subprocess.run(["sleep", "60"], timeout=0.05, check=False)
        except subprocess.TimeoutExpired:
            return True
        return False

    def threads(self) -> list[int]:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return list(pool.map(double, [1, 2]))


def mine(*_: object) -> None:
    """Handle a signal of the engine."""


@pytest.fixture(scope="module")
def call(scheduler: Scheduler) -> Iterator[Callable[..., Any]]:
    """Call a method of an engine."""
    (worker,) = scheduler.create_workers(Job(role="parents"))
    scheduler.create_engines([worker], Parent)
    yield lambda method, *args: scheduler.call_engine(worker, method, None, *args, rpc_timeout=120)
    scheduler.delete_workers("parents")


@pytest.mark.parametrize("method", ["terminates", "terminates_in_thread"])
def test_a_terminated_child_ends(call: Callable[..., Any], method: str) -> None:
    """SIGTERM ends a child, however early it comes, and from whichever thread it was forked."""
    assert call(method, 20) == {-signal.SIGTERM}


@pytest.mark.parametrize("method", ["terminates_grandchild", "terminates_async"])
def test_any_terminated_child_ends(call: Callable[..., Any], method: str) -> None:
    """So do children of children, and those of async methods."""
    assert call(method) == -signal.SIGTERM


def test_handlers_of_engines_are_kept(call: Callable[..., Any]) -> None:
    """Handlers of SIGTERM that a child or its engine installs work as in a script."""
    assert call("refuses") == ["ready", "refused"]
    assert call("inherited")


def test_no_signal_is_blocked(call: Callable[..., Any]) -> None:
    """Neither in engine code nor in the processes that it starts."""
    assert call("mask") == set()


@pytest.mark.parametrize("start", STARTS)
def test_pools_of_processes(call: Callable[..., Any], start: str) -> None:
    """multiprocessing and concurrent.futures work by every start method."""
    assert call("pools", start) == [2, 4, 6, 8]


def test_many_pools_end(call: Callable[..., Any]) -> None:
    """No pool hangs at its end."""
    assert call("many_pools", 20) == 20


def test_managers(call: Callable[..., Any]) -> None:
    """A manager's process serves other children."""
    assert call("manager") == [1]


def test_exit_codes_reach_the_engine(call: Callable[..., Any]) -> None:
    """No one else waits for the engine's children."""
    assert call("exit_codes") == [5, 3, -signal.SIGTERM, 0]


def test_programs_and_threads(call: Callable[..., Any]) -> None:
    """A program has a time limit; threads return results."""
    assert call("overtime")
    assert call("threads") == [2, 4]


def test_rewards_fork(scheduler: Scheduler) -> None:
    """A reward computes in a pool of its own."""
    with RewardPool(scheduler, scored, Job(role="scores"), timeout=120) as pool:
        assert pool.map(["a", "bc"]) == [2.0, 4.0]


SCRIPT = """
import concurrent.futures, multiprocessing
from helmsman import Job, make_scheduler

class Number:
    def __init__(self, value):
        self.value = value

def double(number):
    return Number(2 * number.value)

class Parent:
    def pools(self, start):
        context = multiprocessing.get_context(start)
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
            found = executor.submit(double, Number(1)).result()
        with context.Pool(1) as pool:
            return pool.map(double, [found])[0].value

if __name__ == "__main__":
    with make_scheduler({backend!r}, **{options!r}) as scheduler:
        (worker,) = scheduler.create_workers(Job(role="parents"))
        scheduler.create_engines([worker], Parent)
        print([scheduler.call_engine(worker, "pools", None, start) for start in {starts!r}])
"""


def test_children_use_names_of_the_script(backend: str, tmp_path: Path) -> None:
    """Functions and classes that the script itself defines reach the children and return."""
    script = tmp_path / "script.py"
    text = SCRIPT.format(backend=backend, options=OPTIONS[backend], starts=STARTS)
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split("\n")[-2:] == ["[4, 4, 4]", ""], done.stdout + done.stderr

"""Contract suite: pytest tests that every Scheduler must pass.

A test module imports everything from here and defines the fixture ``make_scheduler``, which returns
a function that makes a scheduler; docs/testing.md has an example. The function is sent to another
process by cloudpickle and may be called while an earlier scheduler is open. The schedulers need
eight CPUs, and workers on this machine. Tests that stop or kill workers are skipped on a scheduler
whose workers share the script's process.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import functools
import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, WorkerState
from helmsman.testing import contract_engine
from helmsman.testing.contract_engine import CountingEngine
from helmsman.testing.contract_fixtures import (
    engine,
    engine_class,
    gate,
    own_processes,
    peer,
    role,
    scheduler,
    shared_workers,
)
from helmsman.testing.contract_tools import LIMIT_S, Engine, Gate, held, is_running, wait_until

__all__ = [
    "TestSchedulerContract",
    "engine",
    "engine_class",
    "gate",
    "own_processes",
    "peer",
    "role",
    "scheduler",
    "shared_workers",
]

LATE_S = 0.2
"""Timeout of calls that must time out."""
BEGUN_S = 3.0
"""Timeout of calls that must begin, on a busy machine too, and then time out."""
GONE_S = 10.0
"""Limit for all processes of a controller to exit after the controller has ended."""
NOTICE_S = 2.0
"""Limit for reporting a worker's death to callers."""

_DRIVER = """
import asyncio, base64, json, pickle, sys

from helmsman import Job

if __name__ == "__main__":
    scheduler = pickle.loads(base64.b64decode(sys.argv[1]))()
    pids = {}
    for role in ("deleted", "kept"):
        (worker_id,) = scheduler.create_workers(Job(role=role))
        engine = "helmsman.testing.contract_engine.CountingEngine"
        asyncio.run(scheduler.create_engine(worker_id, engine))
        pids[role] = scheduler.call_engine(worker_id, "start_child", rpc_timeout=60)
    scheduler.delete_workers("deleted")
    print(json.dumps({"pids": pids, "has_torch": "torch" in sys.modules}), flush=True)
    sys.stdin.read()
"""


def _is_stopped(scheduler: Scheduler, worker_id: str) -> bool:
    return not asyncio.run(scheduler.check_health(worker_id)).answered


class TestSchedulerContract:
    """The guarantees of a scheduler, in the order of its documentation."""

    def test_call_arguments_and_results(self, engine: Engine) -> None:
        """Arguments and results arrive unchanged by both forms of a call."""
        assert engine.call("echo", 1, "two", three=[3.0, None]) == (
            (1, "two"),
            {"three": [3.0, None]},
        )
        assert engine.call("echo", None) is None
        assert engine.call("async_add", 4) == 4
        assert engine.call("add", number=1) == 5
        assert asyncio.run(engine.acall("add")) == 6

    def test_call_order(self, engine: Engine, peer: Engine, gate: Gate) -> None:
        """Synchronous methods run one after another on one thread, in the order of the calls."""
        with held(engine, gate) as running:
            queued = [engine.begin("note", str(index)) for index in range(50)]
            assert peer.call("add") == 1, "the other worker must not be blocked"
        for future in (running, *queued):
            future.result(timeout=LIMIT_S)
        assert engine.call("entries") == [str(index) for index in range(50)]
        large = [
            engine.begin("note_size", bytearray(4 << 20) if index % 5 == 0 else index)
            for index in range(20)
        ]
        for future in large:
            future.result(timeout=LIMIT_S)
        sizes = [str(4 << 20) if index % 5 == 0 else str(index) for index in range(20)]
        assert engine.call("entries")[50:] == sizes, (
            "arguments that take longer to pack must not be overtaken"
        )
        assert len({engine.call("thread") for _ in range(5)}) == 1

    def test_async_methods_run_concurrently(self, engine: Engine, gate: Gate) -> None:
        """Many async methods run concurrently."""
        calls = [engine.begin("async_wait", *gate.files) for _ in range(100)]
        gate.wait_started()
        assert engine.call("async_add", 0) >= 1
        gate.open()
        assert max(call.result(timeout=LIMIT_S) for call in calls) == 100

    def test_ports_are_leased_to_each_worker(self, scheduler: Scheduler, role: str) -> None:
        """Each worker has ports of its own, and workers are listed in rank order."""
        scheduler.create_workers(Job(role=role, replicas=3, tasks=[SchedulingSpec(port_count=4)]))
        workers = scheduler.get_workers(role)
        ports = [int(port) for worker in workers for port in worker.engine_ports]
        assert len(ports) == len(set(ports)) == 12
        assert all(20_000 <= port < 65_536 for port in ports)
        assert [worker.id for worker in workers] == [f"{role}/{index}" for index in range(3)]
        assert all(worker.ip for worker in workers)

    # 1. At most once.

    @pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
    @pytest.mark.parametrize("method", ["wait", "async_wait"])
    def test_late_call_runs_once(
        self, engine: Engine, gate: Gate, method: str, awaited: bool
    ) -> None:
        """A late call raises with details, marks its worker, keeps running and is not resent."""
        before = engine.state

        def call() -> None:
            if awaited:
                asyncio.run(engine.acall(method, *gate.files, timeout=BEGUN_S))
            else:
                engine.call(method, *gate.files, timeout=BEGUN_S)

        with pytest.raises(errors.CallTimeoutError) as caught:
            call()
        error = caught.value
        assert (before, engine.state) == (WorkerState.READY, WorkerState.OVERDUE)
        assert isinstance(error, TimeoutError)
        assert (error.worker_id, error.engine_name, error.method) == (
            engine.worker_id,
            engine.name,
            method,
        )
        assert error.limit_s == BEGUN_S <= error.elapsed_s
        assert error.worker_alive
        text = str(error)
        for fact in (
            f"{engine.name}.{method}",
            f"limit {BEGUN_S:.2f} s, set by the call's rpc_timeout argument",
            "was not sent again",
        ):
            assert fact in text
        assert "is alive" in text
        if method == "wait":
            lines = inspect.getsource(contract_engine).splitlines()
            line = next(
                number
                for number, text in enumerate(lines, 1)
                if "the line that a time-out shows" in text
            )
            assert f"line {line}, in wait" in error.stack
            assert "wait_for_file" in error.stack
        else:
            assert "in async_wait" in error.stack
        assert not re.search(r"helmsman/(rpc_server|_\w+)/", error.stack), (
            "our own frames are hidden"
        )
        gate.open()
        wait_until(
            lambda: engine.state is WorkerState.READY,
            "the late call ends and the worker is ready again",
        )
        assert engine.call("add", 0) == 1, "it ran once"

    def test_queued_call_is_withdrawn(self, engine: Engine, gate: Gate) -> None:
        """A call that is still queued at its deadline never runs."""
        with held(engine, gate) as running:
            with pytest.raises(errors.CallTimeoutError) as caught:
                engine.call("add", 100, timeout=LATE_S)
            assert f"had not begun behind {engine.name}.wait" in str(caught.value)
            assert "was withdrawn" in str(caught.value)
            assert "in wait" in caught.value.stack, "the call that it waited behind"
            assert engine.state is WorkerState.READY, "no late call occupies the worker"
            gate.open()
            assert running.result(timeout=LIMIT_S) == 1
        assert engine.call("add", 0) == 1, "the withdrawn call never ran"

    def test_many_late_calls_run_once_each(self, engine: Engine, gate: Gate) -> None:
        """Concurrent calls that all exceed their timeouts run once each."""
        with held(engine, gate, "async_wait"):

            async def all_late() -> list[Any]:
                late = (engine.acall("async_wait", *gate.files, timeout=LATE_S) for _ in range(20))
                return await asyncio.gather(*late, return_exceptions=True)

            outcomes = asyncio.run(all_late())
        assert all(isinstance(outcome, errors.CallTimeoutError) for outcome in outcomes)
        wait_until(lambda: engine.state is WorkerState.READY, "all have ended")
        assert engine.call("add", 0) == 21

    def test_cancelled_call_runs_once(self, engine: Engine, gate: Gate) -> None:
        """Cancelling an awaited call neither reverts nor repeats it."""

        async def cancel() -> None:
            call = asyncio.ensure_future(engine.acall("wait", *gate.files))
            await asyncio.to_thread(gate.wait_started)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

        asyncio.run(cancel())
        assert engine.health() is not None
        gate.open()
        assert engine.call("add", 0) == 1

    # 2. One deadline.

    @pytest.mark.usefixtures("own_processes")
    def test_get_workers_has_one_deadline(self, scheduler: Scheduler, role: str) -> None:
        """All workers are late and share one deadline instead of one after another."""
        workers = scheduler.create_workers(Job(role=role, replicas=2))
        for worker_id in workers:
            os.kill(asyncio.run(scheduler.check_health(worker_id)).pid, signal.SIGSTOP)
            wait_until(functools.partial(_is_stopped, scheduler, worker_id), "it is stopped")
        started = time.monotonic()
        with pytest.raises(errors.CallTimeoutError):
            scheduler.get_workers(role, timeout=1.0)
        assert time.monotonic() - started < 1.9
        for worker_id in workers:
            asyncio.run(scheduler.kill_worker(worker_id, "it hangs"))

    # 3. Atomic start.

    def test_infeasible_job_starts_nothing(self, scheduler: Scheduler, role: str) -> None:
        """One job that does not fit prevents every job of the start."""
        before = {status.worker_id for status in scheduler.status()}
        small = Job(role=role, replicas=2)
        large = Job(role=f"{role}-large", tasks=[SchedulingSpec(gpu=100_000)])
        for attempt in (scheduler.plan, scheduler.create_workers):
            with pytest.raises(errors.PlacementInfeasibleError, match=r"100000 GPU"):
                attempt([small, large])
        assert {status.worker_id for status in scheduler.status()} == before
        assert len(scheduler.create_workers(small)) == 2, "the name is free"

    def test_existing_role_is_refused(self, scheduler: Scheduler, role: str) -> None:
        """A second start under one name is an error and leaves the first unchanged."""
        ids = scheduler.create_workers(Job(role=role))
        with pytest.raises(
            errors.RoleExistsError, match=f"role {role!r} already runs with 1 workers"
        ):
            scheduler.create_workers(Job(role=role, replicas=2))
        assert [worker.id for worker in scheduler.get_workers(role)] == ids
        scheduler.delete_workers(role)
        assert scheduler.create_workers(Job(role=role)) == ids, "its name is free again"

    def test_concurrent_starts_of_one_role(self, scheduler: Scheduler, role: str) -> None:
        """One of several concurrent starts under one name succeeds."""
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(scheduler.create_workers, Job(role=role)) for _ in range(4)]
            outcomes = [future.exception() or future.result() for future in futures]
        assert outcomes.count([f"{role}/0"]) == 1
        assert sum(isinstance(outcome, errors.RoleExistsError) for outcome in outcomes) == 3
        assert len(scheduler.get_workers(role)) == 1

    # 4. Errors.

    def test_remote_error_is_complete(self, engine: Engine) -> None:
        """An engine's exception keeps its type, message and traceback, and survives pickling."""
        with pytest.raises(errors.EngineCallError) as caught:
            engine.call("divide")
        error = caught.value
        assert (error.worker_id, error.engine_name, error.method) == (
            engine.worker_id,
            engine.name,
            "divide",
        )
        assert (error.remote_type, error.remote_message) == (
            "ZeroDivisionError",
            "division by zero",
        )
        assert "self.num_calls - self.num_calls" in error.remote_traceback
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert pickle.loads(pickle.dumps(error)).remote_traceback == error.remote_traceback
        assert engine.call("add") == 1, "the worker is usable"

    def test_existing_engine_name_is_refused(self, scheduler: Scheduler, engine: Engine) -> None:
        """An engine name is unique in a worker."""
        with pytest.raises(
            errors.EngineExistsError,
            match=f"{engine.worker_id} already holds an engine {engine.name!r}",
        ):
            Engine.create(scheduler, engine.worker_id, CountingEngine, engine.name)
        assert engine.call("add") == 1, "the first is untouched"

    def test_unknown_names(
        self, scheduler: Scheduler, engine: Engine, shared_workers: list[str]
    ) -> None:
        """Unknown workers, engines, methods and roles raise errors that list the known ones."""
        for worker_id in ("absent/0", "shared/7", "shared/-1", "shared", "shared/", "shared/x", ""):
            with pytest.raises(errors.WorkerNotFoundError) as unknown_worker:
                scheduler.call_engine(worker_id, "add", rpc_timeout=5)
            assert repr(worker_id) in str(unknown_worker.value)
            assert set(shared_workers) <= set(unknown_worker.value.known)
            with pytest.raises(errors.WorkerNotFoundError):
                asyncio.run(scheduler.create_engine(worker_id, CountingEngine))
            with pytest.raises(errors.WorkerNotFoundError):
                asyncio.run(scheduler.set_worker_env(worker_id, {"A": "1"}))
        with pytest.raises(errors.EngineNotFoundError) as unknown_engine:
            scheduler.call_engine(engine.worker_id, "add", "no-such-engine", rpc_timeout=5)
        assert engine.name in unknown_engine.value.known
        assert f"no engine 'no-such-engine' in worker {engine.worker_id}" in str(
            unknown_engine.value
        )
        with pytest.raises(errors.MethodNotFoundError):
            engine.call("no_such_method")
        for of_role in (scheduler.get_workers, scheduler.delete_workers, scheduler.stacks):
            with pytest.raises(
                errors.RoleNotFoundError,
                match=r"no role 'absent' in this scheduler; it has: .*shared",
            ):
                of_role("absent")
        with pytest.raises(errors.RoleNotFoundError):
            scheduler.fork_workers("sibling", "absent")

    @pytest.mark.usefixtures("own_processes")
    def test_dead_worker_fails_its_calls(self, scheduler: Scheduler, role: str, gate: Gate) -> None:
        """All calls of a dead worker fail at once and name the method that ran."""
        (worker_id,) = scheduler.create_workers(Job(role=role))
        engine = Engine.create(scheduler, worker_id, CountingEngine)
        with held(engine, gate) as running:
            queued = [engine.begin("add") for _ in range(3)]
            suspended = engine.begin("async_wait", *gate.files)
            wait_until(lambda: engine.health().num_queued == 3, "calls queue up")
            os.kill(asyncio.run(scheduler.check_health(worker_id)).pid, signal.SIGKILL)
            for future in (running, suspended, *queued):
                with pytest.raises(errors.WorkerFailedError) as caught:
                    future.result(timeout=NOTICE_S)
                assert caught.value.exit_signal == 9
                assert caught.value.running == f"{worker_id}.wait", (
                    "the longest-running call, not the one that raises"
                )
                assert caught.value.running_s is not None
            with pytest.raises(errors.WorkerFailedError):
                asyncio.run(engine.acall("add"))
        assert engine.state is WorkerState.FAILED

    # 5. Health.

    @pytest.mark.parametrize("method", ["wait", "spin"])
    def test_health_during_a_call(
        self, scheduler: Scheduler, engine: Engine, gate: Gate, method: str
    ) -> None:
        """Health and stacks respond during a long call and show the running method."""
        if method == "spin" and scheduler.shares_process:
            pytest.skip(
                "script and engines share one interpreter's lock, so a busy engine slows the "
                "script itself"
            )
        before = engine.health()
        assert (before.running, before.running_s) == (None, None)
        with held(engine, gate, method) as running:
            health = engine.health()
            assert health.running == f"{engine.name}.{method}"
            assert health.running_s is not None
            assert scheduler.get_workers("shared", timeout=LIMIT_S)[0].id == engine.worker_id
            queued = engine.begin("add")
            later = engine.health()
            assert later.running_s is not None
            assert later.running_s > health.running_s
            assert later.num_calls > before.num_calls
            stacks = scheduler.stacks("shared")
            assert 'contract_engine.py", line' in stacks[engine.worker_id]
            assert f"in {method}\n" in stacks[engine.worker_id]
            assert "thread" in stacks["shared/1"]
        running.result(timeout=LIMIT_S)
        queued.result(timeout=LIMIT_S)
        wait_until(lambda: engine.health().running is None, "the thread is idle")

    # 6. No orphans. 7. The driver needs no accelerator.

    @pytest.mark.usefixtures("own_processes")
    def test_no_orphans(self, make_scheduler: Callable[[], Scheduler]) -> None:
        """Deleted workers and those of a killed controller exit with their children."""
        made = base64.b64encode(cloudpickle.dumps(make_scheduler)).decode()
        driver = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, made],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        with driver:
            try:
                assert driver.stdout is not None
                lines = (line for line in driver.stdout if line.startswith(b"{"))
                facts = json.loads(next(lines, b"null"))
                assert facts is not None, "the driver failed; see its error above"
                deleted, kept = facts["pids"]["deleted"], facts["pids"]["kept"]
                wait_until(
                    lambda: not any(map(is_running, deleted)),
                    "deleted workers and their children end",
                    GONE_S,
                )
                assert all(map(is_running, kept))
            finally:
                driver.kill()
        wait_until(
            lambda: not any(map(is_running, kept)),
            "workers and children of a killed driver end",
            GONE_S,
        )
        assert not facts["has_torch"]

    # 8. Isolation.

    def test_two_schedulers_are_isolated(
        self, make_scheduler: Callable[[], Scheduler], engine: Engine
    ) -> None:
        """Names are local to a run, and closing one run does not affect another."""
        with make_scheduler() as other:
            assert other.create_workers(Job(role="shared")) == ["shared/0"]
            mine = Engine.create(other, "shared/0", CountingEngine, "mine")
            assert mine.call("add") == 1
            with pytest.raises(errors.EngineNotFoundError):
                engine.scheduler.call_engine(engine.worker_id, "add", "mine")
            with pytest.raises(errors.EngineNotFoundError):
                other.call_engine("shared/0", "add", engine.name)
        assert engine.call("add") == 1

    @pytest.mark.usefixtures("scheduler")
    def test_use_after_close(self, make_scheduler: Callable[[], Scheduler]) -> None:
        """Use of a closed scheduler raises; close() and deleting all workers are idempotent."""
        closed = make_scheduler()
        closed.close()
        closed.close()
        assert closed.status() == []
        for use in (
            lambda: closed.call_engine("a/0", "add"),
            lambda: asyncio.run(closed.async_call_engine("a/0", "add")),
            lambda: closed.create_workers(Job(role="a")),
            lambda: closed.get_workers("a"),
            lambda: closed.delete_workers("a"),
            lambda: closed.stacks("a"),
            lambda: closed.fork_workers("b", "a"),
        ):
            with pytest.raises(errors.SchedulerClosedError, match="is closed"):
                use()
        closed.delete_workers()

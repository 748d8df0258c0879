"""Tests of scripts in AReaL's spelling; a module has them for its fixture ``scheduler``."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

import helmsman
from helmsman.compat import areal
from helmsman.compat.areal import (
    Job,
    LocalScheduler,
    RayScheduler,
    Scheduler,
    SchedulingSpec,
    SchedulingStrategy,
    Worker,
)
from tests.compat.areal.service import ADDRESS

HERE = "tests.compat.areal.engines"
RESOLVE = SimpleNamespace(
    type="nfs", nfs_record_root="/tmp/areal/name_resolve", etcd3_addr="localhost:2379"
)
EXPERIMENT = SimpleNamespace(
    experiment_name="it's",
    trial_name=None,
    cluster=SimpleNamespace(n_gpus_per_node=2, fileroot=None, name_resolve=RESOLVE),
)
"""The same names as those of the scheduler on processes, from a configuration."""


def make(kind: str, log_dir: Path) -> Scheduler:
    if kind == "local":
        return LocalScheduler([0, 1], str(log_dir), startup_timeout=120.0, experiment_name="it's")
    return RayScheduler(
        startup_timeout=120.0,
        log_dir=log_dir,
        address="local",
        num_cpus=64,
        num_gpus=2,
        exp_config=EXPERIMENT,
    )


def post(address: str, **given: Any) -> dict[str, Any]:
    """Return the answer of a guard."""
    request = urllib.request.Request(address, json.dumps(given).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return dict(json.load(answer))


def runs(process: psutil.Process) -> bool:
    """Whether a process of another parent runs; one that has ended need not be reaped."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_for_end(process: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while runs(process):
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def healthy_pid(host: str, port: int) -> int:
    """Wait until a service answers, and return the id of its process."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://{host}:{port}/health", timeout=30) as answer:
                return int(json.load(answer)["pid"])
        except OSError:
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)


class SchedulerSuite:
    @pytest.fixture
    def rollout(self, scheduler: Scheduler) -> Iterator[str]:
        """A worker with a Rollout under its own id."""
        (worker,) = scheduler.create_workers(Job("rollout", 1, [SchedulingSpec(cpu=1, mem=1)]))
        asyncio.run(scheduler.create_engine(worker, f"{HERE}.Rollout"))
        yield worker
        scheduler.delete_workers("rollout")

    def test_train_controller(self, scheduler: Scheduler) -> None:
        """Workers get environment, engines and a process group; then only the head gets data."""
        cmd = "python -m areal.infra.rpc.rpc_server"
        spec = SchedulingSpec(cpu=4, gpu=1, mem=1, port_count=2, cmd=cmd)
        job = Job(replicas=2, tasks=[spec], scheduling_strategy=SchedulingStrategy(), role="actor")
        assert scheduler.create_workers(job=job) == ["actor/0", "actor/1"]
        workers = scheduler.get_workers(role="actor")
        assert not workers[0].engine_ports
        master_port = int(workers[0].worker_ports[1])

        async def start() -> list[bool]:
            for rank, worker in enumerate(workers):
                env = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": workers[0].ip}
                await scheduler.set_worker_env(worker.id, {**env, "MASTER_PORT": master_port})
                await scheduler.create_engine(
                    worker_id=worker.id,
                    engine=f"{HERE}.Trainer",
                    engine_name=f"actor/{rank}",
                    config={"lr": 1},
                )
            for method, given in (
                ("create_process_group", {"parallel_strategy": "d1t2"}),
                ("initialize", {"ft_spec": {"epochs": 1}}),
                ("is_data_parallel_head", {}),
            ):
                found = await on_all(method, [given, given])
            return found

        async def on_all(method: str, given: list[dict[str, Any]], **options: Any) -> list[Any]:
            return await asyncio.gather(
                *(
                    scheduler.async_call_engine(
                        worker_id=worker.id, method=method, engine_name=worker.id, **each, **options
                    )
                    for worker, each in zip(workers, given, strict=True)
                )
            )

        assert asyncio.run(start()) == [True, False]
        data = {"batch": [1, 2], "scale": 3}
        assert asyncio.run(on_all("train_batch", [data, {}])) == [(0, [1, 2], 3), (1, [1, 2], 3)]
        own = [{"batch": 5}, {"batch": 6}]
        alone = asyncio.run(on_all("train_batch", own, rpc_meta={"broadcast": False}))
        assert alone == [(0, 5, 1), (1, 6, 1)]
        rollout = Mock(address="host:1")  # an instance of its own class, which plain pickle refuses
        received = asyncio.run(on_all("train_batch", [{"batch": rollout}, {}]))
        assert [given.address for _, given, _ in received] == ["host:1", "host:1"]
        meta = [{"meta": "disk"}, {}]
        assert asyncio.run(on_all("update_weights", meta)) == ["disk on 0", "disk on 1"]

        scheduler.delete_workers(role="actor", reverse_order=True)
        with pytest.raises(areal.WorkerNotFoundError):
            scheduler.get_workers("actor")

    def test_call_engine_arguments(self, scheduler: Scheduler, rollout: str) -> None:
        call = scheduler.async_call_engine(
            rollout,
            "wait_for_task",
            engine_name=rollout,
            task_id=7,
            timeout=0.1,
            raise_timeout=False,
            http_timeout=60.0,
        )
        assert asyncio.run(call) == (7, 0.1, False)

    def test_call_engine_http_timeout(self, scheduler: Scheduler, rollout: str) -> None:
        with pytest.raises(areal.EngineCallError, match=r"limit 0\.01 s") as caught:
            scheduler.call_engine(rollout, "wait", None, http_timeout=0.01)
        assert caught.value.worker_id == rollout

    def test_call_engine_retries_warn_once(
        self, scheduler: Scheduler, rollout: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(2):
            assert scheduler.call_engine(rollout, "process", max_retries=3, retry_delay=1.0)
        (warning,) = [each.message for each in caplog.records if "max_retries=3" in each.message]
        assert "is never sent again. Catch EngineCallError" in warning

    def test_call_engine_awaitable_result(self, scheduler: Scheduler, rollout: str) -> None:
        assert scheduler.call_engine(rollout, "coroutine", None, 1) == 2
        with pytest.raises(areal.EngineCallError, match="no such sample") as caught:
            scheduler.call_engine(rollout, "failing")
        cause = caught.value.__cause__
        assert isinstance(cause, helmsman.errors.EngineCallError)
        assert isinstance(cause.__cause__, KeyError)

    def test_colocation_forks(self, scheduler: Scheduler, rollout: str) -> None:
        beside = SchedulingStrategy(type="colocation", target="rollout")
        spec = SchedulingSpec(gpu=1)  # Its devices are those of its target.
        assert scheduler.create_workers(Job("ref", 1, [spec], beside)) == ["ref/0"]
        assert scheduler.fork_workers(role="proxy", target_role="rollout") == ["proxy/0"]
        within = dataclasses.replace(beside, fork=False)
        scheduler.create_workers(Job("critic", 1, [spec], within))
        processes = {}
        for role in ("rollout", "ref", "proxy", "critic"):
            (worker,) = scheduler.get_workers(role)
            assert len(worker.worker_ports) == 2
            name = f"{role} engine"
            asyncio.run(scheduler.create_engine(worker.id, f"{HERE}.Rollout", name, config=None))
            processes[role] = scheduler.call_engine(worker.id, "process", name)
        assert processes["critic"] == processes["rollout"]
        assert len(set(processes.values())) == 3

    def test_errors_of_areal(self, scheduler: Scheduler, rollout: str) -> None:
        with pytest.raises(areal.WorkerNotFoundError) as missing:
            scheduler.call_engine("nowhere/0", "process")
        assert missing.value.worker_id == "nowhere/0"
        with pytest.raises(areal.EngineCallError, match="no public method 'proces'") as unknown:
            scheduler.call_engine(rollout, "proces")
        assert (unknown.value.method, unknown.value.attempt) == ("proces", 1)
        with pytest.raises(areal.EngineImportError) as path:
            asyncio.run(scheduler.create_engine(rollout, "no.such.Engine", "another"))
        assert path.value.import_path == "no.such.Engine"
        with pytest.raises(areal.EngineCreationError, match="already holds"):
            asyncio.run(scheduler.create_engine(rollout, f"{HERE}.Rollout"))
        for job, reason in (
            (Job("rollout", 1), "already runs"),
            (Job("new"), "replicas is 0"),
            (Job("new", 1, [SchedulingSpec(gpu=99)]), "cannot be placed"),
            (Job("new", 1, [SchedulingSpec()] * 3), "number of tasks"),
        ):
            with pytest.raises(areal.WorkerCreationError, match=reason) as refused:
                scheduler.create_workers(job)
            assert refused.value.worker_key == job.role
        nowhere = SchedulingStrategy("colocation", "nowhere")
        with pytest.raises(areal.WorkerNotFoundError):
            scheduler.create_workers(Job("new", 1, scheduling_strategy=nowhere))

    def test_create_engine_timeout(
        self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (worker,) = scheduler.create_workers(Job("slow", 1, [SchedulingSpec(cpu=1, mem=1)]))
        short = helmsman.Timeouts(create_engine_s=0.2, shutdown_s=2)
        monkeypatch.setattr(scheduler.helmsman, "timeouts", short)
        with pytest.raises(areal.EngineCreationError, match="did not finish within") as caught:
            asyncio.run(scheduler.create_engine(worker, f"{HERE}.Slow"))
        assert caught.value.worker_id == worker
        assert isinstance(caught.value.__cause__, TimeoutError)
        monkeypatch.undo()
        scheduler.delete_workers("slow")

    def test_commands_options(self, scheduler: Scheduler) -> None:
        """The process of each worker and of its fork answers with its options."""
        spec = SchedulingSpec(cpu=1, mem=1, cmd=f"python -m {HERE.replace('engines', 'options')}")
        scheduler.create_workers(Job("gateway", 2, [spec]))
        scheduler.fork_workers("beside", "gateway", HERE.replace("engines", "options"))
        for role in ("gateway", "beside"):
            for index, worker in enumerate(scheduler.get_workers(role)):
                where = (worker.ip, int(worker.worker_ports[0]))
                with socket.create_connection(where, timeout=30) as answer:
                    given = json.loads(answer.makefile().read())
                assert given == {
                    "port": worker.worker_ports[0],
                    "experiment_name": "it's",
                    "trial_name": "None",
                    "role": role,
                    "worker_index": str(index),
                    "name_resolve_type": "nfs",
                    "nfs_record_root": "/tmp/areal/name_resolve",
                    "etcd3_addr": "localhost:2379",
                    "fileroot": "None",
                }
        scheduler.delete_workers("beside")
        scheduler.delete_workers("gateway")

    def test_command_fails_to_start(self, scheduler: Scheduler) -> None:
        """AReaL's scripts catch this error, also for a process beside the workers."""
        spec = SchedulingSpec(cpu=1, mem=1, cmd="python -m no_such_module")
        with pytest.raises(areal.WorkerCreationError, match="no_such_module") as caught:
            scheduler.create_workers(Job("gateway", 1, [spec]))
        assert caught.value.worker_key == "gateway"
        scheduler.create_workers(Job("gateway", 1, [SchedulingSpec(cpu=1, mem=1)]))
        with pytest.raises(areal.WorkerCreationError, match="no_such_module") as caught:
            scheduler.fork_workers("beside", "gateway", "no_such_module")
        assert caught.value.worker_key == "beside"
        scheduler.delete_workers("gateway")

    def start_service(self, guard: Worker, index: int, **given: Any) -> psutil.Process:
        """Let a guard start a service, as AReaL's controllers do."""
        address = f"http://{guard.ip}:{guard.worker_ports[0]}"
        lease = post(f"{address}/alloc_ports", count=1)
        host, (port,) = lease["host"], lease["ports"]
        cmd = [sys.executable, "-m", "tests.compat.areal.service"]
        post(
            f"{address}/fork",
            role="router",
            worker_index=index,
            raw_cmd=[*cmd, "--host", host, "--port", str(port)],
            **given,
        )
        return psutil.Process(healthy_pid(host, port))

    @pytest.mark.parametrize("end", ["delete", "kill guard", "kill worker"])
    def test_guard_children_end_with_it(self, scheduler: Scheduler, end: str) -> None:
        cmd = f"{sys.executable} -m tests.compat.areal.guard"
        spec = SchedulingSpec(cpu=1, mem=1, task_type="worker", port_count=2, cmd=cmd)
        tasks = [dataclasses.replace(spec) for _ in range(2)]
        job = Job("guard", 2, tasks, SchedulingStrategy())
        assert scheduler.create_workers(job=job) == ["guard/0", "guard/1"]
        guards = scheduler.get_workers(role="guard", timeout=60)
        address = f"http://{guards[0].ip}:{guards[0].worker_ports[0]}"
        post(f"{address}/configure", config={}, role="guard", rank=0)
        post(f"{address}/set_env", env={"MASTER_ADDR": guards[0].ip})
        killed = self.start_service(guards[0], 0)
        post(f"{address}/kill_forked_worker", role="router", worker_index=0)
        wait_for_end(killed)
        in_pipeline = self.start_service(guards[0], 1)
        detached = self.start_service(guards[0], 2, detached=True)
        other = self.start_service(guards[1], 3)
        assert in_pipeline.environ()["MASTER_ADDR"] == guards[0].ip
        if end == "delete":
            scheduler.delete_workers("guard")
        elif end == "kill guard":
            os.kill(scheduler.helmsman.call_engine("guard/0", "pid", "command"), signal.SIGKILL)
        else:
            (worker,) = (e for e in scheduler.helmsman.status() if e.worker_id == "guard/0")
            assert worker.pid
            os.kill(worker.pid, signal.SIGKILL)
        wait_for_end(in_pipeline)
        wait_for_end(detached)
        assert runs(other) == (end != "delete"), "only the children of that guard end"
        if end != "delete":
            with pytest.raises(areal.WorkerFailedError) as failed:
                scheduler.get_workers("guard")
            assert (failed.value.worker_id, failed.value.exit_code) == ("guard/0", -9)
        scheduler.delete_workers("guard")

    def test_fork_proxy_at_own_address(self, scheduler: Scheduler, rollout: str) -> None:
        scheduler.fork_workers("proxy-rollout", "rollout", "tests.compat.areal.service")
        (proxy,) = scheduler.get_workers("proxy-rollout")
        assert proxy.ip == ADDRESS
        assert healthy_pid(proxy.ip, int(proxy.worker_ports[0]))
        with pytest.raises(areal.EngineCreationError, match="Leave the cmd out, or post"):
            asyncio.run(scheduler.create_engine(proxy.id, f"{HERE}.Rollout", "agent"))
        with pytest.raises(areal.EngineCreationError, match="/set_env at the worker's ip"):
            asyncio.run(scheduler.set_worker_env(proxy.id, {"A": 1}))
        scheduler.delete_workers("proxy-rollout")

    def test_command_of_script(self, scheduler: Scheduler, tmp_path: Path) -> None:
        """A script and any other program get the options, and one port of one."""
        script = tmp_path / "my script.py"
        script.write_text(Path(__file__).with_name("options.py").read_text())
        for program in ("python", "python3.9", f"env A=1 {sys.executable}"):
            spec = SchedulingSpec(cpu=1, mem=1, port_count=1, cmd=f"{program} '{script}'")
            scheduler.create_workers(Job("script", 1, [spec]))
            (worker,) = scheduler.get_workers("script")
            (port,) = worker.worker_ports
            with socket.create_connection((worker.ip, int(port)), timeout=30) as answer:
                given = json.loads(answer.makefile().read())
            assert (given["port"], given["role"]) == (port, "script")
            scheduler.delete_workers("script")
        spec = SchedulingSpec(cpu=1, mem=1, cmd="no_such_program --verbose")
        with pytest.raises(areal.WorkerCreationError, match="no_such_program"):
            scheduler.create_workers(Job("script", 1, [spec]))

    def test_delete_unknown_role_warns(
        self, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
    ) -> None:
        scheduler.delete_workers("unknown")
        assert "delete_workers('unknown') has nothing to delete" in caplog.text


def check_dropped_scheduler(kind: str, folder: Path) -> None:
    """Check that workers end when a scheduler without close() has no references."""
    scheduler = make(kind, folder)
    scheduler.create_workers(Job("dropped", 2, [SchedulingSpec(cpu=1, mem=1)]))
    processes = [psutil.Process(each.pid) for each in scheduler.helmsman.status()]
    del scheduler
    gc.collect()
    psutil.wait_procs(processes, timeout=60)
    assert not [each for each in processes if each.is_running()]

"""A run with a staged fault: ``python staged.py FAULT`` prints the id of the run once it hangs."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from helmsman import (
    Job,
    LocalScheduler,
    RayScheduler,
    RequestOptions,
    RolloutController,
    SamplingParams,
    SchedulingSpec,
    TrainController,
    WeightSync,
)
from helmsman.api.generation import GenerationResult
from helmsman.weights import ViaMemory


class Ranks:
    """An engine with methods that wait in many ways."""

    def join(self, rank: int, size: int, port: int) -> None:
        import torch.distributed as dist

        self.rank = rank
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
        )

    def step(self, late: float = 0.0) -> None:
        """Run a healthy step, in which rank 0 may be late."""
        import torch
        import torch.distributed as dist

        if self.rank == 0:
            time.sleep(late)
        dist.all_reduce(torch.ones(4))

    def missing(self) -> None:
        import torch
        import torch.distributed as dist

        if self.rank == 1:
            time.sleep(3600)
        dist.all_reduce(torch.ones(4))

    def asynchronous(self) -> None:
        """Poll a collective that rank 1 does not enter, so that no stack shows it."""
        import torch
        import torch.distributed as dist

        if self.rank == 1:
            time.sleep(3600)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert work is not None
        while not work.is_completed():
            time.sleep(0.5)

    def disordered(self) -> None:
        import torch
        import torch.distributed as dist

        if self.rank == 0:
            dist.recv(torch.ones(4), src=1)
        else:
            dist.recv(torch.ones(4), src=0)

    def quick(self) -> None:
        return

    def sleep(self) -> None:
        time.sleep(3600)

    def hold_interpreter(self) -> None:
        re.match(r"(a+)+$", "a" * 64 + "b")

    def compute(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def wait_for_lock(self, path: str) -> None:
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)

    def wait_for_peer(self, port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.recv(1)

    def wait_for_thread(self) -> None:
        threading.Event().wait()

    def load(self) -> None:
        from torch.utils.data import DataLoader

        dataset: Any = _Stuck()
        for _ in DataLoader(dataset, num_workers=1):
            pass

    def keep_zombie(self) -> None:
        child = subprocess.Popen(["true"])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with open(os.pipe()[0], "rb") as pipe:
            pipe.read(1)


class _Stuck:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(3600)
        return index


class Answers:
    """A rollout engine that replies at once, and hangs for the prompt [13]."""

    def __init__(self) -> None:
        self.version = 0

    def initialize(self) -> None:
        return

    async def agenerate(self, request: Any) -> GenerationResult:
        if request.prompt_ids == [13]:
            await asyncio.sleep(3600)
        await asyncio.sleep(0.01)
        return GenerationResult(
            request_id=request.request_id,
            token_ids=[1],
            logprobs=[0.0],
            versions=[self.version],
            stop_reason="stop",
        )

    async def abort(self, request_ids: Any) -> None:
        return

    def update_weights(self, weights: Any, version: int) -> int:
        if version >= 3:
            time.sleep(3600)
        self.version = version
        return version

    def get_version(self) -> int:
        return self.version


class Weights:
    """A trainer that has only weights."""

    def __init__(self) -> None:
        self.version = 0

    def create_process_group(self, *_: Any) -> None:
        return

    def initialize(self, *_: Any) -> None:
        return

    def set_version(self, version: int) -> None:
        self.version = version

    def get_version(self) -> int:
        return self.version

    def publish_weights(self, *_: Any) -> dict[str, bytes]:
        return {"w": bytes(100)}


def hangs(work: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Call in a thread, while the script reports its run."""
    threading.Thread(target=work, args=arguments, kwargs=named, daemon=True).start()


@contextlib.contextmanager
def ranks(number: int, preload: Sequence[str] = ()) -> Iterator[tuple[LocalScheduler, list[str]]]:
    with LocalScheduler(preload=preload) as scheduler:
        ids = scheduler.create_workers(
            Job(role="actor", replicas=number, tasks=[SchedulingSpec(cpu=0.5, port_count=1)])
        )
        scheduler.create_engines(ids, Ranks)
        yield scheduler, ids


def call_all(scheduler: LocalScheduler, ids: list[str], method: str, *args: Any) -> None:
    threads = [
        threading.Thread(target=scheduler.call_engine, args=(each, method, None, *args))
        for each in ids
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def join(scheduler: LocalScheduler, ids: list[str]) -> None:
    port = int(scheduler.get_workers("actor")[0].engine_ports[0])
    threads = [
        threading.Thread(
            target=scheduler.call_engine, args=(each, "join", None, rank, len(ids), port)
        )
        for rank, each in enumerate(ids)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(3):
        call_all(scheduler, ids, "step")


def ready(scheduler: LocalScheduler | RayScheduler) -> None:
    print(f"run {scheduler.run_id}", flush=True)


def collective(fault: str) -> None:
    with ranks(2, preload=["torch"]) as (scheduler, ids):
        join(scheduler, ids)
        chosen = ids[:1] if fault == "uncalled" else ids
        method = {"uncalled": "step", "sleeps_in_step": "missing"}.get(fault, fault)
        hangs(call_all, scheduler, chosen, method)
        ready(scheduler)
        time.sleep(3600)


def single(fault: str, *args: Any) -> None:
    with ranks(2) as (scheduler, ids):
        for _ in range(3):
            scheduler.call_engine(ids[1], "quick")
        hangs(scheduler.call_engine, ids[1], fault, None, *args)
        ready(scheduler)
        time.sleep(3600)


def stopped() -> None:
    with ranks(2) as (scheduler, ids):
        hangs(scheduler.call_engine, ids[1], "compute", None, 3600.0)
        pid = next(each.pid for each in scheduler.status() if each.worker_id == ids[1])
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        ready(scheduler)
        time.sleep(3600)


def locked() -> None:
    with tempfile.NamedTemporaryFile() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        single("wait_for_lock", file.name)


def peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        single("wait_for_peer", server.getsockname()[1])


def rollout(fault: str) -> None:
    with LocalScheduler(preload=()) as scheduler:
        job = Job(role="rollout", replicas=2, tasks=[SchedulingSpec(cpu=0.5)])
        with RolloutController(scheduler, Answers, job) as controller:
            controller.generate([[1]] * 8, SamplingParams(max_new_tokens=4))
            if fault == "straggler":
                hangs(controller.generate, [[1], [13]], SamplingParams(max_new_tokens=4))
            elif fault == "paused":
                controller.pause()
                hangs(controller.generate, [[1]], SamplingParams(max_new_tokens=4))
            elif fault == "sync":
                trainer = TrainController(
                    scheduler, Weights, Job(role="actor", tasks=[SchedulingSpec(cpu=0.5)])
                )
                trainer.initialize()
                sync = WeightSync(trainer, controller, ViaMemory())
                for version in (1, 2, 3):
                    trainer.set_version(version)
                    if version == 3:
                        hangs(sync.push)
                    else:
                        sync.push()
            ready(scheduler)
            time.sleep(3600)


@contextlib.contextmanager
def stale_samples(scheduler: LocalScheduler) -> Iterator[None]:
    """Run with two samples of weight version 0 and one of version 2, which is served."""
    spec = SchedulingSpec(cpu=0.5)
    with RolloutController(scheduler, Answers, Job(role="rollout", tasks=[spec])) as controller:
        trainer = TrainController(scheduler, Weights, Job(role="actor", tasks=[spec]))
        trainer.initialize()
        controller.generate([[1], [2]], SamplingParams(max_new_tokens=4))
        trainer.set_version(2)
        WeightSync(trainer, controller, ViaMemory()).push()
        controller.generate([[1]], SamplingParams(max_new_tokens=4))
        yield


def placement() -> None:
    import ray

    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    remote: Any = ray.remote(num_gpus=2)(Ranks)
    holder = remote.remote()
    ray.get(holder.quick.remote())
    print(f"address {ray.get_runtime_context().gcs_address}", flush=True)
    with RayScheduler() as scheduler:
        hangs(scheduler.create_workers, Job(role="rollout", tasks=[SchedulingSpec(cpu=0.5, gpu=1)]))
        ready(scheduler)
        time.sleep(3600)


def unbounded_await() -> None:
    with ranks(1) as (scheduler, ids):
        scheduler.call_engine(ids[0], "quick")
        ready(scheduler)

        async def wait() -> None:
            await asyncio.get_running_loop().create_future()

        asyncio.run(wait())


def stuck_reward() -> None:
    with ranks(1) as (scheduler, ids), socket.create_server(("127.0.0.1", 0)) as server:
        scheduler.call_engine(ids[0], "quick")
        ready(scheduler)
        with socket.create_connection(server.getsockname()[:2]) as judge:
            judge.recv(1)


def stuck_script() -> None:
    with ranks(1) as (scheduler, ids):
        scheduler.call_engine(ids[0], "quick")
        ready(scheduler)
        re.match(r"(a+)+$", "a" * 64 + "b")


def stopped_script() -> None:
    with ranks(1) as (scheduler, _):
        ready(scheduler)
        os.kill(os.getpid(), signal.SIGSTOP)


def starved() -> None:
    """Requests of high priority follow each other, and one of low priority waits."""
    with LocalScheduler(preload=()) as scheduler:
        job = Job(role="rollout", tasks=[SchedulingSpec(cpu=0.5)])
        with RolloutController(scheduler, Answers, job, max_in_flight_per_worker=1) as controller:

            def ask(priority: int) -> Any:
                options = RequestOptions(priority=priority)
                return controller.submit([1], SamplingParams(max_new_tokens=4), options=options)

            pending = [ask(1) for _ in range(8)]
            ask(0)
            ready(scheduler)
            while True:
                pending.append(ask(1))
                pending.pop(0).result()


def stuck_preload() -> None:
    """The forkserver imports a module that waits."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "waits_at_import.py")
        with open(path, "w", encoding="utf-8") as file:
            file.write("import threading\nthreading.Event().wait()\n")
        sys.path.append(folder)
        with LocalScheduler(preload=["waits_at_import"]) as scheduler:
            ready(scheduler)
            scheduler.create_workers(Job(role="actor", tasks=[SchedulingSpec(cpu=0.5)]))


def native_wait() -> None:
    """The script waits in C code of a library."""
    with ranks(1) as (scheduler, ids):
        scheduler.call_engine(ids[0], "quick")
        ready(scheduler)
        gate = ctypes.create_string_buffer(32)
        library = ctypes.CDLL(None)
        library.sem_init(gate, 0, 0)
        library.sem_wait(gate)


def dead_worker() -> None:
    with ranks(2) as (scheduler, ids):
        pid = next(each.pid for each in scheduler.status() if each.worker_id == ids[1])
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        ready(scheduler)
        time.sleep(3600)


def blocked_loop() -> None:
    with LocalScheduler(preload=()) as scheduler:
        job = Job(role="rollout", replicas=2, tasks=[SchedulingSpec(cpu=0.5)])
        with RolloutController(scheduler, Answers, job) as controller:
            controller.pause()  # the callback then runs on the event loop
            future = controller.submit([1], SamplingParams(max_new_tokens=4))
            future.add_done_callback(lambda _: time.sleep(3600))
            ready(scheduler)
            controller.resume()
            controller.generate([[1]], SamplingParams(max_new_tokens=4))


FAULTS: dict[str, Callable[[], None]] = {
    "sleeps_in_step": lambda: collective("sleeps_in_step"),
    "uncalled": lambda: collective("uncalled"),
    "asynchronous": lambda: collective("asynchronous"),
    "disordered": lambda: collective("disordered"),
    "sleep": lambda: single("sleep"),
    "hold_interpreter": lambda: single("hold_interpreter"),
    "wait_for_thread": lambda: single("wait_for_thread"),
    "load": lambda: single("load"),
    "keep_zombie": lambda: single("keep_zombie"),
    "stopped": stopped,
    "locked": locked,
    "peer": peer,
    "straggler": lambda: rollout("straggler"),
    "paused": lambda: rollout("paused"),
    "sync": lambda: rollout("sync"),
    "placement": placement,
    "unbounded_await": unbounded_await,
    "stuck_reward": stuck_reward,
    "stuck_script": stuck_script,
    "stopped_script": stopped_script,
    "dead_worker": dead_worker,
    "starved": starved,
    "stuck_preload": stuck_preload,
    "native_wait": native_wait,
    "blocked_loop": blocked_loop,
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()

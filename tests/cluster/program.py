"""Scripts for ``helmsman up`` in tests: python program.py WHAT [ARGUMENT]."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def count(code: str) -> int:
    """Join the cluster, print its nodes, and end with this code."""
    import helmsman

    cluster = helmsman.initialize()
    ranks = sorted(node.labels["helmsman-rank"] for node in cluster.nodes)
    print(
        f"sees {len(cluster.nodes)} nodes of ranks {ranks} with {dict(cluster.num_devices)}",
        flush=True,
    )
    return int(code)


def busy() -> int:
    """Keep an actor on each node busy forever."""
    import ray

    import helmsman

    cluster = helmsman.initialize()

    class Busy:
        def spin(self) -> None:
            while True:
                pass

        def there(self) -> int:
            return 1

    actors: list[Any] = [
        ray.remote(num_cpus=1, resources={f"node:{node.address}": 0.01})(Busy).remote()
        for node in cluster.nodes
    ]
    print(f"busy on {sum(ray.get([actor.there.remote() for actor in actors]))} nodes", flush=True)
    for actor in actors:
        actor.spin.remote()
    threading.Event().wait()
    return 0


def loses() -> int:
    """Wait until Ray reports the loss of a call on rank 1."""
    import ray

    import helmsman

    (other,) = [node for node in helmsman.initialize().nodes if node.labels["helmsman-rank"] == "1"]

    class Waits:
        def there(self) -> int:
            return 1

        def hang(self) -> None:
            threading.Event().wait()

    actor: Any = ray.remote(num_cpus=1, resources={f"node:{other.address}": 0.01})(Waits).remote()
    ray.get(actor.there.remote())
    call = actor.hang.remote()
    print("the call is made", flush=True)
    try:
        ray.get(call)
    except ray.exceptions.RayActorError:
        print("the call is lost", flush=True)
    threading.Event().wait()
    return 0


def interrupts() -> int:
    """Report whether one SIGINT arrives or two."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    print("waits", flush=True)
    signal.sigwait({signal.SIGINT})
    again = signal.sigtimedwait({signal.SIGINT}, 1.0)
    print("interrupted once" if again is None else "interrupted twice", flush=True)
    return 130


def burst(count: str, stopped_s: str) -> int:
    """Start actors, and stop Ray's head for a while when the first of them is up."""
    import ray

    import helmsman

    helmsman.initialize()

    class Worker:
        def pid(self) -> int:
            return os.getpid()

    actors: list[Any] = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(int(count))]
    calls = [actor.pid.remote() for actor in actors]
    ray.wait(calls, num_returns=1)
    (head,) = [
        pid
        for pid in run_processes()
        if Path(f"/proc/{pid}/comm").read_text().strip() == "gcs_server"
    ]
    os.kill(head, signal.SIGSTOP)
    num_up = len(ray.wait(calls, num_returns=len(calls), timeout=float(stopped_s))[0])
    os.kill(head, signal.SIGCONT)
    print(
        f"{num_up < len(calls)} that workers were starting, and then {len(set(ray.get(calls)))} "
        "are up",
        flush=True,
    )
    return 0


def run_processes() -> list[int]:
    """Return the ids of the processes that the supervisor of this run has started."""
    tag = f"HELMSMAN_WORKER_TAG={os.environ['HELMSMAN_UP_RUN']}/up".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and tag in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def moves() -> int:
    """Run requests on an instance of each node, which move when a node leaves."""
    from helmsman import Job, RolloutController, SchedulingSpec, SupervisionPolicy, make_scheduler
    from tests.unit.controller.rollout.pure_rollout import make_request, tokens_of

    spec = SchedulingSpec(cpu=0.5, gpu=2, node_packing="strict_spread")
    policy = SupervisionPolicy(probe_every_s=0.5)
    with make_scheduler("ray") as scheduler:
        rollout = RolloutController(
            scheduler,
            "tests.unit.controller.rollout.pure_rollout.PureRollout",
            Job(role="rollout", replicas=2, tasks=[spec]),
            (0.2,),
            supervision=policy,
        )
        rollout.initialize()
        futures = [rollout.submit(make_request(f"r{number}", number, 48)) for number in range(8)]
        print(f"generating on {len({worker.ip for worker in rollout.workers})} nodes", flush=True)
        whole = [
            future.result(60).token_ids == tokens_of(number, [0] * 48)
            for number, future in enumerate(futures)
        ]
        print(
            f"{sum(whole)} results are whole, by instances on "
            f"{len({worker.ip for worker in rollout.workers})} nodes",
            flush=True,
        )
    return 0


class Steps:
    """An engine with one method."""

    def step(self) -> None:
        return


def records(log_dir: str) -> int:
    """Call workers on rank 1 once, and wait."""
    from helmsman import Job, RayScheduler, SchedulingSpec

    spec = SchedulingSpec(cpu=0.5, node_labels={"helmsman-rank": "1"})
    with RayScheduler(log_dir=log_dir) as scheduler:
        ids = scheduler.create_workers(Job(role="actor", replicas=2, tasks=[spec]))
        scheduler.create_engines(ids, Steps)
        for each in ids:
            scheduler.call_engine(each, "step")
        print(f"{len(ids)} workers were called", flush=True)
        threading.Event().wait()
    return 0


PROGRAMS = {each.__name__: each for each in (count, busy, burst, loses, interrupts, moves, records)}

if __name__ == "__main__":
    sys.exit(PROGRAMS[sys.argv[1]](*sys.argv[2:]))  # type: ignore[operator]
